"""The page of `quickstart photos`, from figures that are made up: whole, self-contained, true to them, escaped."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kiloword.apps.quickstart.photos.page import page, summary
from kiloword.apps.quickstart.photos.results import (
    Certainty,
    Looks,
    MethodFigures,
    PhotoFacts,
    PhotoFigures,
    PhotoHit,
    PhotoQuery,
    PhotoResults,
)
from kiloword.config.settings import read_config
from kiloword.files import write_json
from pages import sections
from tars import noise

NAMES = ("clip", "llip", "prolip")
HOSTILE = '<script src="http://example.org/a.js"></script> & \u202e"dog"'
PHOTOS = {f"k{n}": noise(160, 160, n) for n in range(4)}


def figures(name: str, first: float) -> MethodFigures:
    recalls = {f"{side}_retrieval_recall@{k}": first + k / 100 for side in ("image", "text") for k in (1, 5, 10)}
    return MethodFigures(
        name=name, steps=10, batch=8, trained=1000, training_s=12.4, judging_s=2.0, retrieval={**recalls, "rsum": 1.0}
    )


@pytest.fixture
def results() -> PhotoResults:
    facts = PhotoFacts(
        data=("train-part:photos",),
        val=("val-part:photos",),
        held_out=True,
        photos=1234,
        captions=5678,
        val_photos=100,
        val_captions=400,
        image_tower="efficientnet-lite0",
        text_tower="minilm",
        views=2,
        stored_mb=321.0,
        extraction_s=95.0,
        seed=7,
    )
    hits = {name: tuple(PhotoHit(key=f"k{(n + i) % 4}", score=0.5) for i in range(3)) for n, name in enumerate(NAMES)}
    queries = (
        PhotoQuery(text=HOSTILE, of_photo="k1", best=hits),
        PhotoQuery(text="a free text", of_photo=None, best=hits),
    )
    uneven = tuple(float(n == 5) for n in range(9))
    looks = (Looks(key="k2", method="llip", texts=("left", "right"), side=3, maps=(uneven, uneven)),)
    sure, unsure = (Certainty(text=text, key="k0", uncertainty=u) for text, u in (("sure", 0.1), ("unsure", 0.9)))
    shown = PhotoFigures(
        methods=tuple(figures(name, n / 10) for n, name in enumerate(NAMES, start=1)),
        queries=queries,
        looks=looks,
        certain=(sure,),
        uncertain=(unsure,),
    )
    return PhotoResults(version="1", facts=facts, figures=shown, commands={"Train <llip>": "kiloword train llip 'a b'"})


def test_page_holds_every_figure_and_nothing_from_outside(results: PhotoResults) -> None:
    html = page(results, PHOTOS)
    found = sections(html)
    to_photo, to_caption = found["Methods side by side"].tables
    assert to_photo[0] == ["method", "R@1", "R@5", "R@10", "seconds"]
    assert (
        to_photo[1:]
        == to_caption[1:]
        == [
            [m.name, *(f"{m.retrieval[f'image_retrieval_recall@{k}']:.3f}" for k in (1, 5, 10)), "12"]
            for m in results.figures.methods
        ]
    )
    assert "31%" in found["In short"].text  # the best of R@1
    assert "1 min 35 s" in found["In short"].text
    for words in ("1,234 photos", "held out by key"):
        assert words in found[""].text
    for words in ("seen captions", "ImageNet-1k", "321 MB, 2 augmented views"):
        assert words in found["Methods side by side"].text
    assert [table[1] for table in found["What prolip is certain of"].tables] == [["sure", "0.1"], ["unsure", "0.9"]]
    assert "kiloword train llip 'a b'" in found["What was run, and how to go on"].text
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", html)


def test_captions_are_escaped_and_own_photos_marked(results: PhotoResults) -> None:
    html = page(results, PHOTOS)
    assert "<script" not in html
    assert "\u202e" not in html
    assert html.count("&lt;script") == 1
    shelf = html.split("&lt;script")[1].split("<section")[0]
    assert shelf.count("<li class=match>") == 2  # k1 is among the first three of clip and llip
    assert shelf.count("<img") == 3 * len(NAMES)
    free = html.split("a free text")[1].split("<section")[0]
    assert "class=match" not in free
    assert re.findall(r"<span>(\w+)</span>", free) == [*NAMES] * 3


def test_photos_are_small_jpegs_and_lost_ones_grey(results: PhotoResults) -> None:
    html = page(results, {key: PHOTOS[key] for key in ("k0", "k2")})
    kinds = re.findall(r"data:image/(\w+);base64,([\w+/=]+)", html)
    assert {kind for kind, _ in kinds} == {"png", "jpeg"}
    shown = [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for kind, data in kinds if kind == "jpeg"]
    assert all(image.shape == (160, 160, 3) for image in shown)
    whole = [np.abs(image.astype(int) - PHOTOS["k0"]).mean() for image in shown]
    assert min(whole) < 4


def test_results_survive_their_file_and_sections_without_content_are_left_out(
    results: PhotoResults, tmp_path: Path
) -> None:
    write_json(tmp_path / "results.json", asdict(results))
    assert read_config(tmp_path / "results.json", PhotoResults) == results
    assert set(results.figures.keys) == set(PHOTOS)
    bare = replace(results, figures=replace(results.figures, looks=(), certain=(), uncertain=()))
    assert not {"Where llip looks", "What prolip is certain of"} & set(sections(page(bare, PHOTOS)))


def test_summary_has_a_row_a_method(results: PhotoResults) -> None:
    lines = summary(results).splitlines()
    assert [line.split()[0] for line in lines[-3:]] == list(NAMES)
    assert lines[-1].split()[1:] == ["0.310", "0.350", "0.400"] * 2 + ["12"]
    assert max(map(len, lines[1:])) <= 100
