"""Libraries that run trunks: how they are imported, and a config.json of transformers as data, with its limits."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kiloword.config.recipes import DEPTH
from kiloword.errors import needs

MOST = 1 << 22  # limit of any number in a config.json of transformers
UNREAD = ("auto_map", "quantization_config", "dtype", "torch_dtype", "architectures")
"""Keys of a config.json that are not kept: code, formats, and by `kept` whatever names an implementation or a file."""


@cache
def torchvision_ready() -> torch.library.Library | None:
    """Make torchvision importable with a build of torch that its native library does not support.

    Such a torchvision fails at import ("operator torchvision::nms does not exist"), and with it timm, open_clip and
    transformers' CLIP, which do not use these operators here; so their schemas are defined. Call it before the first
    import of any of these. Returns: the definitions (the cache keeps them alive), or None if they are not needed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    native = sorted(Path(spec.origin).parent.glob("_C*.so"))
    with suppress(OSError):  # built for another torch: symbols are missing
        for library in native:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        if native:
            return None
    definitions = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        definitions.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return definitions


def pip(*words: str) -> str:
    """A command of pip for this environment; the one that installs keeps its torch."""
    kept = [f"torch=={torch.__version__}"] * ("install" in words)
    return shlex.join([sys.executable, "-m", "pip", *words, *kept])


def torchvision_lines() -> list[str]:
    """How other libraries are imported here, if torchvision was built for another torch; else no lines."""
    if torchvision_ready() is None:
        return []
    return [
        f"torchvision was built for another torch than {torch.__version__}, so that `import open_clip` and "
        "`import sentence_transformers` stop. kiloword works.",
        f"  transformers and sentence-transformers need no torchvision: {pip('uninstall', '-y', 'torchvision')}",
        "  open_clip needs one. In Python, before `import open_clip`:",
        f"    from {__name__} import {torchvision_ready.__name__}; {torchvision_ready.__name__}()",
        "  Or give open_clip an environment with a torch of its own (6 GB):",
        "    python3 -m venv open_clip_env && open_clip_env/bin/pip install open_clip_torch transformers",
    ]


def folders_of(package: str) -> list[Path]:
    """The folders of an installed package, which is found and not imported; none where it is missing."""
    spec = importlib.util.find_spec(package)
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def transformers() -> Any:
    """The library transformers (extra "hf"). Raises: ValueError where it is not installed."""
    torchvision_ready()
    try:
        import transformers as library  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError(needs("this model", "transformers", "hf")) from None
    return library


@contextmanager
def quiet(library: Any) -> Iterator[None]:
    """Silence the notes and progress bars of transformers; what matters of them becomes an error."""
    before, bars = library.logging.get_verbosity(), library.logging.is_progress_bar_enabled()
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    try:
        yield
    finally:
        library.logging.set_verbosity(before)
        if bars:
            library.logging.enable_progress_bar()


def unfilled() -> AbstractContextManager[None]:
    """Models of transformers that are made inside get no initial values: kiloword draws its own, by name."""
    version_5 = importlib.util.find_spec("transformers.initialization") is not None
    module = importlib.import_module(f"transformers.{'initialization' if version_5 else 'modeling_utils'}")
    none: AbstractContextManager[None] = module.no_init_weights()
    return none


def without_pooling(encoder: Any) -> Any:
    """An encoder without a pooling behind its tokens."""
    if hasattr(encoder, "pooler"):
        encoder.pooler = None
    if hasattr(encoder, "head"):
        encoder.head = nn.Identity()
    return encoder


def check_like(folder: Path, info: Mapping[str, Any], expected: Iterable[str], base: str) -> None:
    """Raises: ValueError for other weights, by transformers' loading info, where `base` may stand before names."""
    other = dict.fromkeys(info["missing_keys"], "missing")
    other |= {name: f"{list(there)} instead of {list(here)}" for name, there, here in info["mismatched_keys"]}
    found = [f"{name[:200]} is {other[name]}" for name in expected if name in other]
    found += [f"{name[:200]} is not in the config" for name in surplus(info["unexpected_keys"], expected, base)]
    if found:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json: {found[0]} ({len(found)} of its tensors). "
            "Save both by one save_pretrained."
        )


def surplus(names: Iterable[str], expected: Iterable[str], base: str) -> list[str]:
    """Those names that a tower's parts do not compute, such as a layer's; not of heads, constants and masks."""
    parts = {name.partition(".")[0] for name in expected}
    inside = [name for name in names if name.removeprefix(f"{base}.").partition(".")[0] in parts]
    return sorted(name for name in inside if not name.endswith(("_ids", "_index", "inv_freq", "mask_token")))


def kept(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json without what could choose code, a format or a file."""
    out = {}
    for name, value in config.items():
        if name in UNREAD or name.startswith("_") or "implementation" in name or "kernel" in name:
            continue
        out[name] = kept(value) if isinstance(value, dict) else value
    return out


def check_numbers(config: Any, what: str, name: str = "") -> None:
    """Raises: ValueError for towers beyond all limits. Args: config: a JSON value; name: of its field."""
    if isinstance(config, dict | list):
        for key, inner in config.items() if isinstance(config, dict) else zip(repeat(name), config):
            check_numbers(inner, what, key)
    elif isinstance(config, int | float):
        most = DEPTH if "layers" in name or "depth" in name else MOST
        if not -MOST <= config <= most:  # False for NaN
            raise ValueError(f"{what} cannot be used: {name} is {config}: expected at most {most}.")


@contextmanager
def unusable(what: str) -> Iterator[None]:
    """Turn whatever a library raises for a model that it cannot make or run into a ValueError."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # of a tag, a config or an architecture
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{what} cannot be used ({type(error).__name__}: {reason}): name another tower.") from error
