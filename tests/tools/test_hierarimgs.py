"""HierarImgs: masks against slow definitions, what is chosen and drawn, what our readers and `eval hierarchy` see."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from folders import matcher
from kiloword.data.images.decode import decode
from kiloword.data.open import open_source
from kiloword.evaluation import evaluate
from kiloword.types import BadSample
from sources import files_of
from tars import encode, noise
from tools.hierarimgs import BuildOptions, BuildReport, Segment, build, decode_mask, decompress, main, select


def runs(mask: np.ndarray) -> list[int]:
    """Run lengths of a mask [H, W], column by column, the first of zeros."""
    counts, value = [0], False
    for pixel in mask.T.ravel():
        if pixel != value:
            counts.append(0)
            value = bool(pixel)
        counts[-1] += 1
    return counts


def compress(counts: list[int]) -> str:
    """COCO's rleToString, transcribed."""
    out = ""
    for i, count in enumerate(counts):
        x = count - counts[i - 2] if i > 2 else count
        more = True
        while more:
            group = x & 0x1F
            x >>= 5
            more = x != -1 if group & 0x10 else x != 0
            out += chr((group | 0x20 if more else group) + 48)
    return out


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_run_lengths_plain_and_compressed(height: int, width: int, seed: int, share: float) -> None:
    mask = np.random.default_rng(seed).random((height, width)) < share
    counts = runs(mask)
    assert decompress(compress(counts).encode()) == counts
    for written in (counts, compress(counts), compress(counts).encode()):
        np.testing.assert_array_equal(decode_mask({"counts": written, "size": [height, width]}, height, width), mask)


def holds(polygon: list[float], x: float, y: float) -> bool:
    """Whether a point lies in a polygon: an odd number of edges to its right."""
    corners, inside = list(zip(polygon[::2], polygon[1::2], strict=True)), False
    for (ax, ay), (bx, by) in zip(corners, [*corners[1:], corners[0]], strict=True):
        if (ay > y) != (by > y) and x < ax + (y - ay) / (by - ay) * (bx - ax):
            inside = not inside
    return inside


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(-3, 14), st.floats(-3, 12)), min_size=3, max_size=7))
def test_a_polygon_is_the_pixels_whose_centres_it_holds(corners: list[tuple[float, float]]) -> None:
    tilted = [(x + 0.0137 * y, y + 0.0071) for x, y in corners]  # no edge through a centre, but by an ill chance
    polygon = [float(v) for corner in tilted for v in corner]
    expected = [[holds(polygon, x + 0.5, y + 0.5) for x in range(11)] for y in range(9)]
    np.testing.assert_array_equal(decode_mask([polygon], 9, 11), expected)


def box(x: float, y: float, w: float, h: float) -> list[float]:
    return [x, y, x + w, y, x + w, y + h, x, y + h]


def test_polygons_are_put_together_and_cut_at_the_border() -> None:
    mask = decode_mask([box(2, 3, 5, 4), box(4, 3, 5, 4)], 20, 30)
    assert mask.sum() == mask[3:7, 2:9].sum() == 7 * 4
    assert not decode_mask([box(40, 3, 5, 4)], 20, 30).any()


def test_masks_are_nearly_pycocotools() -> None:
    coco = pytest.importorskip("pycocotools.mask")
    polygons = [[3.2, 4.1, 60.7, 8.9, 50.3, 44.4, 30.1, 20.2, 8.8, 47.5], box(10, 30, 20, 15)]
    theirs = coco.decode(coco.merge(coco.frPyObjects(polygons, 60, 80))).astype(bool)
    ours = decode_mask(polygons, 60, 80)
    assert (ours & theirs).sum() / (ours | theirs).sum() > 0.95
    packed = coco.encode(np.asfortranarray(ours.astype(np.uint8)))
    np.testing.assert_array_equal(decode_mask(packed, 60, 80), ours)


@pytest.mark.parametrize(
    ("segmentation", "word"),
    [
        ({"counts": [3, 4], "size": [2, 3]}, "7"),
        ({"counts": [3, -3, 6], "size": [2, 3]}, "whole"),
        ({"counts": [6], "size": [3, 2]}, r"\[3, 2\]"),
        ({"counts": "P", "size": [2, 3]}, "number"),
        ({"counts": "6\n", "size": [2, 3]}, "character"),
        ([], "polygons"),
        ([[1, 2, 3, 4]], "corners"),
        ([[1, 2, 3, 4, 5, "x"]], "number"),
        ([[1, 2, 3, 4, 5, float("inf")]], "finite"),
    ],
)
def test_bad_masks_are_refused(segmentation: Any, word: str) -> None:
    with pytest.raises(BadSample, match=word):
        decode_mask(segmentation, 2, 3)


HEIGHT, WIDTH = 40, 60
WHITE = 255


def annotation(number: int, image: int, x: int, y: int, w: int, h: int, kind: str = "polygon", crowd: int = 0) -> dict:
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[y : y + h, x : x + w] = True
    segmentation: Any = [box(x, y, w, h)]
    if kind != "polygon":
        segmentation = {"counts": runs(mask) if kind == "plain" else compress(runs(mask)), "size": [HEIGHT, WIDTH]}
    known = {"id": number, "image_id": image, "category_id": number % 3, "iscrowd": crowd}
    return known | {"area": float(w * h), "segmentation": segmentation}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Images 1 and 2 qualify; 3 has two segments and a crowd, 4 a small one, 5 is missing, 6 of another size."""
    names = {i: f"{i}.{'jpg' if i == 2 else 'png'}" for i in (2, 1, 3, 4, 5, 6)}
    (tmp_path / "images").mkdir()
    for i, name in names.items():
        if i != 5:
            photo = noise(HEIGHT, WIDTH + (i == 6), seed=i)
            (tmp_path / "images" / name).write_bytes(encode(photo, "JPEG" if i == 2 else "PNG"))
    annotations = [
        *(annotation(10 + k, 1, 18 * k, 2, 8 + k, 10, kind) for k, kind in enumerate(("polygon", "plain", "packed"))),
        annotation(14, 1, 0, 30, 8, 8),  # fourth, 64 pixels
        *(annotation(20 + k, 2, 18 * k, 5, 12 - k, 12) for k in range(3)),
        *(annotation(30 + k, 3, 18 * k, 5, 12, 12, "plain", crowd=int(k == 2)) for k in range(3)),
        *(annotation(40 + k, 4, 18 * k, 5, 12 if k else 4, 12) for k in range(3)),
        *(annotation(10 * i + k, i, 18 * k, 5, 12, 12) for i in (5, 6) for k in range(3)),
    ]
    images = [{"id": i, "file_name": name, "height": HEIGHT, "width": WIDTH} for i, name in names.items()]
    categories = [{"id": 0, "name": "cup"}, {"id": 1, "name": "dög"}]  # a third one has no name
    whole = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "instances.json").write_text(json.dumps(whole))
    return tmp_path


def built(made: Path, name: str = "out", **options: Any) -> BuildReport:
    return build(made / "instances.json", made / "images", made / name, BuildOptions(**{"least": 50, **options}))


def test_what_is_chosen(made: Path) -> None:
    report = built(made)
    assert (report.images, report.few, report.small, report.written) == (6, 1, 1, 2)
    assert sorted(report.bad.values()) == [1, 1]
    assert built(made, "crowd", crowd=True).written == 3
    segments = [Segment(n, area, "x", None) for n, area in enumerate((5.0, 9.0, 7.0, 7.0))]
    for options, chosen, few, small in (
        (BuildOptions(segments=3, least=4), [1, 2, 3], 0, 0),
        (BuildOptions(segments=3, least=5), [], 0, 1),  # all must be larger
        (BuildOptions(segments=3, least=5, considered="pasted"), [1, 2, 3], 0, 0),
        (BuildOptions(segments=5, least=0), [], 1, 0),
        (BuildOptions(segments=4, least=4), [1, 2, 3, 0], 0, 0),
    ):
        report = BuildReport()
        assert [segment.id for segment in select(segments, options, report)] == chosen
        assert (report.few, report.small) == (few, small)


def test_what_is_written_is_what_our_readers_read(made: Path) -> None:
    """Over what a killed one left, in an empty folder."""
    (made / "out").mkdir()
    (made / ".out.tmp").mkdir()
    (made / ".out.tmp" / "7.tar").write_bytes(b"half")
    built(made)
    source = open_source(str(made / "out"))
    records = [source.record(row) for row in range(len(source))]
    assert [r.key for r in records] == [f"{i:012d}-{k}" for i in (1, 2) for k in range(4)]
    assert [r.info["level"] for r in records] == [0, 1, 2, 3] * 2
    assert [r.info["parent"] for r in records[:4]] == [None, *(f"{1:012d}-{k}" for k in range(3))]
    assert all(r.info["levels"] == 4 and r.info["group"] == f"{1:012d}" for r in records[:4])
    assert [r.captions for r in records[:4]] == [["cup"], ["cup and object"], *[["cup and object and dög"]] * 2]
    assert records[1].info["segments"] == [
        {"id": 12, "category": "cup", "area": 100.0},
        {"id": 11, "category": "object", "area": 90.0},
    ]  # largest first
    photo = noise(HEIGHT, WIDTH, seed=1)
    for k, record in enumerate(records[:3]):
        expected = np.full_like(photo, WHITE)
        for x, w in ((36, 10), (18, 9), (0, 8))[: k + 1]:
            expected[2:12, x : x + w] = photo[2:12, x : x + w]
        np.testing.assert_array_equal(decode(record.image), expected)
    np.testing.assert_array_equal(decode(records[3].image), photo)
    assert records[7].image == (made / "images" / "2.jpg").read_bytes()
    assert (made / "out" / "nshards.txt").read_text() == "1\n"
    built(made, "grey", canvas="grey")
    assert (decode(open_source(str(made / "grey")).record(0).image)[0, 0] == 128).all()


def test_the_same_input_gives_the_same_bytes_in_shards(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.hierarimgs.SHARD", 3)
    for name in ("a", "b"):
        built(made, name)
    assert files_of(made / "a") == files_of(made / "b")
    assert sorted(files_of(made / "a")) == ["0.tar", "1.tar", "nshards.txt"]
    assert len(open_source(str(made / "a"))) == 8


def test_what_a_user_can_mend_is_refused(made: Path) -> None:
    for name, options, word in (
        ("images", {}, "images exists"),
        ("out", {"segments": 0}, "segments"),
        ("out", {"least": math.nan}, "least"),
    ):
        with pytest.raises(ValueError, match=word):
            built(made, name, **options)
    good = json.loads((made / "instances.json").read_text())
    twice = json.dumps({**good, "images": [good["images"][0]] * 2})
    unnamed = json.dumps({**good, "categories": [{"id": 1, "name": 7}]})
    few = '{"images": []}', '{"images": [{"id": 1}], "annotations": []}'
    for text in ("{", "[]", "[" * 100_000, *few, twice, unnamed):
        (made / "instances.json").write_text(text)
        with pytest.raises(ValueError, match=r"instances.json"):
            built(made)


def test_verb(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(made / name) for name in ("instances.json", "images", "out")]
    assert main([*words, "--least", "50"]) == 0
    assert re.findall(r"\d+", capsys.readouterr().out) == ["2", "6", "1", "1", "1", "1"]
    assert main(words) == 2
    assert "--out" in capsys.readouterr().err
    assert main([str(made / "none.json"), *words[1:2], str(made / "new")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_eval_hierarchy_judges_the_levels(made: Path) -> None:
    built(made)
    model = matcher("prolip")
    found = evaluate(model, "hierarchy", str(made / "out"))
    source = open_source(str(made / "out"))
    of_level_1 = model.encode_image([Image.fromarray(decode(source.record(row).image)) for row in (1, 5)])
    expected = float(of_level_1["log_var"].exp().sum(1).mean())
    assert found["image_chain_uncertainty@1"] == pytest.approx(expected, rel=1e-5)
    assert {"image_inclusion_h@3", "image_inclusion_whole_h@0", "image_chain_uncertainty_order"} < set(found)
    assert not [name for name in found if name.startswith(("text", "hierarcaps", "traversal"))]
    with pytest.raises(ValueError, match="Gaussians"):
        evaluate(matcher("clip"), "hierarchy", str(made / "out"))
