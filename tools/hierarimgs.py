"""HierarImgs: from an image set with instance masks to images of several levels (arXiv:2410.18857, appendix B.3).

    python tools/hierarimgs.py ANNOTATIONS.json IMAGES OUT [--help]

Annotations are COCO's json of instances; `kiloword eval hierarchy MODEL --data OUT` reads what it writes.
"""

from __future__ import annotations

import io
import json
import math
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import tyro
from PIL import Image
from tyro.conf import Positional, arg

from kiloword.config.settings import BaseSettings
from kiloword.data.images.decode import Pixels, decode
from kiloword.data.sample import IMAGE_SUFFIXES, MAX_IMAGE, check_regular, read_whole
from kiloword.errors import sentence_of
from kiloword.files import new_folder
from kiloword.terminal import say, warn
from kiloword.types import BadSample

RegionMask = npt.NDArray[np.bool_]


def decode_mask(segmentation: Any, height: int, width: int) -> RegionMask:
    """The mask [H, W] of one annotation's `segmentation`.

    It is a list of polygons [x0, y0, x1, y1, ...], or `size` [H, W] and `counts`: run lengths, column by column, the
    first of zeros, as a list or as COCO's compressed string. The mask is the union of the polygons, whose pixels are
    those with their centre inside, by the even-odd rule (pycocotools can differ in pixels on an edge).

    Raises: BadSample with the reason.
    """
    if isinstance(segmentation, dict):
        return _runs(segmentation, height, width)
    if not isinstance(segmentation, list) or not segmentation:
        raise BadSample("a segmentation is neither polygons nor run lengths")
    mask = np.zeros((height, width), np.bool_)
    for polygon in segmentation:
        mask |= _polygon(_corners(polygon), height, width)
    return mask


def _runs(segmentation: dict[str, Any], height: int, width: int) -> RegionMask:
    size, counts = segmentation.get("size"), segmentation.get("counts")
    if size != [height, width]:
        raise BadSample(f"a mask of size {size} in an image of [{height}, {width}]")
    if isinstance(counts, str | bytes):
        counts = decompress(counts.encode() if isinstance(counts, str) else counts)
    if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
        raise BadSample("the run lengths of a mask are not whole numbers from 0 up")
    if sum(counts) != height * width:
        raise BadSample(f"the run lengths of a mask cover {sum(counts)} pixels of {height * width}")
    values = np.arange(len(counts)) % 2 == 1
    return np.repeat(values, counts).reshape(width, height).T


def decompress(counts: bytes) -> list[int]:
    """COCO's compressed run lengths.

    A number is written in groups of 5 bits, lowest first, each as a character from "0" (48). Bit 32 marks that more
    follow; the highest bit of the last group is the sign. From the fourth on, each number is the difference to the one
    two before. Raises BadSample for a string that ends within a number, or another character.
    """
    numbers: list[int] = []
    value = shift = 0
    for character in counts:
        group = character - 48
        if not 0 <= group < 64:
            raise BadSample("the compressed run lengths of a mask contain an invalid character")
        value |= (group & 31) << shift
        shift += 5
        if not group & 32:
            value -= (group >> 4 & 1) << shift  # the sign
            numbers.append(value + (numbers[-2] if len(numbers) > 2 else 0))
            value = shift = 0
    if shift:
        raise BadSample("the compressed run lengths of a mask end within a number")
    return numbers


def _corners(polygon: Any) -> npt.NDArray[np.float64]:
    """[N, 2] x and y of a flat list."""
    if not isinstance(polygon, Sequence) or len(polygon) < 6 or len(polygon) % 2:
        raise BadSample("a polygon is not a list of three corners or more, x and y each")
    try:
        corners = np.array(polygon, np.float64).reshape(-1, 2)
    except (TypeError, ValueError):
        raise BadSample("a corner of a polygon is not a number") from None
    if not np.isfinite(corners).all():
        raise BadSample("a corner of a polygon is not finite")
    return corners


def _polygon(corners: npt.NDArray[np.float64], height: int, width: int) -> RegionMask:
    """Pixels with their centre inside a polygon: those of each row with an odd number of edges to their left."""
    mask = np.zeros((height, width), np.bool_)
    x, y = corners.T
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    first, last = max(0, int(np.floor(y.min()))), min(height, int(np.ceil(y.max())))
    for row in range(first, last):
        at = row + 0.5
        edges = (y <= at) != (next_y <= at)
        crossing = x[edges] + (at - y[edges]) / (next_y[edges] - y[edges]) * (next_x[edges] - x[edges])
        starts = np.ceil(np.sort(crossing) - 0.5).clip(0, width).astype(np.int64)  # first centre at or right of each
        for start, end in zip(starts[::2], starts[1::2], strict=True):
            mask[row, start:end] ^= True
    return mask


CANVAS = {"white": 255, "grey": 128, "black": 0}
SHARD = 1000  # samples of a tar
Member = tuple[str, bytes]


@dataclass(frozen=True, kw_only=True)
class BuildOptions(BaseSettings):
    """Selection of images, and drawing of their segments."""

    segments: int = 3  # number of segments to paste, largest first; an image with fewer is skipped
    least: float = 5000.0  # pixels: an image is skipped if its smallest segment considered has no more
    considered: Literal["all", "pasted"] = "all"  # segments to which least applies: all of an image, or those pasted
    crowd: bool = False  # regions marked iscrowd are segments too
    canvas: Literal["white", "grey", "black"] = "white"  # what segments are pasted on


@dataclass
class BuildReport:
    """Numbers of images of an annotation file by outcome."""

    images: int = 0  # in the file
    few: int = 0  # with fewer segments than are pasted
    small: int = 0  # whose smallest segment considered is too small
    written: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # reasons -> images

    def lines(self) -> Iterator[str]:
        """Lines for a terminal."""
        yield f"{self.written} of {self.images} images written"
        yield f"{self.few} have too few segments, {self.small} a segment that is too small"
        yield from (f"{n} skipped: {reason}" for reason, n in self.bad.most_common())


@dataclass(frozen=True)
class Segment:
    """One instance of an image."""

    id: Any
    area: float  # pixels, as annotated
    name: str  # of its category
    segmentation: Any


def build(annotations: Path, photos: Path, out: Path, options: BuildOptions | None = None) -> BuildReport:
    """Write a folder of webdataset tars with the levels of every image that qualifies.

    With n segments pasted there are levels 0 to n (the paper counts from 1): level k below n shows the k + 1 largest
    segments at their places on a blank canvas, level n is the photo. Each sample's json has `level`, `levels`, `group`
    (the image's id), `parent` (the key of the next more general level), `segments`, and `captions` made of the names of
    their categories. The folder appears when it is complete.

    Raises: ValueError when it exists, when the annotations are not COCO's json of instances, or no image qualifies.
    """
    options = options or BuildOptions()
    if options.segments < 1:
        raise ValueError(f"{options.segments} segments; expected at least 1")
    if not 0 <= options.least < math.inf:
        raise ValueError(f"least is {options.least}: expected a number of pixels, 0 or more.")
    images, segments = read_annotations(annotations, options.crowd)
    report = BuildReport(images=len(images))

    def samples() -> Iterator[list[list[Member]]]:
        """The levels of each image that qualifies, each as the members of a tar."""
        for image in images:
            if selected := select(segments[image["id"]], options, report):
                try:
                    levels = _levels(image, selected, photos, options)
                except BadSample as error:
                    report.bad[str(error)] += 1
                    continue
                report.written += 1
                yield levels

    with new_folder(out) as work:
        _write(work, samples())
        if not report.written:
            raise ValueError(f"{annotations}: no image qualifies: {'; '.join(report.lines())}.")
    return report


def read_annotations(path: Path, crowd: bool) -> tuple[list[dict[str, Any]], dict[Any, list[Segment]]]:
    """The images of a COCO json in order of id, and the segments of each, by id."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            content = json.load(file)
        names = {one["id"]: one["name"] for one in content.get("categories", ())}
        images = sorted(content["images"], key=lambda image: image["id"])
        segments: dict[Any, list[Segment]] = {image["id"]: [] for image in images}
        for one in content["annotations"]:
            if one["image_id"] in segments and (crowd or not one.get("iscrowd", 0)):
                name = names.get(one.get("category_id"), "object")
                segments[one["image_id"]].append(Segment(one["id"], float(one["area"]), name, one["segmentation"]))
        assert len(segments) == len(images), "two images have one id"
        assert all(isinstance(name, str) for name in names.values()), "a category's name is no string"
        assert all(isinstance(image["file_name"], str) for image in images)
        assert all(isinstance(image[side], int) for image in images for side in ("height", "width"))
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise ValueError(
            f"{path} is not COCO's json of instances ({type(error).__name__}: {error}): expected `images` with id, "
            "file_name, height, width and `annotations` with id, image_id, area, segmentation."
        ) from None
    return images, segments


def select(segments: Sequence[Segment], options: BuildOptions, report: BuildReport) -> list[Segment]:
    """The segments to paste, the largest first; none if the image is skipped, which is counted."""
    ordered = sorted(segments, key=lambda segment: -segment.area)
    pasted = ordered[: options.segments]
    if len(pasted) < options.segments:
        report.few += 1
        return []
    if (ordered if options.considered == "all" else pasted)[-1].area <= options.least:
        report.small += 1
        return []
    return pasted


def _levels(
    image: dict[str, Any], selected: Sequence[Segment], folder: Path, options: BuildOptions
) -> list[list[Member]]:
    """Members of the samples of one image, general to specific."""
    path = folder / image["file_name"]
    try:
        photo = read_whole(path, "the image", MAX_IMAGE)
    except OSError as error:
        raise BadSample(f"cannot read the image: {error.strerror}") from None
    pixels = decode(photo)
    height, width = image["height"], image["width"]
    if pixels.shape[:2] != (height, width):
        raise BadSample("the image is not of the size that was annotated")
    masks = [decode_mask(segment.segmentation, height, width) for segment in selected]
    group = f"{image['id']:012d}" if isinstance(image["id"], int) else str(image["id"]).replace(".", "-")
    suffix = path.suffix.lower().lstrip(".")
    whole = (suffix, photo) if suffix in IMAGE_SUFFIXES else ("png", _png(pixels))
    parts = (paste(pixels, masks[: k + 1], CANVAS[options.canvas]) for k in range(len(selected)))
    drawn = [*(("png", _png(part)) for part in parts), whole]
    return [_members(group, k, selected[: k + 1], len(selected), *encoded) for k, encoded in enumerate(drawn)]


def paste(pixels: Pixels, masks: Sequence[RegionMask], canvas: int) -> Pixels:
    """The parts of a photo [H, W, 3] inside any of the masks [H, W], on a canvas of one grey."""
    shown = np.any(masks, axis=0)
    return np.where(shown[..., None], pixels, np.uint8(canvas))


def _members(group: str, level: int, shown: Sequence[Segment], last: int, suffix: str, image: bytes) -> list[Member]:
    key = f"{group}-{level}"
    info = {
        "captions": [" and ".join(segment.name for segment in shown)],
        "level": level,
        "levels": last + 1,
        "group": group,
        "parent": f"{group}-{level - 1}" if level else None,
        "segments": [{"id": s.id, "category": s.name, "area": s.area} for s in shown],
    }
    return [
        (f"{key}.{suffix}", image),
        (f"{key}.json", json.dumps(info, ensure_ascii=False).encode(errors="backslashreplace")),
    ]


def _png(pixels: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _write(folder: Path, samples: Iterator[list[list[Member]]]) -> None:
    """Tars of about SHARD samples; the levels of one image stay together, and the same input gives the same bytes."""
    shards, levels = 0, next(samples, None)
    while levels is not None:
        with tarfile.open(folder / f"{shards}.tar", "w") as tar:
            written = 0
            while levels is not None and written < SHARD:
                for name, data in (member for sample in levels for member in sample):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
                written += len(levels)
                levels = next(samples, None)
        shards += 1
    (folder / "nshards.txt").write_text(f"{shards}\n", encoding="utf-8")


DEFAULTS = BuildOptions()


def run(
    annotations: Annotated[Positional[Path], arg(metavar="ANNOTATIONS.json")],
    images: Annotated[Positional[Path], arg(metavar="IMAGES")],
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    options: Annotated[BuildOptions, arg(name="")] = DEFAULTS,
) -> None:
    """HierarImgs: photos by levels, from their largest segment alone to the whole, for `kiloword eval hierarchy MODEL`.

    python tools/hierarimgs.py instances_val2014.json val2014 hierarimgs

    Args:
        annotations: instances in COCO's json layout (images, annotations with segmentation and area, categories).
        images: folder of the photos that the json names.
        out: new folder of webdataset tars.
        options: which images are taken, and how their parts are drawn.
    """
    say(*build(annotations, images, out, options).lines())


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, and build. Returns: 2 for wrong input, after a message."""
    try:
        tyro.cli(run, prog="python tools/hierarimgs.py", args=argv)
    except (ValueError, OSError) as error:
        warn(str(sentence_of(error)))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
