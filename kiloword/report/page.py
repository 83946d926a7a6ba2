"""The page around the elements, and writing it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from kiloword.checkpoint.files import replacing
from kiloword.report.style import style_sheet

# The reader's browser itself refuses every request: what is missing shows at once instead of working by luck.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
# Control characters, those that turn the direction of all that follows, and lone surrogates, which no encoding takes.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def page(title: str, intro: str, sections: Sequence[tuple[str, str]]) -> str:
    """A whole HTML document without any outside reference.

    Args: title and intro are plain text, a blank line in intro starts a new paragraph;
    sections are (heading in plain text, HTML made by the other functions).
    What would turn or hide text of the page, wherever it came from, stands there as an escape such as \\u202e.
    """
    opening = "".join(f"<p>{escape(part.strip())}</p>" for part in intro.split("\n\n") if part.strip())
    body = "".join(
        f'<section aria-labelledby="s{i}"><h2 id="s{i}">{escape(heading)}</h2>{html}</section>'
        for i, (heading, html) in enumerate(sections, start=1)
    )
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{style_sheet()}</style>\n</head>\n<body><main>\n"
        f"<header><h1>{escape(title)}</h1>{opening}{_contents([h for h, _ in sections])}</header>\n"
        f"{body}\n</main></body>\n</html>\n"
    )
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), html)


def write(path: str | Path, html: str) -> None:
    """Write a page so that the file is either the old one or the whole new one.

    Errors: ValueError when the folder cannot be made or the file cannot be written.
    """
    target = Path(path)
    try:
        with replacing(target) as file:
            file.write(html.encode())
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror}; choose another folder or make room") from error


def _contents(headings: Sequence[str]) -> str:
    if len(headings) < 3:
        return ""
    links = "".join(f'<li><a href="#s{i}">{escape(h)}</a></li>' for i, h in enumerate(headings, start=1))
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'
