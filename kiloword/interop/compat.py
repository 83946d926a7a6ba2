"""Make torchvision importable with a build of torch that its native library does not support.

Such a torchvision fails at import ("operator torchvision::nms does not exist"), and with it timm, open_clip and
transformers' CLIP, though none of them needs these operators here.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@cache
def torchvision_ready() -> torch.library.Library | None:
    """Define the operator schemas that the import of torchvision needs, only if its own library cannot be loaded.

    Call it before the first import of torchvision, timm or open_clip.
    Returns: the definitions (kept alive by the cache), or None if nothing was needed.
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
        pass  # built for another torch: symbols are missing
    definitions = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        definitions.define(name + _NMS)  # type: ignore[no-untyped-call]
    return definitions
