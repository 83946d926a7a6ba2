"""`kiloword caption`: tables of captions, whole whenever the run was killed; captioners of ours and of transformers."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from commands import held_by_another, refused, said
from folders import changed, model_folder, word_pieces
from kiloword.api import load
from kiloword.data.images.decode import Pixels, decode
from kiloword.data.joins import CaptionTable
from kiloword.data.open import mix, open_source, with_captions
from kiloword.generation.captioner import Caption
from kiloword.generation.captioners import open_captioner
from kiloword.generation.command import write_captions
from kiloword.generation.options import GenerationOptions
from kiloword.methods.defaults import default_recipe
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.training.loop import RunOptions, train
from other_libraries import SIDE, TOWER, stirred
from tars import pairs, photo, write_tar

SCENES = "scenes?n=20&captions=3"
BEAMS = GenerationOptions(num=5)
BLIP_TEXT = {"vocab_size": 91, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "coca", "coca")


@pytest.mark.parametrize("method", ["greedy", "beam", "nucleus"])
def test_a_table_of_what_the_model_says(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    num, out = (1 if method == "greedy" else 5), tmp_path / "c.parquet"
    flags = ("--num", num, "--method", method, "--longest", 9, "--batch", 7, "--workers", 2, "--device", "cpu")
    assert f"{20 * num} captions of 20 images" in said(capsys, "caption", model, "--data", SCENES, "--out", out, *flags)
    source, found = open_source(SCENES, size=32), pq.read_table(out).to_pydict()
    assert found["key"] == [source.record(row).key for row in range(20)]
    images = [Image.fromarray(np.asarray(source.record(n).image)) for n in (0, 9)]
    if method != "nucleus":  # drawn by the images' names, not by what they are
        options = GenerationOptions(num=num, method=method, longest=9)
        for row, expected in zip((0, 9), load(model).caption(images, options), strict=True):
            assert found["captions"][row] == [c.text for c in expected if c.text]
            assert found["scores"][row] == pytest.approx([c.score for c in expected if c.text], rel=1e-5)
    assert all(len(set(some)) == len(some) == num for some in found["captions"])
    assert not (tmp_path / "c.parquet.parts").exists()
    assert len(CaptionTable(out).captions(source.record(3).key)) == num
    if method == "greedy":
        return
    recipe = default_recipe("clip", "debug", (SCENES,))
    data = replace(recipe.data, extra_captions=(str(out),), raw_captions=False, tokenizer_vocab=300)
    train(replace(recipe, steps=2, batch=8, data=data), tmp_path / "run", options=RunOptions(quiet=True, device="cpu"))


class Slow:
    """Says the mean colour of an image; waits before the image that it is told to wait for."""

    fingerprint, precision, size = "slow", "fp32", 8

    def __init__(self, wait_at: int = -1) -> None:
        self.calls, self.wait_at = 0, wait_at

    @property
    def transform(self) -> Any:
        return self

    def __call__(self, image: bytes | Pixels) -> Tensor:
        return torch.tensor(np.array(Image.fromarray(decode(image)).resize((8, 8)))).permute(2, 0, 1)

    def caption(self, images: Tensor, options: GenerationOptions, keys: Sequence[str]) -> list[list[Caption]]:
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
def photos(tmp_path: Path) -> Path:
    """Twelve in a tar, of which two are bad."""
    bad = {"0003.png": b"no image", "0007.png": b""}
    return write_tar(tmp_path / "photos" / "0.tar", {**pairs(12), **bad})


def made(describer: Any, photos: Path, out: Path, **more: Any) -> tuple[int, int] | None:
    return write_captions(describer, open_source(str(photos)), out, BEAMS, **{"part": 3, "batch": 2, **more})


@pytest.mark.parametrize("parts_before", [0, 1, 3])
def test_killed_and_run_again_gives_the_same_file(photos: Path, tmp_path: Path, parts_before: int) -> None:
    """SIGKILL in the part after; the parts before are not made again, whatever batch and workers."""
    whole, out = tmp_path / "whole.parquet", tmp_path / "c.parquet"
    assert made(Slow(), photos, whole) == (10, 20)
    slow = Slow(wait_at=2 * parts_before)
    process = multiprocessing.get_context("fork").Process(target=made, args=(slow, photos, out))
    process.start()
    folder, end = tmp_path / "c.parquet.parts", time.monotonic() + 200
    while len(list(folder.glob("part-*.parquet"))) != parts_before or not (folder / "captions.json").is_file():
        assert time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not out.exists()
    again = Slow()
    assert made(again, photos, out, batch=3, workers=2) == (10, 20)
    assert again.calls == 4 - parts_before
    assert out.read_bytes() == whole.read_bytes()
    assert not folder.exists()
    assert made(again, photos, out) == (10, 20)  # a finished table is left alone
    assert again.calls == 4 - parts_before


def test_what_is_there_is_not_overwritten(photos: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "c.parquet", Slow()
    with held_by_another(out, tmp_path / "c.parquet.parts"), pytest.raises(ValueError, match="process"):
        made(Slow(), photos, out)
    made(Slow(), photos, out)
    other.fingerprint = "another"
    write_tar(tmp_path / "more" / "0.tar", pairs(3, 20))
    refused = {"slow there, another here": (other, photos), "fingerprint": (Slow(), tmp_path / "more")}
    for word, (describer, data) in refused.items():
        with pytest.raises(ValueError, match=word):
            made(describer, data, out)
    with pytest.raises(ValueError, match="num 5 there, 2 here"):
        write_captions(Slow(), open_source(str(photos)), out, GenerationOptions(num=2))
    for name in ("a.parquet", "b.parquet.parts/precious"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
        with pytest.raises(ValueError, match="choose another --out"):
            made(Slow(), photos, tmp_path / f"{name[0]}.parquet")
        assert (tmp_path / name).read_text() == "x"


def test_bad_rows_are_counted_and_named_and_keys_may_repeat(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same image is described once; another with its key would get its captions. Images need no captions."""
    made(Slow(), photos, tmp_path / "c.parquet", report=sys.stderr)
    report = capsys.readouterr().err
    assert all(word in report for word in ("0003", "0007", "2 of 12"))
    keys = pq.read_table(tmp_path / "c.parquet").column("key").to_pylist()
    assert keys == [f"{n:04d}" for n in range(12) if n not in (3, 7)]
    for name in ("a", "b"):
        write_tar(tmp_path / f"{name}.tar", pairs(3))
    other = {name: photo((9, 9, 9)) if name.endswith("g") else text for name, text in pairs(3).items()}
    write_tar(tmp_path / "other.tar", other)
    a, b, others = [open_source(str(tmp_path / f"{name}.tar")) for name in ("a", "b", "other")]
    assert write_captions(Slow(), mix([a, b]), tmp_path / "ab.parquet", BEAMS) == (3, 6)
    with pytest.raises(ValueError, match="the key '0000'"):
        write_captions(Slow(), mix([a, others]), tmp_path / "ac.parquet", BEAMS)
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "b.png").write_bytes(photo())
    assert made(Slow(), folder, tmp_path / "bare.parquet") == (1, 2)
    assert with_captions(open_source(str(folder)), [tmp_path / "bare.parquet"]).record(0).captions[0].startswith("b is")


@pytest.mark.parametrize(
    ("captioner", "words", "word"),
    [
        ("model", "--method greedy --num 2", "--num"),
        ("model", "--longest 999", "text tower"),
        ("model", "--batch 0", "--batch"),
        ("model", "--data {root}/photos", "1 rows"),
        ("model", "--out {root}/c.csv", "parquet"),
        ("{root}/none", "", "none"),
        ("{root}/clip", "", "decoder"),
        ("{root}/vqa", "", "questions"),
        ("hf:{root}", "", "save_pretrained"),
        ("hf:{root}/hf", "", "kiloword[hf]"),
    ],
)
def test_refusals(
    captioner: str, words: str, word: str, model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if captioner in ("{root}/clip", "{root}/vqa"):
        model_folder(tmp_path / captioner[7:], captioner[7:])
    for name in ("hf", "photos"):
        (tmp_path / name).mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "photos" / "a.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", None)
    named = str(model) if captioner == "model" else captioner.format(root=tmp_path)
    flags = {"--data": SCENES, "--out": str(tmp_path / "c.parquet"), "--device": "cpu"}
    given = iter(words.format(root=tmp_path).split())
    flags |= dict(zip(given, given, strict=True))
    assert word in refused(capsys, "caption", named, *itertools.chain(*flags.items()))


def test_a_captioner_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Captions and scores are those of the library's own search; texts that read the same are one caption."""
    torchvision_ready()
    library = pytest.importorskip("transformers", reason="needs transformers")
    folder, out, tokens = tmp_path / "hf", tmp_path / "c.parquet", {"pad_token": "[PAD]", "sep_token": "[SEP]"}
    text = {**TOWER, **BLIP_TEXT}
    config = library.BlipConfig(text_config=text, vision_config={**TOWER, "image_size": SIDE, "patch_size": 8})
    model = stirred(library.BlipForConditionalGeneration(config))
    model.text_decoder.cls.predictions.bias.data[:3] += 2  # special tokens, which no text shows
    words = library.PreTrainedTokenizerFast(tokenizer_object=word_pieces(), cls_token="[CLS]", **tokens)
    processor = library.BlipProcessor(library.BlipImageProcessor(size={"height": SIDE, "width": SIDE}), words)
    for saved in (model, processor):
        saved.save_pretrained(str(folder))
    photos = write_tar(folder / "photos" / "0.tar", pairs(5))  # a folder beside the files of the model
    flags = ("--num", 2, "--longest", 4, "--device", "cpu")
    said(capsys, "caption", f"hf:{folder}", "--data", photos, "--out", out, *flags)
    found = pq.read_table(out).to_pydict()
    assert found["key"] == [f"{n:04d}" for n in range(5)]
    source, repeated = open_source(str(photos)), 0
    for row in range(5):
        pixels = processor(images=Image.fromarray(decode(source.record(row).image)), return_tensors="pt")
        more = {"num_beams": 5, "num_return_sequences": 5, "max_new_tokens": 3, "output_scores": True}
        beams = model.generate(**pixels, **more, do_sample=False, return_dict_in_generate=True)
        texts = [text.strip() for text in words.batch_decode(beams.sequences, skip_special_tokens=True)]
        scores: dict[str, float] = {}
        for text, score in zip(texts, beams.sequences_scores.tolist(), strict=True):
            scores.setdefault(text, score)
        repeated += len(texts) - len(scores)
        scores.pop("", None)
        assert found["captions"][row] == list(scores)[:2]
        assert found["scores"][row] == pytest.approx(list(scores.values())[:2], rel=1e-5)
    assert repeated
    for wrong in (GenerationOptions(method="nucleus"), GenerationOptions(beams=1)):
        with pytest.raises(ValueError, match="--method beam"):
            open_captioner(f"hf:{folder}", "cpu").check(wrong)
    changed(folder, "config.json", model_type="bert")
    with pytest.raises(ValueError, match="Unrecognized"):
        open_captioner(f"hf:{folder}", "cpu")
