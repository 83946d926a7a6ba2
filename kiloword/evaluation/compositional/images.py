"""The images that items name, found in a source by key or file name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from PIL import Image

from kiloword.data.images.decode import MAX_PIXELS, Pixels, decode
from kiloword.data.reading import read_image
from kiloword.data.source import key_of, names_of, rows_by_name
from kiloword.evaluation.compositional.items import Cut, Item
from kiloword.report.images import Pixels as Small
from kiloword.types import BadSample, Record, Skipped, Source

SIDE = 192  # largest side of an image on the page, in pixels


class Cuts:
    """Rows of a source, some of them cut to a box: a source without captions, which `evaluation.features.seen` reads.

    Args: places: the row of each, and the image with its box.
    """

    def __init__(self, source: Source, places: Sequence[tuple[int, Cut]]) -> None:
        self.source, self.places = source, places
        self.name, self.fingerprint = source.name, source.fingerprint

    def __len__(self) -> int:
        return len(self.places)

    def key(self, row: int) -> str:
        """The key in the source. Raises BadSample."""
        return key_of(self.source, self.places[row][0])

    def locate(self, row: int) -> tuple[Source, int]:
        """The row of the source, whose file may be fetched ahead."""
        return self.source, self.places[row][0]

    def record(self, row: int) -> Record:
        """The record of the source, its image cut. Raises BadSample with the reason."""
        place, cut = self.places[row]
        record = read_image(self.source, place)
        return record if cut.box is None else replace(record, image=_cut(decode(record.image), cut.box))

    def small(self, row: int) -> Small:
        """The image for a page: uint8 [H, W, 3]."""
        image = Image.fromarray(decode(self.record(row).image))
        image.thumbnail((SIDE, SIDE))
        return decode(_array(image))


def _cut(image: Pixels, box: tuple[float, float, float, float]) -> Pixels:
    """The part of an image in a box, black where the box reaches beyond it, as Pillow cuts. Raises BadSample."""
    x, y, w, h = map(round, box)
    if w < 1 or h < 1 or w * h > MAX_PIXELS:
        raise BadSample(f"its box is {w} x {h} pixels")
    return _array(Image.fromarray(image).crop((x, y, x + w, y + h)))


def _array(image: Image.Image) -> Pixels:
    import numpy as np

    return np.asarray(image, dtype=np.uint8)


def images_of(source: Source, items: Iterable[Item], skipped: list[Skipped]) -> Cuts:
    """Every image that items name and the source has, each cut once; others are appended to `skipped`.

    A name is looked up as it is, without its suffix, without its folders, and without both.
    Raises: ValueError when the source has none of them, and for a name that fits several rows.
    """
    rows = rows_by_name(source)
    uses: dict[Cut, int] = {}
    for cut in (cut for item in items for cut in item.images):
        uses[cut] = uses.get(cut, 0) + 1
    places, missing = [], dict[str, int]()
    for cut, count in uses.items():
        row = next((rows[name] for name in names_of(cut.image) if name in rows), None)
        if row is None:
            missing[cut.image] = missing.get(cut.image, 0) + count
        elif row < 0:
            raise ValueError(f"{source.name} has several images that {cut.image!r} can mean: give each its own name.")
        else:
            places.append((row, cut))
    if not places:
        example = next((name for name in rows), "nothing")
        raise ValueError(
            f"{source.name} has none of the {len(missing)} images that --pairs names, such as "
            f"{next(iter(missing))!r}; it has {example!r}. Name the data set whose keys or files these are."
        )
    skipped += [Skipped(-1, name, f"not in {source.name}, {n} uses") for name, n in missing.items()]
    return Cuts(source, places)
