"""Precision of encoders and loader processes where a model is used: `eval` and `caption`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from commands import refused, said
from kiloword.api import load
from kiloword.config.recipes import sizes
from kiloword.distributed import by_device
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.types import Texts
from tars import noise_batch
from tests.pretended import placed, pretended

BF16, FP32 = torch.bfloat16, torch.float32
SCENES = "scenes:test?n=12"
FolderOf = Callable[[str], Path]
IMAGES = noise_batch(3, 32)
TEXTS = ["a red circle", "two blue squares and a star"]


@contextmanager
def kinds(*parts: nn.Module) -> Iterator[set[torch.dtype]]:
    """Types of what the linear layers of modules put out."""
    seen: set[torch.dtype] = set()
    layers = [layer for part in parts for layer in part.modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_hook(lambda _, given, out: seen.add(out.dtype)) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("method", ["clip", "llip", "prolip", "sycoca"])
def test_encoders_compute_in_bf16_and_features_and_scores_are_fp32(folder_of: FolderOf, method: str) -> None:
    plain, half = load(folder_of(method)), load(folder_of(method), precision="bf16")
    with kinds(half.model.image_tower) as seeing, kinds(half.model.text_tower) as reading:
        found = [half.encode_image(IMAGES), half.encode_text(TEXTS)]
    assert seeing == reading == {BF16}
    expected = [plain.encode_image(IMAGES), plain.encode_text(TEXTS)]
    for ours, theirs in zip(found, expected, strict=True):
        assert {name: value.dtype for name, value in ours.items()} == dict.fromkeys(theirs, FP32)
        assert float(1 - torch.cosine_similarity(ours["vec"], theirs["vec"]).min()) < 1e-2
        assert not torch.equal(ours["vec"], theirs["vec"])
    assert torch.equal(half.score(*found), plain.score(*found))
    assert torch.equal(half.classify(found[0], ["cat"]), plain.classify(found[0], ["cat"]))


def test_precision_on_a_pretended_device() -> None:
    model = build(sizes()["debug"], preset("llip"), bare=True)
    with pretended():
        placed(model)
        model.precision = "bf16"
        texts = Texts(*(torch.zeros(n, dtype=torch.int64, device="cuda") for n in (7, 3)), 4)
        pixels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8, device="cuda")
        with kinds(model.image_tower, model.text_tower) as computing, torch.no_grad():
            tokens, seen = model.encode_image(pixels)
            words, read = model.encode_text(texts)
            scores = model.score(seen, read)
    assert computing == {BF16}
    made = [tokens, words, scores, *seen.values(), *read.values()]
    assert {(x.device.type, x.dtype) for x in made} == {("cuda", FP32)}


def test_auto_is_bf16_for_large_models_on_cuda() -> None:
    def chosen(device: str) -> set[str]:
        return {name for name, c in sizes().items() if by_device.encoder_precision("auto", c, device) == "bf16"}

    assert chosen("cpu") == set()
    assert chosen("cuda:1") == set(sizes()) - {"debug", "tiny"}
    tiny = sizes()["tiny"]
    wide = replace(tiny, text=replace(tiny.text, width=512))
    assert by_device.encoder_precision("auto", wide, "cuda") == "bf16"
    assert by_device.encoder_precision("fp32", wide, "cuda") == "fp32"
    assert by_device.encoder_precision("bf16", tiny, "cpu") == "bf16"


def test_eval_takes_a_precision(folder_of: FolderOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, words = {}, ("eval", "retrieval", str(folder_of("llip")), "--data", SCENES, "--device", "cpu")
    for precision in ("fp32", "auto", "bf16"):
        said(capsys, *words, "--json", tmp_path / "r.json", "--precision", precision)
        found[precision] = json.loads((tmp_path / "r.json").read_text())
    assert found["auto"] == found["fp32"]
    assert found["bf16"] != found["fp32"]
    bounds = {name: 0.6 if name == "rsum" else 0.1 for name in found["fp32"]}  # rsum is a sum of six recalls
    assert all(found["bf16"][name] == pytest.approx(value, abs=bounds[name]) for name, value in found["fp32"].items())
    with pytest.raises(ValueError, match="fp16"):
        load(folder_of("clip"), precision="fp16")
    assert "fp16" in refused(capsys, *words, "--precision", "fp16")


def test_a_table_of_captions_has_one_precision(
    folder_of: FolderOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("caption", folder_of("sycoca"), "--data", SCENES, "--out", tmp_path / "c.parquet", "--device", "cpu")
    said(capsys, *words, "--precision", "bf16")
    assert json.loads(pq.read_schema(tmp_path / "c.parquet").metadata[b"kiloword"])["precision"] == "bf16"
    assert "precision" in refused(capsys, *words)
