"""`kiloword plan` counts zero-shot classification as torch's counter does of real tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kiloword.apps.plan.advice import CLASSES
from kiloword.cli.describe import flops
from kiloword.cli.main import main
from kiloword.cli.plan import planner_of
from kiloword.config.recipes import sizes
from kiloword.model.trunks.lite import EfficientNetLite
from kiloword.models.build import build
from kiloword.types import Texts

WORDS = ["--size", "debug", "--samples", "1e6", "--batch", "8", "--gpu", "cpu", "--tokens", "7"]


@pytest.mark.parametrize("method", ["clip", "llip", "prolip"])
def test_counted_as_by_torch(method: str) -> None:
    planner = planner_of([method, *WORDS, *(["--settings.k", "4"] if method == "llip" else [])])
    model = build(sizes()["debug"], planner.method)
    text = model.config.text
    tail = [text.special["end"], *(text.special[name] for name in text.extra_tokens)]
    ids = [text.special["start"], *[9] * (int(planner.tokens) - 1 - len(tail)), *tail]
    flop = []
    with torch.no_grad():
        for step in ("image", "texts", "scores"):
            with FlopCounterMode(display=False) as counter:
                if step == "image":
                    images = model.encode_image(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))[1]
                elif step == "texts":
                    texts = model.encode_text(Texts.pack([ids] * CLASSES))[1]
                else:
                    model.head.score(images, texts)
            flop.append(counter.get_total_flops())
    planned = [planner.inference[step][0] for step in ("image", "texts", "scores")]
    assert planned[2] == flop[2] > 0
    assert flop[0] <= planned[0] <= 1.1 * flop[0]  # torch's counter omits fused attention on a CPU
    assert planned[1] >= 0.9 * flop[1]  # on a CPU captions are padded to the context


@pytest.mark.slow
def test_contextual_pooling_costs_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Llip's figures 1b and 8a: the more tokens, the more FLOP of an image and of the scores of all classes."""
    figures = []
    for k in ("1", "16"):
        main(["plan", "llip", *WORDS, "--settings.k", k, "--json", str(tmp_path / "plan.json")])
        figures.append(json.loads((tmp_path / "plan.json").read_text())["inference"])
    shown = capsys.readouterr().out
    assert "inference: zero-shot classification of an image" in shown
    assert "score 1,000 classes" in shown
    for name in ("image", "scores"):
        assert figures[1][name]["flop"] > figures[0][name]["flop"]
        assert figures[1][name]["seconds"] > figures[0][name]["seconds"] > 0
    assert figures[1]["texts"] == figures[0]["texts"]


@pytest.mark.slow
def test_the_image_is_that_of_the_sizes() -> None:
    planner = planner_of(["clip", "--size", "rn50-plain", "--samples", "1e6", "--batch", "2", "--gpu", "cpu"])
    assert planner.inference["image"][0] == pytest.approx(flops(sizes()["rn50-plain"])[0], rel=0.01)


@pytest.mark.slow
def test_a_frozen_trunk_runs_forward_alone() -> None:
    """`plan --image-tower`: the trunk's FLOP as torch counts them; no backward pass, gradient or optimizer state."""
    words = [*WORDS[2:], "--image-tower", "efficientnet-lite0", "--optim.name", "adamw"]
    planner = planner_of(["siglip", *words])
    assert planner.plan.size == "top"
    trunk = EfficientNetLite("efficientnet-lite0")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        trunk.eval()(torch.zeros(1, 3, 224, 224))
    micro = planner.micro_batch(4)
    assert micro.forward["image tower (trunk)"] == 4 * counter.get_total_flops()
    assert micro.backward["image tower (trunk)"] == 0
    frozen = sum(p.numel() for p in trunk.parameters())
    trained = sum(p.numel() for p in planner.learner.parameters() if p.requires_grad)
    assert trained == sum(p.numel() for p in planner.learner.parameters()) - frozen


def test_a_tower_that_cannot_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "siglip", *WORDS[2:], "--image-tower", "efficientnet-lite1"])
    assert "unknown tower 'efficientnet-lite1'" in capsys.readouterr().err
