"""Settings that cannot work, or that another setting leaves without effect, are refused before the work."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kiloword.cli.main import main
from kiloword.model.trunks.lite import EfficientNetLite
from tars import pairs, write_tar

DEBUG = "--size debug --steps 2 --workers 0 --device cpu --quiet"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tar(tmp_path_factory.mktemp("data") / "0.tar", pairs(16))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    out = tmp_path_factory.mktemp("model")
    main(f"train siglip --data {data} --out {out} --batch 8 --vocab 300 {DEBUG}".split())
    return out / "model"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, data: Path, model: Path) -> Path:
    out = tmp_path_factory.mktemp("store") / "f"
    main(f"embed {model} --data {data} --out {out} --workers 0 --device cpu".split())
    return out


def run(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str]:
    """Exit code and messages of a command."""
    capsys.readouterr()
    try:
        code = main(words.split()) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    return code, capsys.readouterr().err


@pytest.mark.parametrize("method", ["clip", "siglip", "llip", "coca", "pcme++", "clip-c", "siglip+supcon", "slip"])
def test_one_pair_a_batch_has_no_negatives(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    words = f"train {method} --data {data} --out {tmp_path / 'run'} --vocab 300 {DEBUG} --batch"
    code, told = run(capsys, f"{words} 1")
    assert code == 2
    assert "--batch 1" in told
    assert not (tmp_path / "run").exists()
    assert run(capsys, f"{words} 1 --dry-run")[0] == 2
    assert run(capsys, f"{words} 2 --dry-run")[0] == 0


def test_batches_of_one_pair_that_learn(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Micro-batches of a larger batch; captions alone."""
    assert (
        run(capsys, f"train clip --data {data} --out {tmp_path / 'm'} --vocab 300 {DEBUG} --batch 8 --micro 1")[0] == 0
    )
    words = f"train coca --data {data} --out {tmp_path / 'c'} --vocab 300 {DEBUG} --batch 1"
    assert run(capsys, f"{words} --settings.contrast-weight 0")[0] == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "m" / "metrics.jsonl").read_text().splitlines()]
    assert losses
    assert min(losses) > 0.5


USELESS = [  # words of train, what the message names
    ("--init MODEL --vocab 500", "--vocab"),
    ("--init MODEL --vocab 500 --dry-run", "--vocab"),
    ("--tokenizer clip --vocab 500 --size debug", "--vocab"),
    ("--tokenizer siglip --vocab 500 --size debug", "--vocab"),
    ("--tokenizer FILE --vocab 500 --size debug", "--vocab"),
    ("--captions all --first-captions --size debug", "--first-captions"),
    ("--init MODEL --freeze text --optim.text-lr 0.5", "--optim.text-lr"),
    ("--image-tower efficientnet-lite0 --optim.trunk-lr 0.5", "--optim.trunk-lr"),
    ("--features STORE --size debug", "teacher"),
]


@pytest.mark.parametrize(("words", "named"), USELESS)
def test_settings_of_train_without_effect(
    tmp_path: Path, data: Path, model: Path, store: Path, capsys: pytest.CaptureFixture[str], words: str, named: str
) -> None:
    for name, path in (("MODEL", model), ("STORE", store), ("FILE", model / "tokenizer.json")):
        words = words.replace(name, str(path))
    code, told = run(capsys, f"train clip --data {data} --out {tmp_path / 'run'} --batch 8 --steps 2 {words}")
    assert code == 2
    assert named in told
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    "words",
    [
        "--init MODEL",
        "--init MODEL --freeze text --unfreeze 0.5 --optim.text-lr 0.5",
        "--captions 2 --first-captions --size debug --vocab 300",
    ],
)
def test_settings_of_train_with_effect(
    tmp_path: Path, data: Path, model: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    words = words.replace("MODEL", str(model))
    assert (
        run(capsys, f"train clip --data {data} --out {tmp_path / 'run'} --batch 8 --steps 2 {words} --dry-run")[0] == 0
    )


def test_settings_of_other_verbs_without_effect(
    tmp_path: Path, data: Path, model: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"key": ["0000"], "caption": ["more"]}), tmp_path / "extra.parquet")
    state = EfficientNetLite("efficientnet-lite0").state_dict()
    names = {name: ["_" * (not part.isdecimal()) + part for part in name.split(".")] for name in state}
    state = {".".join([*p[:-1], p[-1][1:]]).replace("_layers.", "_blocks."): state[name] for name, p in names.items()}
    torch.save(state, tmp_path / "lite0.pth")
    tower = f"efficientnet-lite0:{tmp_path / 'lite0.pth'}"
    out = f"--out {tmp_path / 'out'} --device cpu"
    every = "--p1 0.3 --p2 0.9 --p3 0.9 --p1-text 0.2"
    for words, named in (
        (
            f"embed {tower} --tokens --data {data} --extra-captions {tmp_path / 'extra.parquet'} {out}",
            "--extra-captions",
        ),
        (f"audit {data} --model {model} --features {store} --image-features {store} {out}", "--image-features"),
        (f"mine {data} --features {store} --calibrate {every} {out}", "--calibrate"),
    ):
        code, told = run(capsys, words)
        assert code == 2, words
        assert named in told
        assert not (tmp_path / "out").exists()
    assert run(capsys, f"mine {data} --features {store} {every} {out}")[0] == 0
