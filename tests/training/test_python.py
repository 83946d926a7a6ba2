"""`kiloword.train`: the same runs as the command, from paths and from data sets in Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import kiloword
from kiloword.cli.main import main
from kiloword.training.log import read_metrics
from tars import encode, noise

SMALL: dict[str, Any] = {"size": "debug", "steps": 2, "batch": 4, "workers": 0, "quiet": True}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    for n in range(6):
        (tmp_path / f"{n}.png").write_bytes(encode(noise(40, 50, n)))
    rows = [f"{n}.png,thing {n}" for n in range(6)]
    (tmp_path / "photos.csv").write_text("\n".join(["image,caption", *rows]))
    return tmp_path / "photos.csv"


def weights(out: Path) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in load_file(out / "model" / "model.safetensors").items()}


def test_a_table_gives_the_weights_of_the_command(table: Path) -> None:
    by_call, by_command = table.parent / "call", table.parent / "command"
    more: dict[str, Any] = {"val": table, "optim": {"lr": 0.01}, "settings": {"bias": -8.0}}
    words = f"--data {table} --val {table} --out {by_command} --size debug --steps 2 --batch 4 --workers 0"
    main(["train", "siglip", *words.split(), "--optim.lr", "0.01", "--settings.bias", "-8.0"])
    kiloword.train(str(table), "siglip", out=by_call, **SMALL, **more)
    assert '"command": ""' in (by_call / "history.jsonl").read_text()  # the one before has ended
    assert weights(by_call) == weights(by_command)
    assert (by_call / "config.json").read_text() == (by_command / "config.json").read_text()


def test_the_same_call_resumes_and_another_is_refused(table: Path) -> None:
    out = table.parent / "run"
    trained = kiloword.train([table], "clip", out=out, **SMALL)
    again = kiloword.train([table], "clip", out=out, **SMALL)
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [2]
    image = table.parent / "0.png"
    scores = [model.score([image], ["thing 0"]).tolist() for model in (trained, again, kiloword.load(out))]
    assert scores[0] == scores[1] == scores[2]
    with pytest.raises(ValueError, match="seed"):
        kiloword.train([table], "clip", out=out, seed=1, **SMALL)
    kiloword.train([table], "clip", out=out, extend=True, **SMALL | {"steps": 3})
    assert read_metrics(out / "metrics.jsonl")[-1]["step"] == 3


PAIRS = [(noise(40, 50, n), [f"thing {n}", "a thing"]) for n in range(6)]
FORMS = {
    "pairs": PAIRS,
    "columns": [{"id": n, "image": image, "captions": texts} for n, (image, texts) in enumerate(PAIRS)],
    "other names": [{"label": 3, "text": texts, "img": image} for image, texts in PAIRS],
}


@pytest.mark.parametrize("form", FORMS)
def test_data_sets_in_python_give_the_same_weights_in_every_form(form: str, tmp_path: Path) -> None:
    for name, rows in (("pairs", PAIRS), (form, FORMS[form])):
        kiloword.train(rows, out=tmp_path / name, **SMALL)
    assert weights(tmp_path / form) == weights(tmp_path / "pairs")


def test_a_run_starts_from_a_model_and_joins_captions(tmp_path: Path) -> None:
    kiloword.train(PAIRS, out=tmp_path / "first", **SMALL)
    model = kiloword.train(PAIRS, "clip+compose", out=tmp_path / "second", init=tmp_path / "first" / "model", **SMALL)
    assert model.file.method == "clip+compose"


@pytest.mark.parametrize(
    ("data", "settings", "says"),
    [
        ("none.csv", {}, "none.csv: no such file"),
        ([], {}, "empty"),
        (7, {}, "an int"),
        ({"image": "a.png"}, {}, "a dict"),
        ([{"image": "a.png"}], {}, "the columns image"),
        (PAIRS, {"stpes": 3}, "--stpes"),
        (PAIRS, {"optim": {"name": "sgd"}}, "--optim.name"),
        (PAIRS, {"steps": 0}, "--steps 0"),
        (PAIRS, {"method": "siglop"}, "siglip"),
        (PAIRS, {"val": PAIRS}, "val is tuple"),
        (PAIRS, {"dry_run": True}, "kiloword train --dry-run"),
        (PAIRS, {"keep": "none.parquet"}, "none.parquet"),
    ],
)
def test_refusals_of_the_command_are_value_errors(
    data: Any, settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        kiloword.train(data, out=tmp_path / "run", **SMALL | settings)
    assert not (tmp_path / "run" / "model").exists()


def test_torch_waits_for_the_first_call() -> None:
    code = "import sys, kiloword; print(dir(kiloword).count('train'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n"
