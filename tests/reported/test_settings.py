"""Settings that cannot work, or that another setting leaves without effect, are refused before the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from users import Refused, Run, write_table

from kiloword.cli.main import main
from kiloword.model.trunks.lite import EfficientNetLite
from tars import pairs, write_tar

DEBUG = "--size debug --steps 2 --workers 0 --device cpu --quiet --vocab 300"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """DATA, MODEL, its FILE of a tokenizer, a STORE of features, EXTRA captions and weights LITE of a trunk."""
    place = tmp_path_factory.mktemp("settings")
    (place / "MODEL").symlink_to(model)
    (place / "FILE").symlink_to(model / "tokenizer.json")
    write_tar(place / "DATA" / "0.tar", pairs(16))
    main(f"embed {model} --data {place / 'DATA'} --out {place / 'STORE'} --workers 0 --device cpu".split())
    write_table(place / "EXTRA.parquet", [{"key": "0000", "caption": "more"}])
    save_file(EfficientNetLite("efficientnet-lite0").state_dict(), place / "LITE.safetensors")
    return place


@pytest.fixture
def typed(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the shell, with links to all of `place`."""
    for path in place.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("method", ["clip", "siglip", "llip", "coca", "pcme++", "clip-c", "siglip+supcon", "slip"])
def test_one_pair_a_batch_has_no_negatives(typed: Path, run: Run, refused: Refused, method: str) -> None:
    words = f"train {method} --data DATA --out run {DEBUG} --batch".split()
    assert "--batch 1" in refused(*words, 1)
    assert not (typed / "run").exists()
    refused(*words, 1, "--dry-run")
    assert run(*words, 2, "--dry-run")[0] == 0


def test_batches_of_one_pair_that_learn(typed: Path, run: Run) -> None:
    """Micro-batches of a larger batch; captions alone."""
    assert run(*f"train clip --data DATA --out m {DEBUG} --batch 8 --micro 1".split())[0] == 0
    words = f"train coca --data DATA --out c {DEBUG} --batch 1 --settings.contrast-weight 0"
    assert run(*words.split())[0] == 0
    losses = [json.loads(line)["loss"] for line in (typed / "m" / "metrics.jsonl").read_text().splitlines()]
    assert min(losses) > 0.5


TRAIN, EVERY = "train clip --data DATA --batch 8 --steps 2", "--p1 0.3 --p2 0.9 --p3 0.9 --p1-text 0.2"
EMBED = "embed efficientnet-lite0:LITE.safetensors --tokens --data DATA --device cpu"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"{TRAIN} --init MODEL --vocab 500", "--vocab"),
        (f"{TRAIN} --tokenizer clip --vocab 500 --size debug", "--vocab"),
        (f"{TRAIN} --tokenizer FILE --vocab 500 --size debug", "--vocab"),
        (f"{TRAIN} --captions all --first-captions --size debug", "--first-captions"),
        (f"{TRAIN} --size rn50-plain --model.image.stem conv", "--model.image.stem"),
        (f"{TRAIN} --init MODEL --freeze text --optim.text-lr 0.5", "--optim.text-lr"),
        (f"{TRAIN} --image-tower efficientnet-lite0 --optim.trunk-lr 0.5", "--optim.trunk-lr"),
        (f"{TRAIN} --features STORE --size debug", "teacher"),
        (f"{EMBED} --extra-captions EXTRA.parquet", "--extra-captions"),
        ("audit DATA --model MODEL --features STORE --image-features STORE", "--image-features"),
        (f"mine DATA --features STORE --calibrate {EVERY}", "--calibrate"),
    ],
)
def test_settings_without_effect(typed: Path, refused: Refused, words: str, named: str) -> None:
    assert named in refused(*words.split(), "--out", "out")
    assert not (typed / "out" / "model").exists()
    assert words.startswith("train") or not (typed / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        f"{TRAIN} --dry-run --init MODEL",
        f"{TRAIN} --dry-run --init MODEL --freeze text --unfreeze 0.5 --optim.text-lr 0.5",
        f"{TRAIN} --dry-run --captions 2 --first-captions --size debug --vocab 300",
        f"mine DATA --features STORE {EVERY} --device cpu",
    ],
)
def test_settings_with_effect(typed: Path, run: Run, words: str) -> None:
    assert run(*words.split(), "--out", "out")[0] == 0
