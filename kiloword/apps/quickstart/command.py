"""The verb quickstart. No torch at import, so that help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from kiloword.config.settings import check, setting, unread

OF_PHOTOS = ("data", "val", "image-tower", "text-tower", "views", "keep", "bad-share")


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Train on drawn scenes or on your photos, evaluate, and write OUT/report.html.

    Scenes take 4 minutes on 2 CPU cores, and 30 minutes where the CPU lacks bf16.

    Examples:
      kiloword quickstart --out quickstart
      kiloword quickstart photos --data photos/train
    """

    on: Positional[Literal["scenes", "photos"]] = "scenes"  # scenes: drawn ones; photos: your own, with captions
    data: tuple[str, ...] = ()  # photos: tars, a table or a folder of images with captions, as for `kiloword train`
    val: tuple[str, ...] = ()  # photos to test on; default: a tenth of --data, held out by key
    # folder of the run and its report, by default quickstart or photos; the same command again resumes
    out: Path | None = None
    steps: int | None = setting(None, "number of steps (photos: of each method) in place of the recipe's", 1)
    seed: int = 0  # seed of the run
    image_tower: str = "efficientnet-lite0"  # photos: frozen image tower, as for `kiloword train`
    text_tower: str = "minilm"  # photos: frozen text tower, as for `kiloword train`
    views: int = setting(2, "photos: augmented views of each photo whose tokens are stored; 1: no augmentation", 1)
    keep: tuple[str, ...] = ()  # photos: keep-lists of `kiloword audit`: train on the pairs that they keep
    bad_share: float = setting(0.01, "photos: stop when a larger share of the rows is bad", 0, 1)

    def run(self) -> None:
        """Train, evaluate, write the report. Raises: ValueError for flags that do not fit, and as `train`."""
        check(self)
        if self.on == "photos":
            if not self.data:
                raise ValueError("quickstart photos needs --data, photos with captions.")
            from kiloword.apps.quickstart.photos import photos

            photos(self, self.out or Path("photos"))
            return
        if ignored := list(unread(self, Quickstart(), missing=dict.fromkeys(OF_PHOTOS, "quickstart photos"))):
            raise ValueError("; ".join(ignored) + ".")
        from kiloword.apps.quickstart.scenes import quickstart, recipe
        from kiloword.training.resolve import with_length

        quickstart(with_length(recipe(self.seed), 0, self.steps), self.out or Path("quickstart"))
