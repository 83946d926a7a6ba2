"""Towers of other libraries: their tokens, their files, and what is refused."""

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kiloword.api import load as load_matcher
from kiloword.cli.main import main
from kiloword.config.recipes import HeadConfig, ImageConfig, ModelConfig, TextConfig, TrunkConfig
from kiloword.interop import towers
from kiloword.methods.registry import preset
from kiloword.model.image import grid
from kiloword.model.model import Model
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.model.trunks.library import resized_trunk
from kiloword.model.trunks.lite import EfficientNetLite, normed
from kiloword.models.build import build


def config(**image: object) -> ModelConfig:
    """A tiny top on EfficientNet-Lite0 with images of 64 pixels, a map of 2 x 2."""
    trunk = TrunkConfig(name="efficientnet-lite0", width=1280, grid=2)
    return ModelConfig(
        image=replace(ImageConfig(trunk=trunk, size=64, patch=32, width=16, depth=1, heads=2, mlp=32), **image),
        text=TextConfig(context=16, vocab=300, width=16, depth=1, heads=2, mlp=32),
        head=HeadConfig(dim=8, image_pool="max"),
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of Lite0 in a file as its packages name them, with a classifier."""
    state = {}
    for name, value in EfficientNetLite("efficientnet-lite0").state_dict().items():
        *modules, last = name.split(".")
        theirs = [part if part.isdecimal() else f"_{part}" for part in modules]
        state[".".join([*theirs, last]).replace("_layers.", "_blocks.")] = value
    assert "_blocks.0._depthwise_conv.weight" in state
    path = tmp_path_factory.mktemp("weights") / "lite0.pth"
    torch.save({**state, "_bn0.num_batches_tracked": torch.tensor(3), "_fc.weight": torch.zeros(1000, 1280)}, path)
    return path


def model(**image: object) -> Model:
    return build(config(**image), preset("clip"), seed=0).eval()


def test_same_padding_puts_the_odd_place_at_the_end() -> None:
    """Against a literal transcription of TensorFlow's rule, for sizes and strides that do and do not divide.

    The batch norm after it, with statistics of its own, is that of torch.
    """
    norm = torch.nn.BatchNorm2d(1, eps=1e-3).eval()
    for x, value in ((norm.weight, 1.5), (norm.bias, -0.3), (norm.running_mean, 0.2), (norm.running_var, 0.6)):
        assert x is not None
        x.data.fill_(value)
    for size, kernel, stride in ((7, 3, 2), (8, 3, 2), (9, 5, 2), (6, 5, 1), (1, 3, 2)):
        convolution = torch.nn.Conv2d(1, 1, kernel, stride, bias=False)
        image = torch.randn(1, 1, size, size)
        places = -(-size // stride)
        total = max((places - 1) * stride + kernel - size, 0)
        padded = torch.zeros(1, 1, size + total, size + total)
        padded[..., total // 2 : total // 2 + size, total // 2 : total // 2 + size] = image
        expected = torch.nn.functional.conv2d(padded, convolution.weight, stride=stride)
        assert expected.shape[-1] == places
        torch.testing.assert_close(normed(convolution, norm, image), norm(expected))


@pytest.mark.parametrize(("name", "size"), [("efficientnet-lite0", 64), ("efficientnet-lite2", 70)])
def test_tokens_are_those_of_timm(name: str, size: int) -> None:
    torchvision_ready()
    timm = pytest.importorskip("timm", reason="timm is not installed")
    theirs = timm.create_model(f"tf_{name.replace('-', '_')}", pretrained=False).eval()
    trunk = EfficientNetLite(name).train()  # stays in eval mode
    of_theirs = [(k, x) for k, x in theirs.state_dict().items() if not k.startswith("classifier") and x.dim()]
    assert [x.shape for _, x in of_theirs] == [x.shape for x in trunk.state_dict().values()]
    trunk.load_state_dict({ours: x for ours, (_, x) in zip(trunk.state_dict(), of_theirs, strict=True)})
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    same_kernels = images.contiguous(memory_format=torch.channels_last)  # others round otherwise
    with torch.no_grad():
        expected = theirs.forward_features(same_kernels).flatten(2).transpose(1, 2)
        tokens = trunk(images)
    measured = resized_trunk(TrunkConfig(name=name), size)
    assert (measured.width, measured.prefix, measured.grid) == (tokens.shape[2], 0, int(tokens.shape[1] ** 0.5))
    torch.testing.assert_close(tokens, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_images_and_their_trunk_tokens_give_the_same() -> None:
    """Uint8 images go through normalisation, trunk and top; tokens straight into the top; places may be dropped."""
    made = model(mask_token=True)
    images = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    keep = torch.tensor([[0, 3], [1, 2], [0, 1]])
    masked = torch.tensor([[True, False, False, True]]).expand(3, 4)
    with torch.no_grad():
        tokens = made.image_tower.trunk(made.normalise(images))
        whole = made.image_tokens(images)
        for places in ({}, {"keep": keep}, {"masked": masked}):
            torch.testing.assert_close(made.image_tokens(images, **places), made.image_tokens(tokens, **places))
    assert whole.shape == (3, 1 + 4, 16)
    assert made.image_tokens(tokens, keep=keep).shape == (3, 1 + 2, 16)
    assert not torch.equal(made.image_tokens(tokens, masked=masked), whole)
    with pytest.raises(ValueError, match=r"tokens have shape \(5, 1280\).*\(4, 1280\)"):
        made.image_tokens(torch.zeros(3, 5, 1280))
    with pytest.raises(ValueError, match="the image tower has none"):
        model(trunk=TrunkConfig()).image_tokens(tokens)


def test_a_new_trunk_uses_running_statistics_and_its_blocks_cover_all_parameters_once() -> None:
    """From its first call on: an image's tokens do not depend on the others of its batch."""
    trunk, images = EfficientNetLite("efficientnet-lite0"), torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        together = trunk(images)
        assert torch.allclose(together[:1], trunk(images[:1]), atol=1e-5)
    assert not any(part.training for part in trunk.modules())
    prefixes = [prefix for block in trunk.blocks() for prefix in block]
    for name, _ in trunk.named_parameters():
        assert sum(name.startswith(prefix) for prefix in prefixes) == 1, name
    assert trunk.initial().keys() == dict(trunk.named_parameters()).keys()


def test_a_config_that_does_not_fit_its_trunk_is_refused() -> None:
    wrong = model(trunk=replace(config().image.trunk, grid=3))
    with pytest.raises(ValueError, match=r"tokens have shape \(4, 1280\).*\(9, 1280\)"):
        wrong.image_tokens(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="'os' is unknown"):
        model(trunk=replace(config().image.trunk, name="os"))


@pytest.mark.slow
def test_training_saves_loads_and_resumes_without_the_file(weights: Path, tmp_path: Path) -> None:
    """The file's weights are in the model and stay as they are; a killed run ends bit for bit as the whole one."""
    file = shutil.copy(weights, tmp_path / "lite0.pth")
    flags = ["--image-tower", f"efficientnet-lite0:{file}", "--model.image.size", "32", "--model.image.width", "16"]
    flags += ["--model.image.heads", "2", "--model.text.depth", "1", "--batch", "8", "--quiet", "--vocab", "300"]
    command = ["train", "clip", "--data", "scenes?n=32", "--steps", "4", "--save-every", "2", *flags]
    run, killed = tmp_path / "whole", tmp_path / "killed"
    main([*command, "--out", str(run)])
    shutil.copytree(run, killed)
    for path in (killed / "state").glob("step-000000004*.json"):
        path.unlink()
    (killed / "model" / "model.safetensors").unlink()
    file.unlink()
    main([*command, "--out", str(killed)])
    models = [run / "model" / "model.safetensors", killed / "model" / "model.safetensors"]
    assert models[0].read_bytes() == models[1].read_bytes()
    saved = load_matcher(run).model
    assert grid(saved.config.image) == 1
    assert saved.config.preprocess == towers.LITE
    stored = torch.load(weights, weights_only=True)
    torch.testing.assert_close(saved.image_tower.trunk.conv_head.weight, stored["_conv_head.weight"], rtol=0, atol=0)
    torch.testing.assert_close(saved.image_tower.trunk.bn0.running_var, stored["_bn0.running_var"], rtol=0, atol=0)


@pytest.mark.filterwarnings("error")  # torch warns of pickles of another protocol
def test_files_that_are_refused(weights: Path, tmp_path: Path) -> None:
    trunk, cut = EfficientNetLite("efficientnet-lite0"), tmp_path / "cut.pth"
    assert "not used: fc.weight" in towers.load(trunk, f"efficientnet-lite0:{weights}", "image tower")
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: None, "no file of weights"),
        (lambda: cut.write_bytes(weights.read_bytes()[:100_000]), "cannot be read as plain tensors"),
        (lambda: torch.save({"model": trunk}, cut), "code of a file is never run"),
        (lambda: cut.write_bytes(pickle.dumps(config())), "cannot be read as plain tensors"),
        (lambda: cut.write_bytes(b""), "damaged"),
        (lambda: torch.save(EfficientNetLite("efficientnet-lite2").state_dict(), cut), "do not fit efficientnet-lite0"),
    ]
    for write, word in cases:
        write()
        with pytest.raises(ValueError, match=word):
            towers.load(trunk, f"efficientnet-lite0:{cut}", "image tower")
