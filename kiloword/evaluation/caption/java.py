"""What pycocoevalcap has in Java: the treebank tokenizer, METEOR and SPICE. Nothing is downloaded, nothing can hang."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from kiloword.errors import needs

TOKENIZER = "tokenizer/stanford-corenlp-3.4.1.jar"
METEOR = "meteor/meteor-1.5.jar"
SPICE = "spice/spice-1.0.jar"
MODELS = ("spice/lib/stanford-corenlp-3.6.0.jar", "spice/lib/stanford-corenlp-3.6.0-models.jar")


def folder() -> Path | None:
    """The folder of pycocoevalcap; None where it is not installed."""
    spec = find_spec("pycocoevalcap")
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def missing(*files: str) -> str | None:
    """Why files of pycocoevalcap cannot be run, a clause; None: they can be."""
    package = folder()
    if package is None:
        return needs("it", "pycocoevalcap", "eval")
    if shutil.which("java") is None:
        return "there is no java on the PATH"
    lost = next((package / file for file in files if not (package / file).is_file()), None)
    return f"{lost} is not there" if lost else None


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

    It answers a line for each line: first the statistics of every image, then, from all of these, the scores.
    Raises: ValueError when Java, the package or an answer is missing, or one of the two runs exceeds `limit` seconds.
    """
    command = ["java", "-Dfile.encoding=UTF-8", "-Xmx2G", "-jar", str(_file("METEOR", METEOR))]
    pairs = zip(candidates, references, strict=True)
    asked = ["SCORE ||| " + " ||| ".join(map(_plain, [*of_image, caption])) for caption, of_image in pairs]
    command += ["-", "-", "-stdio", "-l", "en", "-norm"]
    statistics = _answers(_output("METEOR", command, "\n".join(asked) + "\n", limit), len(asked))
    output = _output("METEOR", command, " ||| ".join(["EVAL", *statistics]) + "\n", limit)
    *scores, total = map(_number, _answers(output, len(asked) + 1))
    return total, scores


def _answers(output: str, expected: int) -> list[str]:
    """The lines of METEOR's output. Raises: ValueError for errors and for another number of lines."""
    lines = output.splitlines()
    error = next((line for line in lines if line.startswith("Error")), None)
    if error or len(lines) != expected:
        raise ValueError(f"METEOR failed: {error or f'it gave {len(lines)} answers to {expected} questions'}.")
    return lines


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
        scores = [float(row["scores"]["All"]["f"]) for row in json.loads(answered.read_text(encoding="utf-8"))]
    return sum(scores) / len(scores)


def _output(what: str, command: Sequence[str], text: str, limit: float) -> str:
    """The output of a program for the input `text`. Raises: ValueError when it fails or takes too long."""
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{what} did not end within {limit:g} seconds; give it more, or omit it.") from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise ValueError(f"{what} failed: {why[0]}")
    return done.stdout.decode(errors="replace")


def _number(line: str) -> float:
    """Raises: ValueError unless the line is a finite number."""
    try:
        value = float(line)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"METEOR failed: it answered {line!r}.")
    return value
