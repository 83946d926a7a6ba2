"""What `kiloword methods | sizes | doctor` say is true of what is built."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel  # the counter does not know the fused kernel of CPUs
from torch.utils.flop_counter import FlopCounterMode

from kiloword.cli.describe import (
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
from kiloword.config.recipes import sizes
from kiloword.distributed.device import cores
from kiloword.methods.registry import components, names, preset
from kiloword.models.build import build
from kiloword.types import Texts


def test_slots_in_words() -> None:
    assert slots(preset("siglip")) == {
        "method": "siglip",
        "source": "arXiv:2303.15343",
        "transforms": "",
        "captions": "one",
        "pooling": "single",
        "uncertainty": "",
        "positives": "annotated",
        "pair loss": "sigmoid",
        "contrasts": "",
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
    assert image_flops(config) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.encode_text(Texts.pack([[1] * context]))
    assert text_flops(config) == counter.get_total_flops()


def test_methods_name_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    methods_table()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(names())]] == names()
    for line, name in zip(lines[1:], names(), strict=False):
        filled = [word for word in slots(preset(name)).values() if word]
        assert re.split(r"\s{2,}", line.strip()) == filled
    found = {name: slots(preset(name)) for name in names()}
    assert found["prolip"]["uncertainty"] == "gaussian"
    assert found["vqa"]["pair loss"] == ""
    assert found["clip-c"]["transforms"] == "compose"
    assert found["llip"]["pooling"] == "contextual"
    assert found["sycoca"]["terms"] == "caption, mim"
    assert found["fff"]["captions"] == "all"
    rows = {line.split()[0]: line for line in lines[2 + len(names()) :]}
    assert all(re.split(r"\s{2,}", rows[name].strip()) == [name, p.slot, p.summary] for name, p in components().items())


@pytest.mark.slow
def test_sizes_name_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    sizes_table()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(sizes())]] == list(sizes())
    for line, (name, config) in zip(lines[1:], sizes().items(), strict=False):
        image, text, both = image_flops(config), text_flops(config), image_flops(config) + text_flops(config)
        towers = [f"{t.width} x {t.depth} / {t.heads}" for t in (config.image, config.text)]
        if name.startswith("rn"):
            towers[0] = f"ResNet {config.image.width} x {config.image.depth}"
        millions, *work = f"{parameters(config) / 1e6:.2f}", *(f"{w / 1e9:.3g}" for w in (image, text, both))
        numbers = (
            config.image.size,
            config.image.patch,
            *towers,
            config.text.context,
            config.head.dim,
            millions,
            *work,
        )
        assert re.split(r"\s{2,}", line.strip()) == [name, *map(str, numbers)]


def test_doctor_says_what_is_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    doctor_table()
    output = capsys.readouterr().out
    assert torch.__version__ in output
    assert "OMP_NUM_THREADS=3" in output
    assert machine()["devices"].startswith("cpu")
    assert ("hint: OMP_WAIT_POLICY=PASSIVE" in output) == (not torch.cuda.is_available())
    assert machine()["cores"] == str(cores())
    assert machine()["OpenMP"].split()[:2] == ["OMP_NUM_THREADS=3", "OMP_WAIT_POLICY=ACTIVE"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores() + 1)
    assert f"torch uses {cores() + 1} threads on {cores()} cores: set OMP_NUM_THREADS={cores()}." in hints()
    monkeypatch.setattr(torch, "get_num_threads", cores)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert not any("OMP_" in hint for hint in hints())
    for name in list(os.environ):
        if name.startswith(("OMP_", "MKL_NUM")):
            monkeypatch.delenv(name)
    assert machine()["OpenMP"].startswith("default of the library")


def test_doctor_names_extras_present_and_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras()["fast"]["simplejpeg"]
    monkeypatch.setattr("kiloword.cli.describe._version", lambda package: "")
    assert extras()["timm"] == {"timm": ""}
    assert any("kiloword[fast]" in hint for hint in hints())


def test_doctor_knows_no_extras_where_only_the_source_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("kiloword.cli.describe.metadata.version", missing)
    monkeypatch.setattr("kiloword.cli.describe.metadata.requires", missing)
    assert extras() == {}
    doctor_table()


def test_doctor_names_a_torchvision_of_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiloword.cli.describe.torchvision_ready", lambda: None)
    assert not any("torchvision" in hint for hint in hints())
    monkeypatch.setattr("kiloword.cli.describe.torchvision_ready", object)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    cpu = "--no-deps 'torchvision==0.28.*' --index-url https://download.pytorch.org/whl/cpu brings the matching one."
    assert sum(hint.endswith(cpu) for hint in hints()) == 1
    monkeypatch.setattr(torch, "__version__", "2.11.1")
    assert any("--no-deps 'torchvision==0.26.*' brings" in hint for hint in hints())
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    assert any("--no-deps torchvision brings" in hint for hint in hints())
