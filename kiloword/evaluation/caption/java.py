"""What pycocoevalcap has in Java: the treebank tokenizer, METEOR and SPICE. Nothing is downloaded, nothing can hang."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Timer

TOKENIZER = "tokenizer/stanford-corenlp-3.4.1.jar"
METEOR = "meteor/meteor-1.5.jar"
SPICE = "spice/spice-1.0.jar"
MODELS = ("spice/lib/stanford-corenlp-3.6.0.jar", "spice/lib/stanford-corenlp-3.6.0-models.jar")


def folder() -> Path | None:
    """Where pycocoevalcap lies, None where it is not installed."""
    spec = find_spec("pycocoevalcap")
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def missing(*files: str) -> str | None:
    """Why files of pycocoevalcap cannot be run, a clause; None: they can be."""
    package = folder()
    if package is None:
        return "the package pycocoevalcap is not installed (pip install 'kiloword[eval]')"
    if shutil.which("java") is None:
        return "there is no java on the PATH"
    lost = [file for file in files if not (package / file).is_file()]
    return f"{package / lost[0]} is not there" if lost else None


def no_spice() -> str | None:
    """Why SPICE cannot be computed, a clause; None: it can be. Looks, and downloads nothing."""
    lost = missing(SPICE, *MODELS)
    if lost is None or not lost.endswith("is not there"):
        return lost
    return (
        f"{lost}: it needs Stanford's models, which pycocoevalcap fetches at first use and kiloword never does "
        "(stanford-corenlp-full-2015-12-09.zip of nlp.stanford.edu/software holds both jars)"
    )


def _file(what: str, name: str) -> Path:
    """A file of the package. Raises: ValueError with a sentence."""
    why, package = missing(name), folder()
    if why is not None or package is None:
        raise ValueError(f"{what} cannot run: {why}.")
    return package / name


def ptb(captions: Sequence[str], limit: float) -> list[str]:
    """Lines of tokens in lower case, punctuation among them, of captions without line breaks."""
    command = ["java", "-cp", str(_file("the tokenizer ptb", TOKENIZER)), "edu.stanford.nlp.process.PTBTokenizer"]
    output = _output("the tokenizer ptb", [*command, "-preserveLines", "-lowerCase"], "\n".join(captions) + "\n", limit)
    lines = output.removesuffix("\n").split("\n")
    if len(lines) != len(captions):
        raise ValueError(f"the tokenizer ptb gave {len(lines)} lines for {len(captions)} captions; use tokenizer own.")
    return [line.rstrip() for line in lines]


def meteor(candidates: Sequence[str], references: Sequence[Sequence[str]], limit: float) -> tuple[float, list[float]]:
    """METEOR 1.5 of tokenized captions, of the whole set and of every image.

    It answers line by line: statistics of each image first, then the scores of them all.
    Raises: ValueError when Java, the package or an answer is missing, or it takes longer than `limit` seconds.
    """
    command = ["java", "-Dfile.encoding=UTF-8", "-Xmx2G", "-jar", str(_file("METEOR", METEOR))]
    with _talk("METEOR", [*command, "-", "-", "-stdio", "-l", "en", "-norm"], limit) as process:
        lines = (" ||| ".join(map(_plain, [*r, c])) for c, r in zip(candidates, references, strict=True))
        stats = [_ask(process, f"SCORE ||| {line}") for line in lines]
        first = _ask(process, " ||| ".join(["EVAL", *stats]))
        scores = [_number(line) for line in (first, *(_line(process) for _ in candidates))]
    return scores[-1], scores[:-1]


def _plain(caption: str) -> str:
    """Without what METEOR separates captions by."""
    return caption.replace("|||", "").replace("  ", " ")


def spice(candidates: Sequence[str], references: Sequence[Sequence[str]], limit: float) -> float:
    """SPICE (F of all tuples, mean over images) of tokenized captions. Raises: ValueError as `meteor`."""
    why = no_spice()
    if why is not None:
        raise ValueError(f"SPICE cannot be computed: {why}.")
    jar = _file("SPICE", SPICE)
    rows = [
        {"image_id": i, "test": c, "refs": list(r)} for i, (c, r) in enumerate(zip(candidates, references, strict=True))
    ]
    with TemporaryDirectory() as scratch:
        asked, answered = Path(scratch) / "in.json", Path(scratch) / "out.json"
        asked.write_text(json.dumps(rows), encoding="utf-8")
        _output("SPICE", ["java", "-Xmx8G", "-jar", str(jar), str(asked), "-out", str(answered), "-silent"], "", limit)
        if not answered.is_file():
            raise ValueError("SPICE wrote no scores; it is known to need Java 8.")
        found = [float(row["scores"]["All"]["f"]) for row in json.loads(answered.read_text(encoding="utf-8"))]
    return sum(found) / len(found)


def _output(what: str, command: Sequence[str], text: str, limit: float) -> str:
    """What a program prints when it reads `text`. Raises: ValueError when it fails or takes too long."""
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{what} {_too_long(limit)}") from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise ValueError(f"{what} failed: {why[0]}")
    return done.stdout.decode()


def _too_long(limit: float) -> str:
    return f"did not end within {limit:g} seconds; give it more, or leave it out."


@contextmanager
def _talk(what: str, command: Sequence[str], limit: float) -> Iterator[subprocess.Popen[bytes]]:
    """A program to ask line by line, killed at the end and after `limit` seconds, when its answers become empty."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    late = Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = Timer(limit, stop)
    timer.start()
    try:
        yield process
    except (ValueError, BrokenPipeError) as error:
        reason = "it ended without an answer" if isinstance(error, BrokenPipeError) else error
        why = _too_long(limit) if late.is_set() else f"failed: {reason}."
        raise ValueError(f"{what} {why}") from None
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def _ask(process: subprocess.Popen[bytes], line: str) -> str:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n".encode())
    process.stdin.flush()
    return _line(process)


def _line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().decode(errors="replace").strip()
    if not line or line.startswith("Error"):
        raise ValueError(line or "it ended without an answer")
    return line


def _number(line: str) -> float:
    """Raises: ValueError unless the line is a finite number."""
    value = float(line)
    if not math.isfinite(value):
        raise ValueError(f"it answered {line}")
    return value
