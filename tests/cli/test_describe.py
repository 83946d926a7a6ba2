"""What `kiloword methods | sizes | doctor` say is true of what is built."""

from __future__ import annotations

import re

import pytest
import torch

from kiloword.cli.describe import extras, parameters, slots
from kiloword.cli.main import main
from kiloword.config.recipes import sizes
from kiloword.distributed.device import cores
from kiloword.methods.registry import PRESETS, components, preset
from kiloword.models.build import build


def test_sizes_name_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert parameters(sizes()["b32"]) == 151_277_313  # ViT-B/32 as OpenAI released it
    model = build(sizes()["debug"], preset("clip"))
    assert parameters(sizes()["debug"]) == sum(p.numel() for p in model.parameters())
    main(["sizes"])
    rows = {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()[1:]}
    for name, config in sizes().items():
        assert rows[name][-1] == f"{parameters(config) / 1e6:.2f}"
        assert rows[name][1:3] == [str(config.image.size), str(config.image.patch)]


def test_methods_name_every_preset_and_component(capsys: pytest.CaptureFixture[str]) -> None:
    main(["methods"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in lines[len(PRESETS) + 1 :]}
    for name, line in zip(PRESETS, lines[1:], strict=False):
        assert re.split(r"\s{2,}", line.strip()) == [word for word in slots(preset(name)).values() if word]
    assert all(rows[name] == [name, one.slot, one.summary] for name, one in components().items())
    found = {name: slots(preset(name)) for name in PRESETS}
    stated = {"prolip": "uncertainty gaussian", "vqa": "pair_loss ", "clip-c": "transforms compose"}
    stated |= {"llip": "pooling contextual", "sycoca": "terms caption, mim", "fff": "captions all"}
    for method, words in {**stated, "siglip": "positives annotated"}.items():
        assert any(f"{slot} {component}" == words for slot, component in found[method].items()), words


def test_doctor_says_what_is_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    main(["doctor"])
    output = capsys.readouterr().out
    assert torch.__version__ in output
    assert "OMP_WAIT_POLICY=ACTIVE" in output
    assert f"{torch.get_num_threads()} of torch on {cores()} cores" in output
    assert extras()["fast"]["simplejpeg"]
    assert "extra fast" in output
