"""Our towers with open_clip's weights are open_clip's towers: outputs, and gradients of one fine-tuning step."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import mostly_slow
from kiloword.config.recipes import ModelConfig
from kiloword.interop.checkpoint import read
from kiloword.interop.folder import import_as
from kiloword.interop.open_clip import import_state, main
from kiloword.interop.open_clip_config import model_config
from kiloword.interop.state_dicts import translated
from kiloword.model.heads import Head, Scale, Single
from kiloword.model.model import Model
from kiloword.models.model_folder import load_model, read_model_file
from kiloword.types import Texts

VOCAB = 512  # of the small models: the arithmetic is that of 49408


def create(open_clip: ModuleType, name: str, layers: int) -> Any:
    """open_clip's model `name`, randomly initialised, cut to a few layers and a small vocabulary."""
    config = open_clip.get_model_config(name)
    kind = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
    config["text_cfg"] |= {"layers": layers, "vocab_size": VOCAB}
    if "timm_model_name" not in config["vision_cfg"]:
        config["vision_cfg"]["layers"] = layers
    theirs = kind(**config)
    if hasattr(theirs.visual, "trunk"):
        theirs.visual.trunk.blocks = theirs.visual.trunk.blocks[:layers]
    return theirs


def cut(config: ModelConfig, layers: int) -> ModelConfig:
    image, text = replace(config.image, depth=layers), replace(config.text, depth=layers, vocab=VOCAB)
    return replace(config, image=image, text=text)


def convert(config: ModelConfig, theirs: Any) -> tuple[Model, str]:
    """Our model with their weights, and its method; theirs is moved off the values where an error would not show."""
    torch.manual_seed(0)
    for parameter in theirs.parameters():  # biases and norms start at 0 and 1
        if parameter.ndim == 1:
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    imported = import_as(config, "open_clip", theirs.state_dict())
    ours = Model(
        imported.config, Head(Single(imported.config), scale=Scale(bias=0.0 if imported.method == "siglip" else None))
    )
    ours.load_state_dict(imported.state)
    assert imported.left_over == []
    return ours, imported.method


def captions(name: str, context: int, vocab: int, n: int) -> tuple[Tensor, Texts]:
    """Their padded ids [n, context] and our packed texts; SigLIP's pads are tokens of ours too."""
    generator = torch.Generator().manual_seed(1)
    padded = torch.zeros(n, context, dtype=torch.int64)
    lengths = [5 + 4 * i for i in range(n)]
    for row, length in enumerate(lengths):
        padded[row, :length] = torch.randint(1, vocab - 2, (length,), generator=generator)
        padded[row, length - 1] = vocab - 1  # CLIP pools at the highest id
    if "SigLIP" in name:
        return padded, Texts.pack(padded.tolist())
    return padded, Texts.pack([row[:length].tolist() for row, length in zip(padded, lengths, strict=True)])


NAMES = ["ViT-B-32", "ViT-B-16-quickgelu", "ViT-B-16-SigLIP"]


@pytest.mark.parametrize("name", mostly_slow(NAMES, 0))
def test_parity_of_two_layers(open_clip: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    theirs = create(open_clip, name, 2)
    ours, method = convert(cut(model_config(name), 2), theirs)
    compare(name, theirs, ours, method)
    compare_each(name, theirs.double(), ours.double(), method)


@pytest.mark.slow
def test_parity_of_a_real_size(open_clip: ModuleType) -> None:
    theirs = open_clip.create_model("ViT-B-32", pretrained=None)
    compare("ViT-B-32", theirs, *convert(model_config("ViT-B-32"), theirs))


def compare(name: str, theirs: Any, ours: Model, method: str) -> None:
    gradients = step(name, theirs, ours, method, 1e-5)
    total = sum(float(g.norm()) ** 2 for g in gradients[1].values()) ** 0.5
    difference = sum(float((gradients[0][k] - g).norm()) ** 2 for k, g in gradients[1].items()) ** 0.5
    assert difference < 1e-4 * total


def compare_each(name: str, theirs: Any, ours: Model, method: str) -> None:
    """Each tensor in double precision, where its own cancellations do not hide an error."""
    gradients = step(name, theirs, ours, method, 1e-12)
    for k, g in gradients[1].items():
        assert (gradients[0][k] - g).norm() < 1e-8 * g.norm(), k


def step(
    name: str, theirs: Any, ours: Model, method: str, tolerance: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Check the outputs of both; returns the gradients of ours and of theirs, under our names."""
    theirs.zero_grad()
    ours.zero_grad()
    generator = torch.Generator().manual_seed(2)
    photos = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8, generator=generator)
    padded, texts = captions(name, ours.config.text.context, ours.config.text.vocab, 2)
    image, text, scale, *bias = theirs(ours.normalise(photos), padded)
    loss(scale * image @ text.T + (bias[0] if bias else 0), method).backward()  # type: ignore[no-untyped-call]
    (_, images), (_, words) = ours.encode_image(photos), ours.encode_text(texts)
    assert (images["vec"] - image).abs().max() < tolerance
    assert (words["vec"] - text).abs().max() < tolerance
    assert ours.head.log_scale.exp() == scale
    assert len(bias) == (0 if ours.head.bias is None else 1)
    assert not bias or bias[0] == ours.head.bias
    loss(ours.head.logits(ours.score(images, words)), method).backward()  # type: ignore[no-untyped-call]
    mine = {k: p.grad for k, p in ours.named_parameters() if p.grad is not None}
    assert len(mine) == len(list(ours.parameters()))
    given = {k: p.grad for k, p in theirs.named_parameters() if p.grad is not None}
    foreign, left = translated(given, dict(ours.named_parameters()))
    assert not left
    assert mine.keys() == foreign.keys()
    return mine, foreign


def loss(logits: Tensor, method: str) -> Tensor:
    if method == "siglip":
        signs = 2 * torch.eye(len(logits)) - 1
        return -F.logsigmoid(signs * logits).sum() / len(logits)
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@pytest.mark.parametrize(
    ("name", "state", "word"),
    [
        ("ViT-B-31", {}, "knows no model 'ViT-B-31'"),
        ("roberta-ViT-B-32", {}, "built differently"),
        ("ViT-B-32", {"conv.weight": torch.zeros(1)}, "none of these weights"),
        ("ViT-B-32", {"token_embedding.weight": torch.zeros(10, 512)}, "missing image_tower"),
    ],
)
def test_refused_states(open_clip: ModuleType, name: str, state: dict[str, Tensor], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        import_state(name, state)


def test_read_takes_tensors_only(tmp_path: Path) -> None:
    torch.save({"state_dict": {"module.logit_scale": torch.ones(())}}, tmp_path / "a.pt")
    assert read(tmp_path / "a.pt").keys() == {"logit_scale"}
    torch.save({"model": nn.Linear(1, 1)}, tmp_path / "b.pt")
    (tmp_path / "c.safetensors").write_bytes(b"nonsense")
    wrong = {
        "b.pt": r"\(it asks for torch\.nn\.modules\.linear\.Lin",
        "c.safetensors": "plain tensors",
        "d.pt": "no file of",
    }
    for name, word in wrong.items():
        with pytest.raises(ValueError, match=word):
            read(tmp_path / name)


def small(open_clip: ModuleType, folder: Path, vocab: int, bias: bool) -> dict[str, Tensor]:
    """The weights of a model ViT-X of debug size, and of something else; open_clip knows its configuration."""
    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16}
    text = {"context_length": 77, "vocab_size": vocab, "width": 32, "heads": 2, "layers": 1}
    config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    (folder / "ViT-X.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / "ViT-X.json")
    model = open_clip.CLIP(**config, init_logit_scale=math.log(112.3), init_logit_bias=-12.9 if bias else None)
    torch.nn.init.ones_(model.token_embedding.weight)
    return {**model.state_dict(), "unheard.of": torch.ones(1)}


@pytest.mark.parametrize("bias", mostly_slow([False, True], 1))
def test_import_writes_a_folder_and_says_what_happened(
    open_clip: ModuleType, bias: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(small(open_clip, tmp_path, 49408, bias), tmp_path / "w.pt")
    main("ViT-X", tmp_path / "w.pt", tmp_path / "out")
    output = capsys.readouterr().out
    assert "left over: unheard.of" in output
    model, tokenizer = load_model(tmp_path / "out")
    assert read_model_file(tmp_path / "out").method == ("siglip" if bias else "clip")
    assert model.head.log_scale.exp().item() == pytest.approx(112.3)
    model.head.clamp_()
    assert model.head.log_scale.exp().item() == pytest.approx(112.3)
    assert model.head.bias is None or model.head.bias.item() == pytest.approx(-12.9)
    assert (model.text_tower.tokens == 1).all()
    assert tokenizer.roles.end == 49407
    with pytest.raises(ValueError, match="not an empty folder"):
        main("ViT-X", tmp_path / "w.pt", tmp_path / "out")
