"""ResNet towers are open_clip's and torchvision's; batch norm is that of the whole batch, saved and resumed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kiloword.apps.plan.options import Plan
from kiloword.apps.plan.planner import Planner
from kiloword.config.options import Checkpointing
from kiloword.config.recipes import ImageConfig, ModelConfig, Recipe, sizes
from kiloword.distributed import collectives
from kiloword.interop.folder import import_as
from kiloword.interop.open_clip_config import raw_config, translate
from kiloword.interop.state_dicts import translated
from kiloword.methods.clip import Settings, preset as clip
from kiloword.methods.defaults import default_recipe
from kiloword.methods.method import Method
from kiloword.methods.registry import preset
from kiloword.model.heads import Head, Scale, Single
from kiloword.model.model import Model, initialise, resize
from kiloword.model.resnet import ResNet, commit, statistics
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.models.build import build
from kiloword.training.engine import recompute
from kiloword.training.loop import RunOptions, train
from kiloword.types import Texts
from kiloword.verify import suite
from runs import whole_and_cut
from threads import over_threads

SMALL = ImageConfig(
    tower="clip-resnet", size=64, patch=32, width=128, depth=4, heads=4, mlp=64, class_token=False, pre_norm=False
)
NOT_SKIPPED = torch.zeros(())


def small() -> ModelConfig:
    base = sizes()["debug"]
    return replace(base, image=SMALL, head=replace(base.head, image_pool="attention", image_projection_bias=True))


def resnet_of_32_pixels() -> Method:
    """CLIP with a ResNet for the batch of the suite, whose shortcuts do not hide the blocks at the start."""

    def towers(config: ModelConfig) -> ModelConfig:
        return replace(small(), image=replace(SMALL, size=32))

    return replace(clip(Settings()), towers=towers, scale=Scale())


METHOD = "test_resnet:resnet_of_32_pixels"


def stirred(module: nn.Module) -> nn.Module:
    """Norms and biases off the values where an error would not show."""
    generator = torch.Generator().manual_seed(3)
    for name, value in module.state_dict().items():
        if value.ndim == 1 and value.is_floating_point():
            value.add_(0.2 * torch.rand(value.shape, generator=generator, dtype=value.dtype))
        if name.endswith("running_var"):
            value.add_(0.5)
    return module


@pytest.mark.slow
def test_open_clips_rn50(open_clip: ModuleType) -> None:
    """With random weights and two text layers; in both modes, and the running statistics after a step."""
    config = open_clip.get_model_config("RN50")
    config["text_cfg"] |= {"layers": 2, "vocab_size": 512}
    torch.manual_seed(0)
    theirs: Any = stirred(open_clip.CLIP(**config)).eval()
    whole = translate("RN50", raw_config("RN50"))
    shape = replace(whole, text=replace(whole.text, depth=2, vocab=512))
    imported = import_as(shape, "RN50", theirs.state_dict())
    assert imported.left_over == []
    ours = Model(imported.config, Head(Single(imported.config)))
    ours.eval().load_state_dict(imported.state)
    images = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    ids = torch.zeros(1, 77, dtype=torch.int64)
    ids[0, :4] = torch.tensor([510, 4, 9, 511])
    with torch.no_grad():
        words = ours.encode_text(Texts.pack([ids[0, :4].tolist()]))[1]["vec"]
        torch.testing.assert_close(words, theirs.encode_text(ids, normalize=True), atol=1e-5, rtol=0)
    for training in (False, True):
        expected = theirs.train(training).encode_image(ours.normalise(images), normalize=True)
        measured = ours.train(training).encode_image(images)[1]["vec"]
        torch.testing.assert_close(measured, expected, atol=1e-5, rtol=0)
    commit(ours, NOT_SKIPPED)
    after, _ = translated(theirs.state_dict(), ours.state_dict())
    for name, value in statistics(ours).items():
        torch.testing.assert_close(value, after[name], atol=1e-5, rtol=1e-4)
    assert ours.config.image == replace(sizes()["rn50"].image, mlp=ours.config.image.mlp)
    assert ours.config.head == sizes()["rn50"].head


def test_torchvisions_resnet() -> None:
    torchvision_ready()
    resnet = pytest.importorskip("torchvision.models.resnet", reason="torchvision is not installed")
    theirs: Any = stirred(resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1]))
    ours = ResNet(replace(SMALL, tower="resnet", width=2048))
    names = {"conv1.": "stem.0.", "bn1.": "stem_norms.0.", **{f"layer{n + 1}.": f"stages.{n}." for n in range(4)}}
    state = {}
    for name, value in theirs.state_dict().items():
        start = next((start for start in names if name.startswith(start)), None)
        if start is not None and not name.endswith("num_batches_tracked"):
            state[names[start] + name.removeprefix(start)] = value.clone()
    ours.load_state_dict(state)
    theirs.fc = nn.Identity()
    images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for mode in (False, True):
        expected = theirs.train(mode)(images)
        torch.testing.assert_close(ours.train(mode)(images).mean(1), expected, atol=1e-5, rtol=1e-5)


def test_the_sizes_are_resnet_50() -> None:
    """Parameters of open_clip's RN50 and of torchvision's resnet50 without its classifier."""
    for name, parameters in (("rn50", 38_316_896 - 14_789_632), ("rn50-plain", 25_557_032 - 2_049_000)):
        with torch.device("meta"):
            tower = ResNet(sizes()[name].image)
        assert sum(p.numel() for p in tower.parameters()) == parameters


@pytest.mark.slow
def test_every_check_of_the_suite() -> None:
    assert not [check for check in suite.verify(METHOD, (1, 2)) if not check.passed]


def passed(checkpointing: Checkpointing) -> dict[str, Tensor]:
    """Outputs, gradients and running statistics of this rank's share of a batch, in double precision."""
    model = suite.learner(METHOD).model
    recompute(model, checkpointing)
    share = 4 // collectives.ranks()
    rows = slice(collectives.rank() * share, (collectives.rank() + 1) * share)
    images, direction = torch.randn(2, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = model.image_tower(images[rows])
    (out * direction[rows].flatten(1)[:, None, : out.shape[2]]).sum().backward()
    commit(model, NOT_SKIPPED)
    found = {name: x.detach() for name, x in statistics(model).items()}
    for name, p in model.image_tower.named_parameters():
        assert p.grad is not None
        found[name] = collectives.sum_over_ranks(p.grad)
    return found


@pytest.mark.parametrize(("ranks", "checkpointing"), [(1, "whole"), (2, "none"), (2, "selective")])
def test_statistics_are_those_of_the_whole_batch(ranks: int, checkpointing: Checkpointing) -> None:
    reference = passed("none")
    assert float(reference["stages.3.0.conv2.weight"].abs().max()) > 1e-6
    work = partial(passed, checkpointing)
    for found in over_threads(ranks, work) if ranks > 1 else [work()]:
        assert found.keys() == reference.keys()
        for name, value in reference.items():
            torch.testing.assert_close(found[name], value, atol=1e-10, rtol=1e-8, msg=name)


def test_micro_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch norm"):
        train(replace(recipe(), micro=4), tmp_path / "run", options=RunOptions(quiet=True))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="batch norm"):
        Planner(Plan(), replace(recipe(), micro=4))


def test_a_skipped_step_leaves_the_statistics() -> None:
    model = ResNet(SMALL)
    initialise(model, 0)
    before = {name: value.clone() for name, value in statistics(model).items()}
    model(torch.full((2, 3, 64, 64), float("nan")))
    commit(model, torch.ones(()))
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())
    model(torch.randn(2, 3, 64, 64))
    commit(model, NOT_SKIPPED)
    assert all(not torch.equal(value, before[name]) for name, value in statistics(model).items())


def test_a_frozen_tower_keeps_its_statistics() -> None:
    model = ResNet(SMALL).requires_grad_(False)
    initialise(model, 0)
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(images), model.eval()(images))


def test_another_image_size() -> None:
    state = build(small(), preset("clip")).state_dict()
    config, resized = resize(small(), state, 96)
    build(config, preset("clip")).load_state_dict(resized)
    name = "head.pooling.image_pool.attention.positions"
    assert torch.equal(resized[name][0], state[name][0])


def recipe() -> Recipe:
    base = default_recipe("clip", "debug", ("scenes?n=64",))
    data, optim = replace(base.data, tokenizer_vocab=300), replace(base.optim, ema=0.5)
    return replace(base, model=small(), data=data, optim=optim, batch=16, steps=4, seed=5)


@pytest.mark.slow
def test_a_cut_run_goes_on_and_saves_averaged_statistics(tmp_path: Path) -> None:
    whole = whole_and_cut(recipe(), tmp_path)
    name = "image_tower.stages.0.0.bn1.running_mean"
    saved = load_file(tmp_path / "whole" / "model" / "model.safetensors")[name]
    assert torch.equal(saved, whole[f"average/model.{name}"])
    assert not torch.equal(saved, whole[f"learner/model.{name}"])
    assert saved.any()
