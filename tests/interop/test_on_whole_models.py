"""What is trained on a model of another library that is used whole: LoRA, Gaussians, prefixes, a teacher; refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kiloword
from commands import refused
from kiloword import Matcher
from kiloword.cli.main import main
from kiloword.data.open import open_source
from kiloword.model.trunks.libraries import transformers
from kiloword.training.log import read_metrics
from other_libraries import SIDE, WORDS, of_transformers, save_whole

DATA = "scenes?n=16&captions=1"
ROWS = [open_source(DATA, SIDE).record(row) for row in range(16)]
TEXTS = [row.captions[0] for row in ROWS]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small AIMv2 of transformers."""
    return f"hf:{save_whole(of_transformers('Aimv2', **WORDS), tmp_path_factory.mktemp('whole'))}"


def train(source: str, out: Path, method: str, *flags: str, steps: int = 1) -> dict[str, float]:
    """The figures of the first step."""
    words = f"train {method} --init {source} --data {DATA} --steps {steps} --batch 16 --workers 0 --log-every 1"
    main([*words.split(), "--precision", "fp32", "--out", str(out), *flags])
    return read_metrics(out / "metrics.jsonl")[0]


def features(model: Matcher) -> tuple[Tensor, Tensor]:
    images = [model.preprocess(row.image) for row in ROWS]
    return model.encode_image(images)["vec"], model.encode_text(TEXTS)["vec"]


def softmax(images: Tensor, texts: Tensor) -> float:
    """CLIP's loss at its initial scale."""
    logits, match = F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T / 0.07, torch.eye(16)
    return float(F.cross_entropy(logits, match) + F.cross_entropy(logits.T, match)) / 2


def test_lora_adapts_every_layer_by_default(source: str, tmp_path: Path) -> None:
    """It begins as the source; merged, in the library's own model and as a graph, it is the trained model."""
    before, out = kiloword.load(source), tmp_path / "run"
    loss = train(source, out, "clip", "--lora.rank", "2", "--optim.lr", "1e-2", "--optim.ema", "0", steps=3)["loss"]
    assert loss == pytest.approx(softmax(*features(before)), rel=1e-4)
    after, state = kiloword.load(out), kiloword.load(out / "state")
    for mine, of_state, old in zip(features(after), features(state), features(before), strict=True):
        torch.testing.assert_close(mine, of_state, atol=1e-6, rtol=0)
        assert (mine - old).abs().max() > 1e-3
    theirs = transformers().AutoModel.from_pretrained(source.removeprefix("hf:"))
    tensors = after.model.image_tower.trunk.net.state_dict()
    assert not theirs.load_state_dict(tensors, strict=False).unexpected_keys
    pixels = after.model.normalise(torch.stack([after.preprocess(row.image) for row in ROWS]))
    with torch.no_grad():
        images = theirs.eval()(input_ids=torch.ones(1, 1, dtype=torch.long), pixel_values=pixels).image_embeds
    torch.testing.assert_close(features(after)[0], F.normalize(images, dim=1), atol=1e-5, rtol=0)
    main(["export", "torch", str(out / "model"), "--out", str(tmp_path / "graph")])


def test_gaussians_read_the_one_vector(source: str, tmp_path: Path) -> None:
    images, texts = features(kiloword.load(source))
    flags = ["--settings.masked", "0", "--settings.log-var", "-40"]
    logits = 10 * images @ texts.T - 10
    expected = -F.logsigmoid(logits * (2 * torch.eye(16) - 1)).sum() / 16
    assert train(source, tmp_path / "run", "prolip", *flags)["pair"] == pytest.approx(float(expected), rel=1e-4)
    model = kiloword.load(tmp_path / "run")
    for vectors in (model.encode_image([model.preprocess(row.image) for row in ROWS]), model.encode_text(TEXTS)):
        assert model.uncertainty(vectors).unique().numel() > 1


def test_prefixes(source: str, tmp_path: Path) -> None:
    images, texts = features(kiloword.load(source))
    expected = sum(softmax(images[:, :dim], texts[:, :dim]) for dim in (24, 12))
    assert train(source, tmp_path / "run", "clip+matryoshka")["loss"] == pytest.approx(expected, rel=1e-4)


def test_its_own_features_teach_it_nothing(source: str, tmp_path: Path) -> None:
    main(["embed", source, "--data", DATA, "--out", str(tmp_path / "teacher"), "--name", "teacher", "--dtype", "fp32"])
    flags = ["--features", str(tmp_path / "teacher"), "--settings.reinforced.scales", str(1 / 0.07)]
    found = train(source, tmp_path / "run", "clip+reinforced", *flags)
    assert found["pair"] == pytest.approx(softmax(*features(kiloword.load(source))), rel=1e-4)
    assert found["reinforced"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("prolip", "hides no patches"),
        ("prolip --settings.masked 0 --settings.variance-blocks 1", "used whole, has no"),
        ("llip", "used whole, has no"),
    ],
)
def test_refused(words: str, message: str, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = f"train {words} --init {source} --data {DATA} --batch 16 --steps 1 --out {tmp_path / 'out'}"
    assert message in refused(capsys, *run.split())
