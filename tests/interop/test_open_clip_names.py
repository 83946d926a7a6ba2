"""Each of open_clip's models with two blocks a tower: its features are equal here, or it is refused with a reason."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor

from kiloword.interop.folder import assemble, import_as
from kiloword.interop.open_clip_config import Unlike, translate
from kiloword.model.model import Model
from kiloword.types import Texts

FAMILIES = {  # name: its models, and those that are refused
    "resnet": (r"RN", r"$"),
    "siglip": (r".*SigLIP", r"ViT-SO400M-16-SigLIP-i18n"),
    "coca": (r"coca", r"coca_(base|roberta)"),
    "clip": (r"ViT-", r".*(CLIPA|worldwide|ViT-M-16-alt)"),
    "others": (r"", r""),
}
VOCAB, BLOCKS = 64, 2


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with few blocks and words; of a ResNet, whose depths are given, with few channels."""
    vision, text = dict(config["vision_cfg"]), config["text_cfg"] | {"layers": BLOCKS, "vocab_size": VOCAB}
    if isinstance(vision.get("layers"), list):
        vision["width"] = 8
    elif "layers" in vision:
        vision["layers"] = BLOCKS
    if "multimodal_cfg" in config:
        config["multimodal_cfg"] |= {"layers": BLOCKS, "vocab_size": VOCAB}
    return config | {"vision_cfg": vision, "text_cfg": text}


def created(open_clip: ModuleType, config: dict[str, Any]) -> Any:
    """open_clip's model, off the values where an error would not show."""
    options = dict(config)
    custom = options.pop("custom_text", False)
    kind = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CustomTextCLIP if custom else open_clip.CLIP
    model = kind(**options)
    generator = torch.Generator().manual_seed(0)
    for value in model.parameters():
        if value.ndim == 1:
            value.data.add_(0.1 * torch.randn(value.shape, generator=generator))
        elif value.ndim == 2:  # CoCa leaves some as the memory was
            value.data.copy_(torch.randn(value.shape, generator=generator) * min(value.shape) ** -0.5)
    return model.eval()


def captions(ours: Model) -> tuple[Tensor, Texts]:
    """Their padded ids, and our packed texts with the tokens that our tower adds."""
    text = ours.config.text
    tail = [text.special[name] for name in text.extra_tokens]
    padded = torch.zeros(3, text.context - bool(tail), dtype=torch.int64)
    for row, length in zip(padded, (3, 5, text.context - max(len(tail), 1)), strict=True):
        row[:length] = torch.randint(1, VOCAB - 2, (length,), generator=torch.Generator().manual_seed(length))
        row[0], row[length - 1] = VOCAB - 2, VOCAB - 1
    rows = [row.tolist() if text.pad_to_context else [*row[row > 0].tolist(), *tail] for row in padded]
    return padded, Texts.pack(rows)


def difference(theirs: Any, ours: Model) -> float:
    """The largest difference of features of images and texts."""
    size = ours.config.image.size
    pixels = torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    padded, texts = captions(ours)
    pairs = [
        (ours.encode_image(pixels)[1]["vec"], theirs.encode_image(ours.normalise(pixels), normalize=True)),
        (ours.encode_text(texts)[1]["vec"], theirs.encode_text(padded, normalize=True)),
    ]
    return max(float((found - expected).abs().max()) for found, expected in pairs)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_name(open_clip: ModuleType, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    make = timm.create_model
    shallow = lambda name, *args, **options: make(  # noqa: E731
        name, *args, **options, **({"depth": BLOCKS} if "siglip" in name else {})
    )
    monkeypatch.setattr(timm, "create_model", shallow)
    pieces = [(str(n), -1.0) for n in range(VOCAB)]
    tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2)).save(str(tmp_path / "tokenizer.json"))
    equal, refused, wrong = [], {}, {}
    for name in open_clip.list_models():
        if next(kind for kind, (names, _) in FAMILIES.items() if re.match(names, name)) != family:
            continue
        config = shrunk(open_clip.get_model_config(name))
        try:
            translated = translate(name, config)
        except Unlike as error:
            refused[name] = str(error)
            continue
        theirs = created(open_clip, config)
        imported = import_as(translated, name, theirs.state_dict(), config.get("multimodal_cfg", {}).get("layers", 0))
        with torch.no_grad():
            largest = difference(theirs, assemble(imported, tmp_path / "weights")[0].eval())
        if largest < 1e-4:
            equal.append(name)
        else:
            wrong[name] = largest
    print(f"{family}: {len(equal)} equal, {len(refused)} refused, {len(wrong)} wrong")
    assert not wrong
    pattern = FAMILIES[family][1]
    assert all(re.match(pattern, name) for name in refused), refused
    assert not any(re.match(pattern, name) for name in equal), equal
