"""Building HierarImgs where something is there already; decoding by parts; transforms bound to files."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kiloword.types import BadSample
from tars import encode, noise
from tools.hierarimgs import BuildOptions, BuildReport, Segment, build, decode_mask, main, select


def annotated(folder: Path, count: int = 1, **more: Any) -> tuple[Path, Path]:
    """Images of 10 x 12 pixels with two segments each."""
    (folder / "images").mkdir()
    images, parts = [], []
    for n in range(count):
        (folder / "images" / f"{n}.bmp").write_bytes(encode(noise(10, 12, n), "BMP"))
        images.append({"id": f"im.{n}", "file_name": f"{n}.bmp", "height": 10, "width": 12})
        for k, wide in enumerate((3, 5)):
            box = [0, 0, wide, 0, wide, 4, 0, 4]
            parts.append(
                {"id": 2 * n + k, "image_id": f"im.{n}", "area": 4 * wide, "category_id": k, "segmentation": [box]}
            )
    document = {"images": images, "annotations": parts, "categories": [{"id": 0, "name": "dög"}]} | more
    (folder / "x.json").write_text(json.dumps(document))
    return folder / "x.json", folder / "images"


def test_levels_are_built_into_an_empty_folder_over_what_a_killed_one_left(tmp_path: Path) -> None:
    files, out = annotated(tmp_path, 2), tmp_path / "out"
    out.mkdir()
    left = tmp_path / ".out.tmp"
    left.mkdir()
    (left / "7.tar").write_bytes(b"half")
    report = build(*files, out, BuildOptions(segments=2, least=0, canvas="grey"))
    assert list(report.lines()) == ["2 of 2 images written", "0 have too few segments, 0 a segment that is too small"]
    assert sorted(path.name for path in out.iterdir()) == ["0.tar", "nshards.txt"]
    with tarfile.open(out / "0.tar") as tar:
        names = tar.getnames()
        first = json.loads(tar.extractfile("im-0-1.json").read())  # type: ignore[union-attr]
        pixels = np.asarray(Image.open(io.BytesIO(tar.extractfile("im-0-0.png").read())))  # type: ignore[union-attr]
    kinds = [("png", "json"), ("png", "json"), ("bmp", "json")]
    assert names == [f"im-{n}-{level}.{kind}" for n in range(2) for level in range(3) for kind in kinds[level]]
    assert first == {
        "captions": ["object and dög"], "level": 1, "levels": 3, "group": "im-0", "parent": "im-0-0",
        "segments": [{"id": 1, "category": "object", "area": 20.0}, {"id": 0, "category": "dög", "area": 12.0}],
    }  # fmt: skip
    assert np.array_equal(pixels[:4, :5], noise(10, 12, 0)[:4, :5])
    assert (pixels[4:] == 128).all()
    assert (pixels[:, 5:] == 128).all()


def test_reasons_of_skipped_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = annotated(tmp_path, 3)
    (files[1] / "1.bmp").unlink()
    words = [str(files[0]), str(files[1]), str(tmp_path / "out"), "--segments", "2", "--least", "1"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 of 3 images written",
        "0 have too few segments, 0 a segment that is too small",
        "1 skipped: cannot read the image: No such file or directory",
    ]
    for wrong, output in (
        (words, "choose another --out"),
        ([str(tmp_path / "none"), *words[1:]], "No such file or directory: "),
    ):
        assert main([*wrong[:2], str(tmp_path / ("out" if wrong is words else "new")), *wrong[3:]]) == 2
        assert output in capsys.readouterr().err
    segments = [Segment(n, area, "x", None) for n, area in enumerate((5.0, 9.0, 7.0, 7.0))]
    for options, chosen, few, small in (
        (BuildOptions(segments=3, least=4), [1, 2, 3], 0, 0),
        (BuildOptions(segments=3, least=5), [], 0, 1),
        (BuildOptions(segments=3, least=5, considered="pasted"), [1, 2, 3], 0, 0),
        (BuildOptions(segments=5, least=0), [], 1, 0),
        (BuildOptions(segments=4, least=4), [1, 2, 3, 0], 0, 0),
    ):
        report = BuildReport()
        assert [one.id for one in select(segments, options, report)] == chosen
        assert (report.few, report.small) == (few, small)


def test_runs_go_down_the_columns() -> None:
    mask = decode_mask({"size": [2, 3], "counts": [1, 2, 3]}, 2, 3)
    assert mask.tolist() == [[False, True, False], [True, False, False]]
    for wrong in (
        {"size": [3, 2], "counts": [6]},
        {"size": [2, 3], "counts": [5]},
        {"size": [2, 3], "counts": [-1, 7]},
    ):
        with pytest.raises(BadSample):
            decode_mask(wrong, 2, 3)
