"""Verbs that are functions: each becomes a dataclass in the room that does it, and then this file goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

Kind = Literal["scenes", "photos"]


def quickstart(
    on: Positional[Kind] = "scenes",
    data: tuple[str, ...] = (),
    val: tuple[str, ...] = (),
    out: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    image_tower: str | None = None,
    text_tower: str | None = None,
    views: int | None = None,
    keep: tuple[str, ...] = (),
    bad_share: float | None = None,
) -> None:
    """Train on scenes, evaluate, write DIR/report.html. Takes 4 minutes on 2 CPU cores, 30 without bf16.

    Five methods on your captioned photos, on frozen pretrained towers: kiloword quickstart photos --data photos/train

    Args:
        on: scenes, or photos: your own, with captions.
        data: photos: tars, a table or a folder of images with captions, as for `kiloword train`.
        val: photos to test on; default: a tenth of --data, held out by key.
        out: folder of the run and its report, by default quickstart or photos; the same command again resumes.
        steps: number of steps (photos: of each method) in place of the recipe's.
        seed: seed of the run.
        image_tower: photos: frozen image tower, as for `kiloword train`; default: efficientnet-lite0.
        text_tower: photos: frozen text tower, as for `kiloword train`; default: minilm.
        views: photos: augmented views of each photo whose tokens are stored; 1: not augmented; default: 2.
        keep: photos: keep-lists of `kiloword audit`: train on the pairs that they keep.
        bad_share: photos: stop when a larger share of the rows is bad, beside those that could not be embedded.
    """
    chosen: dict[str, Any] = {"image_tower": image_tower, "text_tower": text_tower, "views": views}
    chosen |= {"keep": keep or None, "bad_share": bad_share}
    if on == "scenes":
        from kiloword.apps.quickstart.run import run

        of_photos = {"data": data or None, "val": val or None, **chosen}
        if flag := next((name for name, value in of_photos.items() if value is not None), None):
            flag = flag.replace("_", "-")
            raise ValueError(f"--{flag} is of kiloword quickstart photos; the quickstart itself draws scenes.")
        run(out or Path("quickstart"), steps=steps, seed=seed)
        return
    if not data:
        raise ValueError("quickstart photos needs photos with captions: kiloword quickstart photos --data FOLDER.")
    from kiloword.apps.quickstart.photos.run import PhotoPlan
    from kiloword.apps.quickstart.photos.run import run as run_photos

    chosen = {name: value for name, value in chosen.items() if value is not None}
    run_photos(out or Path("photos"), PhotoPlan(data, val, steps=steps, seed=seed, **chosen))
