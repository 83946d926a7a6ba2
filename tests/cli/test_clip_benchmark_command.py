"""CLIP_benchmark's own command on a model of ours (`python -m kiloword.cli.clip_benchmark`): the digits of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from folders import model_folder
from kiloword.cli.clip_benchmark import load_kiloword
from kiloword.cli.main import main


def test_what_it_gets(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    model, transform, tokenizer = load_kiloword("kiloword", str(folder), device="cpu")
    with torch.no_grad():
        images = model.eval().encode_image(transform(Image.new("RGB", (50, 40), "red"))[None])
        texts = model.encode_text(tokenizer(["a dog", "a cat"]).to("cpu"))
    assert (images.shape, texts.shape) == ((1, 16), (2, 16))
    torch.testing.assert_close(images.norm(dim=1), torch.ones(1))
    by_name = load_kiloword(str(folder), "")[0].eval()
    torch.testing.assert_close(by_name.encode_text(tokenizer(["a cat"])).detach(), texts[1:])


@pytest.mark.slow
def test_its_command_finds_our_digits(shared: Path, tmp_path: Path) -> None:
    for package in ("clip_benchmark", "webdataset", "requests", "sklearn", "pycocoevalcap"):
        pytest.importorskip(package, reason=f"CLIP_benchmark's command imports {package}")
    model, data = model_folder(tmp_path / "model"), shared / "wds_cifar10"
    command = [sys.executable, "-m", "kiloword.cli.clip_benchmark", "eval", "--model_type", "kiloword", "--no_amp"]
    command += ["--model", "kiloword", "--pretrained", str(model), "--dataset", "wds/cifar10"]
    command += ["--dataset_root", str(data), "--num_workers", "0", "--output", str(tmp_path / "theirs.json")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads((tmp_path / "theirs.json").read_text())["metrics"]
    flags = ["--data", str(data / "test"), "--templates", "cifar10", "--json", str(tmp_path / "ours.json")]
    main(["eval", "zeroshot", str(model), *flags])
    ours = json.loads((tmp_path / "ours.json").read_text())
    assert theirs
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, abs=1e-6)
