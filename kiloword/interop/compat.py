"""Makes torchvision importable beside a build of torch that its native library was not made for.

Such a torchvision fails at import ("operator torchvision::nms does not exist") and takes timm, open_clip and
transformers' CLIP down with it, though none of them calls those operators here.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@cache
def torchvision_ready() -> torch.library.Library | None:
    """Define the operator schemas that torchvision's import asks for, if and only if its own library cannot be loaded.

    Call it before the first import of torchvision, timm or open_clip.
    Returns: the definitions (kept alive by the cache), or None where nothing was needed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    native = sorted(Path(spec.origin).parent.glob("_C*.so"))
    try:
        for library in native:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        if native:
            return None
    except OSError:
        pass  # made for another torch: its symbols are missing
    definitions = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        definitions.define(name + _NMS)  # type: ignore[no-untyped-call]
    return definitions
