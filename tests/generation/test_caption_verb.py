"""`kiloword caption`: tables of captions, whole whenever the run was killed; captioners of ours and of transformers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from holding import held_by_another
from kiloword.api import load
from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile
from kiloword.data.images.decode import Pixels, decode
from kiloword.data.joins import CaptionTable
from kiloword.data.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.generation.captioner import Caption
from kiloword.generation.captioners import open_captioner
from kiloword.generation.command import write_captions
from kiloword.generation.options import GenerationOptions
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.training.loop import RunOptions, train
from kiloword.types import BadSample
from tars import pairs, photo, write_tar

SCENES = "scenes?n=20&captions=3"
BEAMS = GenerationOptions(num=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights."""
    tokenizer = Tokenizer.train(["a red circle above a blue square"] * 3, 290)
    return untrained("coca", tokenizer, tmp_path_factory.mktemp("model"))


def untrained(method: str, tokenizer: Tokenizer, folder: Path) -> Path:
    config = default_recipe(method, "debug").model
    config = replace(config, text=replace(config.text, vocab=tokenizer.vocab))
    made = build(config, preset(method), 0)
    save_model(folder, made, tokenizer, ModelFile(method=method, settings={}, model=made.config))
    return folder


def run(*words: object) -> None:
    main([str(word) for word in words])


@pytest.mark.parametrize("method", ["greedy", "beam", "nucleus"])
def test_a_table_of_what_the_model_says(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    num, out = (1 if method == "greedy" else 5), tmp_path / "c.parquet"
    flags = ("--num", num, "--method", method, "--longest", 9, "--batch", 7, "--workers", 2, "--device", "cpu")
    run("caption", model, "--data", SCENES, "--out", out, *flags)
    said = capsys.readouterr()
    assert f"captions of 20 images, {out.stat().st_size / 1e6:,.1f} MB" in said.out
    assert "images 100%" in said.err
    source, found = open_source(SCENES, size=32), pq.read_table(out).to_pydict()
    assert found["key"] == [source.record(row).key for row in range(20)]
    images = torch.stack([load(model).preprocess(Image.fromarray(np.asarray(source.record(n).image))) for n in (0, 9)])
    if method != "nucleus":  # drawn by the images' names, not by what they are
        options = GenerationOptions(num=num, method=method, longest=9)
        for row, expected in zip((0, 9), load(model).caption(images, options), strict=True):
            assert found["captions"][row] == [c.text for c in expected if c.text]
            assert found["scores"][row] == pytest.approx([c.score for c in expected if c.text], rel=1e-5)
    assert all(len(set(some)) == len(some) for some in found["captions"])
    assert sum(map(len, found["captions"])) == 20 * num
    assert not (tmp_path / "c.parquet.parts").exists()


def test_training_reads_the_table(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.parquet"
    run("caption", model, "--data", SCENES, "--out", out, "--num", 2, "--device", "cpu")
    recipe = default_recipe("clip", "debug", (SCENES,))
    data = replace(recipe.data, extra_captions=(str(out),), raw_captions=False, tokenizer_vocab=300)
    train(replace(recipe, steps=2, batch=8, data=data), tmp_path / "run", options=RunOptions(quiet=True, device="cpu"))
    assert len(CaptionTable(out).captions(open_source(SCENES).record(3).key)) == 2


class Slow:
    """Says the mean colour of an image; waits before the image that it is told to wait for."""

    fingerprint = "slow"

    def __init__(self, wait_at: int = -1) -> None:
        self.calls, self.wait_at = 0, wait_at

    size = 8

    @property
    def transform(self) -> Any:
        return self

    def __call__(self, image: bytes | Pixels) -> Tensor:
        return torch.tensor(np.array(Image.fromarray(decode(image)).resize((8, 8)))).permute(2, 0, 1)

    def describe(self, images: Tensor, options: GenerationOptions, keys: Sequence[str]) -> list[list[Caption]]:
        self.calls += 1
        if self.calls > self.wait_at >= 0:
            time.sleep(60)
        means = images.float().mean((1, 2, 3)).tolist()
        return [
            [Caption(f"{key} is {mean:.3f}", mean / n) for n in (1, 2)] + [Caption("", 0.0)]  # is left out
            for key, mean in zip(keys, means, strict=True)
        ]

    def check(self, options: GenerationOptions) -> None:
        options.check()


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve in a tar, of which two are bad."""
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "cache"))
    bad = {"0003.png": b"no image", "0007.png": b""}
    return write_tar(tmp_path / "photos" / "0.tar", {**pairs(12), **bad})


def made(describer: Slow, photos: Path, out: Path, **more: Any) -> tuple[int, int]:
    return write_captions(describer, open_source(str(photos)), out, BEAMS, **{"part": 3, "batch": 2, **more})


@pytest.mark.parametrize("parts_before", [0, 1, 3])
def test_killed_and_run_again_gives_the_same_file(photos: Path, tmp_path: Path, parts_before: int) -> None:
    """SIGKILL in the part after; the parts before are not made again, whatever batch and workers."""
    whole, out = tmp_path / "whole.parquet", tmp_path / "c.parquet"
    assert made(Slow(), photos, whole) == (10, 20)
    slow = Slow(wait_at=2 * parts_before)
    process = multiprocessing.get_context("fork").Process(target=made, args=(slow, photos, out))
    process.start()
    folder = tmp_path / "c.parquet.parts"
    _wait_for(lambda: len(list(folder.glob("part-*.parquet"))) == parts_before and (folder / "captions.json").is_file())
    process.kill()
    process.join()
    assert not out.exists()
    again = Slow()
    assert made(again, photos, out, batch=3, workers=2) == (10, 20)
    assert again.calls == 4 - parts_before
    assert out.read_bytes() == whole.read_bytes()
    assert not folder.exists()


def _wait_for(there: Any) -> None:
    end = time.monotonic() + 200
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_finished_table_is_left_alone(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.parquet"
    made(Slow(), photos, out)
    before, again = out.stat().st_mtime_ns, Slow()
    assert made(again, photos, out) == (10, 20)
    assert again.calls == 0
    assert out.stat().st_mtime_ns == before


def test_a_table_that_another_process_writes_is_refused(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.parquet"
    with held_by_another(out, tmp_path / "c.parquet.parts") as other:
        with pytest.raises(ValueError, match=rf"process {other.pid} on \S+ is writing {out}: wait for its end"):
            made(Slow(), photos, out)
        assert [path.name for path in (tmp_path / "c.parquet.parts").iterdir()] == [".lock"]
    assert made(Slow(), photos, out) == (10, 20)
    assert not (tmp_path / "c.parquet.parts").exists()


def test_another_command_over_the_same_table_is_refused(photos: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "c.parquet", Slow()
    other.fingerprint = "another"
    write_tar(tmp_path / "more" / "0.tar", pairs(3, 20))
    made(Slow(), photos, out)
    with pytest.raises(ValueError, match=r"holds other captions.*slow there, another here"):
        made(other, photos, out)
    with pytest.raises(ValueError, match="fingerprint"):
        made(Slow(), tmp_path / "more", out)
    with pytest.raises(ValueError, match="num 5 there, 2 here"):
        write_captions(Slow(), open_source(str(photos)), out, GenerationOptions(num=2))
    for name in ("a.parquet", "b.parquet.parts/precious"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
        with pytest.raises(ValueError, match=r"choose another --out"):
            made(Slow(), photos, tmp_path / f"{name[0]}.parquet")
        assert (tmp_path / name).read_text() == "x"


def test_bad_rows_are_counted_and_named(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    out = tmp_path / "c.parquet"
    made(Slow(), photos, out, report=sys.stderr)
    said = capsys.readouterr().err
    assert "0003" in said
    assert "1 sample skipped, the image has zero bytes: 0007" in said
    assert "2 of 12 rows are bad, and not in the table." in said
    assert pq.read_table(out).column("key").to_pylist() == [f"{n:04d}" for n in range(12) if n not in (3, 7)]


def test_images_need_no_captions_and_have_them_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.png").write_bytes(photo())
    with pytest.raises(BadSample, match="no caption"):
        open_source(str(folder)).record(0)
    out = tmp_path / "c.parquet"
    assert made(Slow(), folder, out) == (2, 4)
    from kiloword.data.open import with_captions

    assert with_captions(open_source(str(folder)), [out]).record(1).captions[0].startswith("b is ")


def test_keys_that_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same image is described once; another with its key would get its captions."""
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "cache"))
    for name in ("a", "b"):
        write_tar(tmp_path / f"{name}.tar", pairs(3))
    other = {name: photo((9, 9, 9)) if name.endswith("g") else text for name, text in pairs(3).items()}
    write_tar(tmp_path / "c.tar", other)
    both = [open_source(str(tmp_path / f"{name}.tar")) for name in "abc"]
    from kiloword.data.open import mix

    assert write_captions(Slow(), mix(both[:2]), tmp_path / "ab.parquet", BEAMS) == (3, 6)
    with pytest.raises(ValueError, match=r"two images of .* have the key '0000'"):
        write_captions(Slow(), mix([both[0], both[2]]), tmp_path / "ac.parquet", BEAMS)


def test_what_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("--data", SCENES, "--out", tmp_path / "c.parquet", "--device", "cpu")
    untrained("clip", Tokenizer.load(model), tmp_path / "clip")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "hf" / "model.safetensors")
    monkeypatch.setitem(sys.modules, "transformers", None)
    wrong: dict[str, tuple[object, ...]] = {
        "num is 2": (model, *out, "--method", "greedy", "--num", 2),
        "text tower reads": (model, *out, "--longest", 999),
        "expected a model folder": (tmp_path / "none", *out),
        "save_pretrained": (f"hf:{tmp_path}", *out),
        "no text decoder": (tmp_path / "clip", *out),
        "kiloword[hf]": (f"hf:{tmp_path / 'hf'}", *out),
        "none of its 1 rows": (model, "--data", tmp_path / "photos", *out[2:]),
    }
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"")
    for word, words in wrong.items():
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run("caption", *words)
        assert stop.value.code == 2
        assert word in capsys.readouterr().err


def test_other_weights_are_another_model(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert open_captioner(str(copy), "cpu").fingerprint == open_captioner(str(model), "cpu").fingerprint
    weights = load_file(copy / "model.safetensors")
    weights["head.log_scale"] += 1
    save_file(weights, copy / "model.safetensors")
    assert open_captioner(str(copy), "cpu").fingerprint != open_captioner(str(model), "cpu").fingerprint


class HfCaptioner(torch.nn.Module):
    """Stands in for a captioner of transformers: words depend on the image, and two beams say the same."""

    base_model_prefix = "blip"

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3 * 8 * 8, 40)

    def generate(self, pixel_values: Tensor, num_beams: int, **given: Any) -> Any:
        assert given["do_sample"] is False
        assert given["output_scores"]  # without, transformers gives no score of a sequence either
        words = self.linear(pixel_values.flatten(1)).argsort(1)[:, :3]  # [n, 3]
        several = given.get("num_return_sequences", 1)
        beams = (torch.arange(several) // 2 * 2)[:, None]
        sequences = (words[:, None] + beams).flatten(0, 1)
        scores = None if num_beams == 1 else -1.0 - torch.arange(len(sequences)) % several
        return types.SimpleNamespace(sequences=sequences, sequences_scores=scores, scores="steps")

    def compute_transition_scores(self, sequences: Tensor, scores: str, normalize_logits: bool) -> Tensor:
        assert normalize_logits
        assert scores == "steps"
        return torch.tensor([-1.0, -2.0, -4.0]).expand(len(sequences), 3)


class HfProcessor:
    """Squashes images to 8 x 8 and centres them; texts are numbers."""

    pad_token_id, eos_token_id = 99, 98

    def __call__(self, images: Image.Image, return_tensors: str) -> dict[str, Tensor]:
        assert return_tensors == "pt"
        pixels = torch.tensor(np.array(images.resize((8, 8)))).permute(2, 0, 1)
        return {"pixel_values": (pixels / 255 - 0.5)[None]}

    def batch_decode(self, sequences: Tensor, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [" " + " ".join(map(str, some)) for some in sequences.tolist()]


@pytest.fixture
def hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as transformers writes it, and a stand-in for the package, which checks have not installed."""
    torch.manual_seed(0)
    captioner = HfCaptioner()

    def load_it(folder: str, **options: Any) -> tuple[HfCaptioner, dict[str, list[str]]]:
        assert options.pop("output_loading_info")
        assert options == {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
        if json.loads((Path(folder) / "config.json").read_text())["model_type"] != "blip":
            raise ValueError("Unrecognized configuration class")
        return captioner, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}

    fake = types.SimpleNamespace(
        AutoModelForImageTextToText=types.SimpleNamespace(from_pretrained=load_it),
        AutoProcessor=types.SimpleNamespace(
            from_pretrained=lambda folder, local_files_only, trust_remote_code: HfProcessor()
        ),
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "blip"}')
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def test_a_captioner_of_transformers(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "cache"))
    photos = write_tar(tmp_path / "0.tar", pairs(5))
    out = tmp_path / "c.parquet"
    run("caption", f"hf:{hf}", "--data", photos, "--out", out, "--num", 2, "--device", "cpu", "--workers", 2)
    found = pq.read_table(out).to_pydict()
    assert found["key"] == [f"{n:04d}" for n in range(5)]
    assert [len(some) for some in found["captions"]] == [2] * 5
    processor = HfProcessor()
    captioner, _ = sys.modules["transformers"].AutoModelForImageTextToText.from_pretrained(
        str(hf), local_files_only=True, use_safetensors=True, trust_remote_code=False, output_loading_info=True
    )
    image = Image.fromarray(decode(open_source(str(photos)).record(4).image))
    words = captioner.linear(processor(image, "pt")["pixel_values"].flatten(1)).argsort(1)[0, :3]
    assert found["captions"][4] == [" ".join(str(int(w) + n) for w in words) for n in (0, 2)]


def test_scores_of_one_beam_are_put_together(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three tokens, of two and an end that is filled up, and likewise where the pad is the end."""
    describer = open_captioner(f"hf:{hf}", "cpu")
    images = torch.stack([describer.transform(np.full((9, 7, 3), n, np.uint8)) for n in (0, 200)])
    greedy = GenerationOptions(method="greedy", length_penalty=2.0)
    said = types.SimpleNamespace(sequences=torch.tensor([[1, 99, 7, 98], [2, 7, 98, 99]]), scores="steps")
    monkeypatch.setattr(HfCaptioner, "generate", lambda *_, **__: said)
    assert [some[0].score for some in describer.describe(images, greedy, ["a", "b"])] == pytest.approx([-7 / 9, -3 / 4])
    monkeypatch.setattr(HfProcessor, "eos_token_id", 99)
    said.sequences = torch.tensor([[1, 5, 99, 99], [2, 99, 7, 8]])
    assert [some[0].score for some in describer.describe(images, greedy, ["a", "b"])] == pytest.approx([-3 / 4, -7 / 9])
    with pytest.raises(ValueError, match="nucleus is only for model folders"):
        describer.check(GenerationOptions(method="nucleus"))


def test_folders_of_transformers_that_cannot_be_used(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hf / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="holds no captioner that transformers can open: Unrecognized"):
        open_captioner(f"hf:{hf}", "cpu")
    (hf / "config.json").write_text('{"model_type": "blip"}')
    grow = lambda self, images, return_tensors: {"pixel_values": torch.zeros(1, 3, images.height, images.width)}  # noqa: E731
    monkeypatch.setattr(HfProcessor, "__call__", grow)
    with pytest.raises(ValueError, match="Expected one square"):
        open_captioner(f"hf:{hf}", "cpu")
    (hf / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        open_captioner(f"hf:{hf}", "cpu")


@pytest.mark.slow
def test_the_command_killed_in_the_middle(model: Path, tmp_path: Path) -> None:
    """kill -9 of the whole command, twice; then the file of an uninterrupted run, byte for byte."""
    data = "scenes?n=5000&captions=1"
    command = [sys.executable, "-m", "kiloword", "caption", str(model), "--data", data, "--num", "3", "--device", "cpu"]
    command += ["--longest", "8", "--batch", "64"]
    whole, out = tmp_path / "whole.parquet", tmp_path / "c.parquet"
    subprocess.run([*command, "--out", str(whole)], check=True, capture_output=True)
    for parts in (1, 3):
        process = subprocess.Popen(
            [*command, "--out", str(out), "--workers", "1"], stderr=subprocess.DEVNULL, start_new_session=True
        )
        _wait_for(lambda n=parts: len(list((tmp_path / "c.parquet.parts").glob("part-*"))) >= n)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not out.exists()
    done = subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, text=True)
    assert "rows are done already" in done.stderr
    assert out.read_bytes() == whole.read_bytes()
    assert pa.parquet.read_table(out).num_rows == 5000
