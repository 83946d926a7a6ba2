"""What `kiloword methods | sizes | doctor` say is true of what is built."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel  # the counter does not know the fused kernel of CPUs
from torch.utils.flop_counter import FlopCounterMode

from kiloword.describe import (
    doctor_table,
    extras,
    hints,
    image_flops,
    machine,
    methods_table,
    parameters,
    sizes_table,
    slots,
    text_flops,
)
from kiloword.methods import names, preset
from kiloword.model import build
from kiloword.recipes import sizes
from kiloword.types import Texts


def test_slots_in_words() -> None:
    assert slots(preset("siglip")) == {
        "method": "siglip",
        "source": "arXiv:2303.15343",
        "views": "",
        "captions": "one",
        "pooling": "single",
        "uncertainty": "",
        "positives": "annotated",
        "pair loss": "sigmoid",
        "terms": "",
        "summary": preset("siglip").summary,
    }


def test_parameters_are_those_of_the_field() -> None:
    assert parameters(sizes()["b32"]) == 151_277_313  # ViT-B/32 as OpenAI released it
    config = sizes()["debug"]
    assert parameters(config) == sum(p.numel() for p in build(config, preset("clip")).parameters())


@pytest.mark.parametrize("size", ["debug", "tiny"])
def test_arithmetic_is_what_torch_counts(size: str) -> None:
    config = sizes()[size]
    model = build(config, preset("clip"))
    side, context = config.image.size, config.text.context
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.encode_image(torch.zeros(1, 3, side, side, dtype=torch.uint8))
    assert image_flops(config) == pytest.approx(counter.get_total_flops(), rel=0.01)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.encode_text(Texts.pack([[1] * context]))
    assert text_flops(config) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_methods_name_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    methods_table()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(names())]] == names()
    assert "arXiv:2103.00020" in lines[1]


def test_sizes_name_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    sizes_table()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:10]] == list(sizes())
    assert "151.28" in next(line for line in lines if line.startswith("b32"))


def test_doctor_says_what_is_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    doctor_table()
    said = capsys.readouterr().out
    assert torch.__version__ in said
    assert "OMP_NUM_THREADS=3" in said
    assert machine()["devices"].startswith("cpu")
    assert ("hint: OMP_WAIT_POLICY=PASSIVE" in said) == (not torch.cuda.is_available())


def test_doctor_names_extras_present_and_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras()["fast"]["simplejpeg"]
    monkeypatch.setattr("kiloword.describe._version", lambda package: "")
    assert extras()["timm"] == {"timm": ""}
    assert any("kiloword[fast]" in hint for hint in hints())
