"""The task `hierarchy`: retrieval along chains of ever more specific captions, and levels of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kiloword.config.recipes import Nearest
from kiloword.evaluation.task import Deferred, Task

Includes = Literal["inc", "h"]


@dataclass(frozen=True, kw_only=True)
class HierarchyTaskOptions:
    """How the caption that includes an image most is chosen, and how a traversal steps."""

    # inclusion score by which the root caption of an image is chosen; None: inc. h at eps 0 chooses the narrowest
    # captions, not the most general
    includes: Includes | None = None
    # log of a variance added in inc and h; None: 0. At -10 or less distances hardly count: h then chooses the widest
    # caption, inc the narrowest
    eps: float | None = None
    nearest: Nearest = "cosine"  # similarity by which a traversal steps; csd needs a model with Gaussians


TASK = Task(
    name="hierarchy",
    help="Retrieve from general to specific captions along chains, and measure uncertainty by level.",
    data="images with chains of captions (`hierarchies`) or of several levels (HierarImgs), or scenes",
    options=HierarchyTaskOptions,
    run=Deferred("kiloword.evaluation.hierarchy.task:run"),
    page=Deferred("kiloword.evaluation.hierarchy.page:report"),
)
