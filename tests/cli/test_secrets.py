"""Credentials of data: used, but in no file and in no output; a refreshed signature changes nothing."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kiloword.cli.main import VERBS, main
from servers import BASIC, PLANTED, Guarded
from tars import pairs, write_tar


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is written lies below `tmp_path`; the environment has secrets as well."""
    for folder in ("cache", "tmp", "cwd"):
        (tmp_path / folder).mkdir()
    settings = {
        "KILOWORD_CACHE": str(tmp_path / "cache"),
        "KILOWORD_REMOTE": "backoff=0.001 timeout=5 retries=1 ahead=0",
        "TMPDIR": str(tmp_path / "tmp"),
        "AWS_SECRET_ACCESS_KEY": "plantedsecretkey",
        "HTTP_PROXY": "http://planteduser:plantedproxy@127.0.0.1:9",
        "no_proxy": "*",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path / "cwd")


def tar(folder: Path, first: int = 0, rows: int = 8) -> bytes:
    return write_tar(
        folder / f"{first}.tar", {**pairs(rows, first), f"{first + rows:04d}.png": b"no image"}
    ).read_bytes()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("served")
    files = {"0.tar": tar(folder), "1.tar": tar(folder, 20), "text.tar": b"no tar" * 200}
    with Guarded(files, signed=("0.tar", "1.tar")) as server:
        yield server


def no_secret(folder: Path, *texts: str) -> None:
    """Nothing below a folder, names included, and no text has one of the secrets."""
    for text in texts:
        assert PLANTED not in text
        assert BASIC not in text
    for path in folder.rglob("*"):
        assert PLANTED not in str(path.relative_to(folder))
        if path.is_file():
            raw = path.read_bytes()
            if path.suffix == ".parquet":  # compressed
                table = pq.read_table(path)
                raw += repr((table.to_pylist(), table.schema.metadata)).encode()
            assert PLANTED.encode() not in raw, path
            assert BASIC.encode() not in raw, path


def run(words: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> tuple[int, str]:
    """Exit code and all output of a command, checked to be without secrets, as is all that it wrote."""
    code = 0
    try:
        main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    no_secret(tmp_path, out, err)
    return code, out + err


SMALL = ["--size", "debug", "--batch", "4", "--steps", "2", "--vocab", "300", "--bad-share", "0.5", "--log-every", "1"]


def commands(out: Path, server: Guarded) -> dict[str, list[str]]:
    """One command of every verb, in an order in which each finds what it needs; what would take long ends at once."""
    data, model = server.secret("{0..1}.tar"), str(out / "run/model")
    return {
        "train": ["train", "coca", "--data", data, "--val", server.secret("0.tar"), "--out", str(out / "run"), *SMALL],
        "eval": f"eval spectrum {model} --data {data} --json {out}/e.json --html {out}/e.html".split(),
        "average": ["average", model, model, "--alpha", "0.5", "--out", str(out / "averaged")],
        "embed": ["embed", model, "--data", data, "--out", str(out / "side")],
        "caption": ["caption", model, "--data", data, "--out", str(out / "captions.parquet")],
        "audit": ["audit", data, "--model", model, "--out", str(out / "audit")],
        "mine": ["mine", data, "--features", str(out / "side"), "--out", str(out / "mined")],
        "data": ["data", "stats", data, "--png", str(out / "samples.png")],
        "watch": ["watch", str(out / "run"), "--once"],
        "score": ["score", model, "--images", "no.png", "--texts", "a"],
        "export": ["export", "safetensors", model, "--out", str(out / "exported")],
        "push": ["push", model, "no-repository"],
        "classify": ["classify", model, "--images", "no.png", "--classes", "a", "b"],
        "index": ["index", str(out / "none"), "--model", model, "--out", str(out / "library")],
        "search": ["search", str(out / "library"), "a dog"],
        "serve": ["serve", str(out / "library")],
        "import": ["import", "open_clip", "ViT-B-32", "no.safetensors", "--out", str(out / "imported")],
        "plan": ["plan", "siglip", "--size", "debug", "--samples", "1e6", "--json", str(out / "plan.json")],
        "verify": ["verify", "nothing"],
        "sweep": ["sweep", "clip", "--data", data, *SMALL, "--vary", "optim.lr=1e-3", "--out", str(out / "sweep")],
        "compare": ["compare", str(out / "run"), str(out / "sweep"), "--html", str(out / "compared.html")],
        "quickstart": ["quickstart", "--out", str(out / "quick"), "--steps", "0"],
        "methods": ["methods"],
        "recipes": ["recipes", "show", "llip-b32", "--json", str(out / "recipe.json")],
        "sizes": ["sizes"],
        "bench": f"bench clip --size debug --batch 4 --json {out}/bench.json".split(),
        "doctor": ["doctor"],
    }


REFUSED = {"score", "push", "classify", "index", "search", "serve", "import", "verify", "quickstart"}


@pytest.mark.slow
def test_no_verb_writes_or_prints_a_secret(server: Guarded, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    todo = commands(tmp_path, server)
    assert set(todo) == {verb for group in VERBS.values() for verb in group}, "a verb that this test does not know"
    for verb, words in todo.items():
        code, output = run(words, capfd, tmp_path)
        assert code == (2 if verb in REFUSED else 0), output
    assert (tmp_path / "mined/mine.json").is_file()
    for what, bad in (("index", 0), ("check", 1)):
        assert run(["data", what, server.secret("1.tar")], capfd, tmp_path)[0] == bad
    run([*todo["train"], "--dry-run"], capfd, tmp_path)
    data = json.loads((tmp_path / "run/config.json").read_text())["recipe"]["data"]
    assert data["sources"] == [f"{server.url}/{{0..1}}.tar"]
    server.signature = "refreshed"
    code, output = run([word.replace("plantedsignature", "refreshed") for word in todo["train"]], capfd, tmp_path)
    assert code == 0, output  # the same run
    code, output = run([*todo["embed"][:-1], str(tmp_path / "other")], capfd, tmp_path)
    assert code == 2
    assert f"{server.url}/0.tar: the server answers 403" in output


def options_of(words: list[str], capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The flags of a verb whose value is text or a path, as its help lists them, settings of settings included."""
    with pytest.raises(SystemExit):
        main([*words[:2], "--help-all"] if words[0] in ("train", "plan") else [words[0], "--help"])
    return re.findall(r"^\W*(--[\w.-]+) .*?(?:STR|PATH)\b", capfd.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_no_option_gives_a_secret_away(server: Guarded, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The URL as the value of every option of every verb, positional ones included."""
    url, todo, asked = server.secret("0.tar"), commands(tmp_path, server), Counter[str]()
    for verb in ("train", "embed"):
        assert run(todo[verb], capfd, tmp_path)[0] == 0
    for verb, words in todo.items():
        for n in range(1, len(words)):
            if not words[n].startswith("--"):
                run([*words[:n], url, *words[n + 1 :]], capfd, tmp_path)
        for option in set(options_of(words, capfd)) - set(words):
            asked[verb] += 1
            run([*words, option, url], capfd, tmp_path)
            run([*words, f"{option}={url}"], capfd, tmp_path)
    assert asked["train"] > 5
    assert asked["mine"] > 0


def broken(server: Guarded, name: str) -> None:
    if name in ("401", "403", "404", "500", "drop", "hang", "short"):
        server.always = {"0.tar": name}
    elif name == "planted reason":
        server._head = lambda request, status, headers: request.wfile.write(  # type: ignore[method-assign]
            b"HTTP/1.1 418 plantedsignature planted%2Fpass \x1b[31m\r\nContent-Length: 0\r\n\r\n"
        )
    else:
        server.files["0.tar"] = server.files["text.tar"]


@pytest.mark.parametrize("fault", ["403", "404", "500", "drop", "short", "text", "planted reason"])
def test_no_error_gives_a_secret_away(
    fault: str, server: Guarded, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "retries=1 backoff=0 timeout=0.3 ahead=0")
    broken(server, fault)
    url = server.secret("0.tar")
    for words in (["data", "check", url], ["train", "siglip", "--data", url, "--out", str(tmp_path / "r"), *SMALL]):
        code, output = run(words, capfd, tmp_path)
        assert code == 2
        assert f"{server.url}/0.tar" in output
        assert "\x1b" not in output
    for path in ("0.csv", "0.parquet", "0.png", "x", ""):
        assert run(["data", "check", server.secret(path)], capfd, tmp_path)[0] == 2


def test_an_interruption(server: Guarded, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C while a request waits for its answer."""
    asked: list[Any] = []

    def answer(request: Any) -> None:
        if not asked:
            asked.append(request)
            os.kill(os.getpid(), signal.SIGINT)
        request.close_connection = True

    server.answer = answer  # type: ignore[method-assign]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without it
    try:
        code, output = run(["data", "check", server.secret("0.tar")], capfd, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130, output
