"""A dry run prints what the run that follows has, and dies of what would end it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from commands import refused
from kiloword.cli.main import main
from kiloword.methods.registry import PRESETS
from tars import pairs, photo, write_tar

SMALL = ("--batch", "8", "--steps", "1", "--size", "debug", "--vocab", "300", "--log-every", "1")
MORE = {"fff": ("--settings.positives", "annotated")}
QUICK = ("llip", "prolip")  # the slots that change the model


def train(*words: object) -> None:
    main(["train", *map(str, words)])


def values(line: str) -> dict[str, str]:
    """The `name=value` of a line."""
    return dict(re.findall(r"(\S+)=(\S+)", line))


def planned(output: str) -> dict[str, str]:
    """The lines of a dry run by their first word, continued ones joined."""
    lines: dict[str, str] = {}
    name = ""
    for line in output.splitlines():
        name = line[:10].strip() or name
        lines[name] = f"{lines.get(name, '')} {line[11:]}"
    return lines


def is_at(value: str, stored: Any) -> bool:
    """Whether what was printed says what `config.json` says."""
    if isinstance(stored, list):
        return value == (",".join(map(str, stored)) or "none")
    return value == str(stored) if isinstance(stored, bool | str) else float(value) == pytest.approx(stored, rel=1e-5)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PRESETS]
)
def test_figures_are_those_of_the_run(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = "scenes:train?n=64&task=vqa" if method == "vqa" else "scenes?n=64"
    words = (method, "--data", data, *SMALL, *MORE.get(method, ()), "--out", tmp_path / "run")
    words = (*words, "--freeze", "image", "--unfreeze", "0")
    train(*words, "--dry-run")
    plan = planned(capsys.readouterr().out)
    train(*words)
    assert "from step 0 on, image 1, image 0 are trained" in capsys.readouterr().err
    file = json.loads((tmp_path / "run" / "config.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shapes = {n: [*x.shape] for n, x in load_file(tmp_path / "run" / "model" / "model.safetensors").items()}
    for part in ("image", "text", "head"):
        printed = values(plan[part])
        assert printed
        for name, value in printed.items():
            assert is_at(value, file["model"][part][name.replace("-", "_")]), (part, name)
    image = file["model"]["image"]
    assert ("image_tower.uncertainty_token" in shapes) == image["uncertainty_token"]
    assert shapes.get("image_tower.extra_tokens", [0])[0] == image["extra_tokens"]
    assert shapes["text_tower.tokens"][0] == file["model"]["text"]["vocab"]
    total = int(plan["model"].split("debug, ")[1].split(" parameters")[0].replace(",", ""))
    assert total == sum(math.prod(shape) for shape in shapes.values())
    parts = dict(re.findall(r"([a-z][a-z ]*) ([\d,]+)(?:,|$)", plan["model"].split(": ")[1].strip()))
    assert sum(int(count.replace(",", "")) for count in parts.values()) == total
    assert {"image tower", "text tower", "head"} <= parts.keys()
    assert f"1 steps of 8 images, {rows[-1]['epoch']:.1f} epochs" in plan["length"]
    cut = f", {rows[0]['truncated']} cut" if rows[0]["truncated"] else ""
    assert plan["read"].strip() == f"8 images of the first batch, {rows[0]['captions']} captions{cut}"
    for name, value in values(plan["optimizer"]).items():
        assert is_at(value, file["recipe"]["optim"][name.replace("-", "_")]), name


def folder(at: Path, kind: str) -> Path:
    """Images without captions, or with class labels alone."""
    at.mkdir()
    for n in range(40):
        (at / f"{n}.png").write_bytes(photo(n))
        if kind == "classes":
            (at / f"{n}.cls").write_text(str(n % 3))
    return at


@pytest.mark.parametrize(("flag", "kind"), [("--data", "bare"), ("--val", "bare"), ("--val", "classes")])
def test_data_that_would_end_the_run_end_the_dry_run(
    flag: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = () if flag == "--data" else ("--data", "scenes?n=64")
    words = ("clip", *data, flag, folder(tmp_path / "images", kind), *SMALL, "--out", tmp_path / "run")
    dry, wet = (refused(capsys, "train", *words, *more).splitlines()[-1] for more in (("--dry-run",), ()))
    assert "no caption" in dry
    assert dry == wet
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # before the first step


def test_lines_of_a_dry_run_that_are_not_always_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ("clip", "--data", "scenes?n=64", "--val", "scenes:test?n=7", *SMALL, "--out", out)
    train(*words, "--micro", "2", "--precision", "bf16", "--freeze", "image", "--unfreeze", "0.9", "--dry-run")
    plan = planned(capsys.readouterr().out)
    assert re.match(r" frozen image: .*image tower 0 of .*step 1 on$", plan["tuning"])
    for line, says in (("val", "7 images"), ("data", "64 images"), ("ranks", "4 x 2 images"), ("device", "(as given)")):
        assert says in plan[line], line
    assert plan["augment"].strip() == "none"
    (out / "state").mkdir(parents=True)
    train(*words, "--dry-run")
    assert "resumes" in planned(capsys.readouterr().out)["out"]
    assert "resumes" not in plan["out"]
    damaged = write_tar(tmp_path / "damaged.tar", {**pairs(8), "0003.png": b"", "0005.png": b""})
    train("clip", "--data", damaged, *SMALL, "--bad-share", "0.5", "--dry-run")
    assert ", 2 bad samples" in planned(capsys.readouterr().out)["read"]
