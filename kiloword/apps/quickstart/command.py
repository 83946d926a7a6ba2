"""The verb quickstart. No torch at import, so that help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from kiloword.config.settings import check, setting, unread
from kiloword.terminal import say

OF_PHOTOS = ("data", "val", "image-tower", "text-tower", "views", "keep")


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Train on drawn scenes or on your photos, evaluate, and write OUT/report.html.

    Scenes take three minutes on two CPU cores. A slow machine makes fewer steps, to train for five minutes at most.

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
        from kiloword.apps.quickstart.results import finished, tell

        out = self.out or Path("quickstart")
        if results := finished(out, self.seed, self.steps):
            say(f"{out} was finished at step {results['run']['steps']}: nothing to do.")
            tell(out, results)
            return
        from kiloword.apps.quickstart.scenes import quickstart, recipe, sized
        from kiloword.training.resolve import with_length

        chosen = recipe(self.seed)
        quickstart(with_length(chosen, 0, steps=self.steps) if self.steps else sized(chosen, out), out)
