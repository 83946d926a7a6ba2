"""Our towers and text decoder with open_clip's CoCa weights are open_clip's: features, memory, logits, gradients."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from kiloword.interop.folder import import_as
from kiloword.interop.open_clip import main
from kiloword.interop.open_clip_config import Unlike, model_config, translate
from kiloword.interop.state_dicts import translated
from kiloword.methods.coca.coca import decoded
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.models.model_folder import load_model, read_model_file
from kiloword.randomness import key
from kiloword.types import Texts


def small(memory: int = 32) -> dict[str, Any]:
    """A configuration as open_clip's files have them; memory: width of what is pooled."""
    text = {"context_length": 10, "vocab_size": 60, "width": memory, "heads": 2, "layers": 2}
    return {
        "embed_dim": memory,
        "vision_cfg": {
            "image_size": 32,
            "layers": 2,
            "width": 32,
            "head_width": 16,
            "patch_size": 16,
            "attentional_pool": True,
            "attn_pooler_heads": 4,
            "attn_pooler_queries": 5,
            "output_tokens": True,
        },
        "text_cfg": {**text, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {**text, "layers": 1, "attn_pooler_heads": 4},
    }


def create(open_clip: ModuleType, raw: dict[str, Any], correct: bool) -> Any:
    """Theirs with every parameter filled (they leave some as memory was) and off the values where errors hide."""
    torch.manual_seed(0)
    theirs = open_clip.coca_model.CoCa(**{k: v for k, v in raw.items() if k != "custom_text"})
    theirs.text.correct_cls_mask = correct
    for name, p in theirs.named_parameters():
        generator = torch.Generator().manual_seed(key(0, name))
        if p.ndim == 1:
            p.data.add_(0.1 * torch.randn(p.shape, generator=generator))
        elif p.ndim == 2:
            p.data.copy_(torch.randn(p.shape, generator=generator) * min(p.shape) ** -0.5)
    return theirs


def convert(raw: dict[str, Any], theirs: Any, correct: bool) -> Model:
    said = {**raw, "text_cfg": {**raw["text_cfg"], "correct_cls_mask": correct}}
    imported = import_as(translate("coca", said), "coca", theirs.state_dict(), raw["multimodal_cfg"]["layers"])
    assert (imported.method, imported.left_over) == ("coca", [])
    ours = build(imported.config, preset("coca", imported.settings))
    ours.load_state_dict({**ours.state_dict(), **imported.state})
    return ours


def captions(ours: Model, lengths: list[int]) -> tuple[Tensor, Texts]:
    """Their padded ids [n, context] and our packed texts, with what our tower adds behind the end."""
    text, generator = ours.config.text, torch.Generator().manual_seed(1)
    padded = torch.zeros(len(lengths), text.context - 1, dtype=torch.int64)
    tail = [text.special[name] for name in text.extra_tokens]
    packed = []
    for row, length in zip(padded, lengths, strict=True):
        row[:length] = torch.randint(1, text.special["start"], (length,), generator=generator)
        row[0], row[length - 1] = text.special["start"], text.special["end"]
        packed.append(row[:length].tolist() + tail)
    return padded, Texts.pack(packed)


def compare(theirs: Any, ours: Model, lengths: list[int], tolerance: float) -> tuple[Tensor, Tensor]:
    """Features, memory and logits; returns a loss of each model that depends on all of them."""
    size, n = ours.config.image.size, len(lengths)
    photos = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    padded, texts = captions(ours, lengths)
    given = ours.normalise(photos)
    out = theirs(given, padded)
    (image_tokens, images), (text_tokens, words) = ours.encode_image(photos), ours.encode_text(texts)
    assert_near(images["vec"], out["image_features"], tolerance)
    assert_near(words["vec"], out["text_features"], tolerance)
    memory = ours.memory(image_tokens)
    assert_near(memory, theirs.visual(given)[1], tolerance)
    decoder: Any = ours.more["text_decoder"]
    x, targets = decoded(ours, texts, text_tokens, decoder.remember(memory))
    logits = x @ decoder.table(ours.text_tower.tokens).T
    real = torch.cat([row[: length - 1] for row, length in zip(out["logits"], lengths, strict=True)])
    assert_near(logits, real, tolerance)
    assert targets.tolist() == [i for row, length in zip(padded, lengths, strict=True) for i in row[1:length].tolist()]
    assert ours.head.log_scale.exp() == out["logit_scale"]
    mine = F.cross_entropy(logits, targets) + (images["vec"] * words["vec"]).sum()
    return mine, F.cross_entropy(real, targets) + (out["image_features"] * out["text_features"]).sum()


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).detach().abs().max()) < tolerance


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("memory", [32, 48])
def test_parity(open_clip: ModuleType, memory: int, correct: bool) -> None:
    """Both masks of the class token, texts of all lengths that fit; values, and every gradient in double precision."""
    theirs = create(open_clip, small(memory), correct).double()
    ours = convert(small(memory), theirs, correct).double()
    longest = ours.config.text.context - len(ours.config.text.extra_tokens)
    assert longest == (10 if correct else 9)
    compare(theirs, ours, [4, 4], 1e-12)
    mine, reference = compare(theirs, ours, [2, longest, 4, 7, 3], 1e-12)
    mine.backward()  # type: ignore[no-untyped-call]
    reference.backward()  # type: ignore[no-untyped-call]
    given = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    wanted, unused = translated(given, dict(ours.named_parameters()))
    assert not unused
    rows = torch.arange(ours.config.text.vocab) != ours.config.text.special["mask"]  # a row that they do not have
    for name, p in ours.named_parameters():
        if name == "head.log_scale":
            continue
        assert p.grad is not None
        a, b = (g[rows] if name == "text_tower.tokens" else g for g in (p.grad, wanted.pop(name)))
        assert float((a - b).norm()) < 1e-8 * float(b.norm()) + 1e-12, name
    assert not wanted


@pytest.mark.slow
def test_parity_of_a_real_size(open_clip: ModuleType) -> None:
    raw = open_clip.get_model_config("coca_ViT-B-32")
    theirs = create(open_clip, raw, True)
    with torch.no_grad():
        compare(theirs, convert(raw, theirs, True), [20, 3, 75, 41], 1e-4)


@pytest.mark.slow
def test_import_writes_a_folder_that_scores_and_writes(
    open_clip: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kiloword import open_clip coca_ViT-B-32`: texts through both tokenizers give the same features."""
    theirs = create(open_clip, open_clip.get_model_config("coca_ViT-B-32"), correct=False)
    save_file({k: v.contiguous() for k, v in theirs.state_dict().items()}, tmp_path / "w.safetensors")
    words = ["two dogs run over wet sand", "a red star", "nothing"]
    with torch.no_grad():
        wanted = theirs.encode_text(open_clip.get_tokenizer("coca_ViT-B-32")(words))
    del theirs  # a gigabyte
    main("coca_ViT-B-32", tmp_path / "w.safetensors", tmp_path / "out")
    said = capsys.readouterr().out
    assert "left over: " not in said
    assert read_model_file(tmp_path / "out").method == "coca"
    ours, tokenizer = load_model(tmp_path / "out")
    with torch.no_grad():
        _, features = ours.encode_text(tokenizer.encode(words, ours.config.text))
    assert_near(features["vec"], wanted, 1e-5)


def test_configurations(open_clip: ModuleType) -> None:
    large = model_config("coca_ViT-L-14")
    assert (large.head.image_pool, large.head.pool_queries, large.head.pool_width) == ("attentional", 255, 768)
    assert (large.text.context, large.text.vocab, large.text.extra_tokens) == (77, 49410, ("pad", "cls"))
    with pytest.raises(Unlike, match=r"coca_base is built differently from our towers.*attentional_pool"):
        model_config("coca_base")
    with pytest.raises(Unlike, match=r"coca_roberta-ViT-B-32 is built differently.*hf_model_name"):
        model_config("coca_roberta-ViT-B-32")
    with pytest.raises(Unlike, match=r"multimodal_cfg\.heads"):
        translate("mine", {**small(), "multimodal_cfg": {**small()["multimodal_cfg"], "heads": 4}})
