"""Check pages against WCAG 2.2 A and AA by axe-core in a Chromium without a window: `make accessibility` calls this.

    python tools/accessibility.py FOLDER|URL[#PATH] ...     such as build/demo site#methods.html http://127.0.0.1:80/

A folder is served on loopback. Each page is checked at the width of a desktop and of a phone, light and dark. Prints
each violation with its first elements, console errors, and pages that scroll sideways; exit code 1 if there is any.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from browser import Browser, served

AXE = Path(__file__).resolve().parents[1] / "demo" / "node_modules" / "axe-core" / "axe.min.js"
WINDOWS = ((1280, 800), (390, 844))
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
SHOWN = 4  # elements of a violation


def check(browser: Browser, address: str, ready: str = "true") -> list[str]:
    """What is wrong with a page, one line each. Args: ready: an expression that is true once it can be checked."""
    found = []
    for width, height in WINDOWS:
        for dark in (False, True):
            browser.emulate(width, height, dark)
            browser.open(address)
            browser.wait(ready)
            where = f"{address} {width} px {'dark' if dark else 'light'}"
            if browser.evaluate("document.documentElement.scrollWidth > innerWidth"):
                found.append(f"{where}: scrolls sideways")
            found += [f"{where}: console: {problem}" for problem in browser.problems]
            browser.evaluate(AXE.read_text(encoding="utf-8") + ";0")
            found += [f"{where}: {line}" for line in _violations(browser)]
    return found


def _violations(browser: Browser) -> list[str]:
    options = json.dumps({"runOnly": RULES, "resultTypes": ["violations"]})
    violations: list[dict[str, Any]] = browser.evaluate(f"axe.run(document, {options}).then((r) => r.violations)")
    lines = []
    for one in violations:
        nodes = one["nodes"]
        shown = "; ".join(f"{node['target'][-1]} {_colours(node)}".strip() for node in nodes[:SHOWN])
        lines.append(f"{one['id']} ({one['impact']}, {len(nodes)} elements): {one['help']}: {shown}")
    return lines


def _colours(node: dict[str, Any]) -> str:
    """The colours of an element whose contrast is too low."""
    data = next((one["data"] for one in node["any"] if one["id"] == "color-contrast" and one["data"]), None)
    return f"({data['fgColor']} on {data['bgColor']}: {data['contrastRatio']})" if data else ""


def main(words: list[str]) -> int:
    """The command line. Returns: an exit code."""
    if not words or not AXE.is_file():
        what = "axe-core is missing: run make demo-packages" if words else (__doc__ or "")
        print(what, file=sys.stderr)
        return 2
    wrong = 0
    with Browser() as browser:
        browser.before("localStorage.clear()")  # where sites keep the colours that were shown last
        for word in words:
            place, _, path = word.partition("#")
            is_url = place.startswith(("http://127.0.0.1", "http://localhost"))
            if not is_url and not Path(place).is_dir():
                print(f"{place} is neither a folder nor an address on loopback.", file=sys.stderr)
                return 2
            with nullcontext(place) if is_url else served(Path(place)) as address:
                lines = check(browser, address + path, "document.documentElement.dataset.state !== 'loading'")
            print(*(lines or [f"{word}: no violation"]), sep="\n")
            wrong += len(lines)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
