"""The verbs methods, sizes and doctor: tables of methods, of sizes, and of this machine. No torch at import."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from kiloword.__version__ import __version__
from kiloword.config.recipes import ModelConfig, sizes
from kiloword.errors import needs
from kiloword.terminal import say
from kiloword.terminal.screen import say_table

if TYPE_CHECKING:
    from kiloword.methods.method import Method


@dataclass(frozen=True)
class Methods:
    """List the methods, and the components that other methods can take."""

    def run(self) -> None:
        """Print two tables."""
        from kiloword.methods.registry import PRESETS, components, preset

        every = [slots(preset(name)) for name in PRESETS]
        say_table([list(one.values()) for one in every], *every[0])
        say("Components fill a slot of another method: kiloword train siglip+NAME.")
        say_table([(name, c.slot, c.summary) for name, c in components().items()], "component", "slot", "summary")


def slots(method: Method) -> dict[str, str]:
    """Names of the components in the slots of a method; "" for an empty slot."""
    head = method.head(method.shape(sizes()["debug"]))
    uncertainty = head.uncertainty
    return {
        "method": method.name,
        "source": method.source,
        "transforms": ", ".join(_word(transform) for transform in method.transforms),
        "captions": str(method.captions),
        "pooling": _word(head.pooling),
        "uncertainty": "" if uncertainty is None else _word(uncertainty),
        "positives": _word(method.positives),
        "pair_loss": _word(method.pair_loss).removesuffix(" loss") if method.pair_weight else "",
        "contrasts": ", ".join(method.contrasts),
        "terms": ", ".join(method.terms),
        "summary": method.summary,
    }


def _word(thing: object | Callable[..., object]) -> str:
    """The name of a component: of its function, else of its class."""
    thing = thing.func if isinstance(thing, partial) else thing
    name = getattr(thing, "__name__", type(thing).__name__)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").lower().strip()


@dataclass(frozen=True)
class Sizes:
    """List the named sizes of towers."""

    def run(self) -> None:
        """Print a table, with parameters."""
        from kiloword.model.model import tower_shape

        rows = []
        for name, config in sizes().items():
            image, text = config.image, config.text
            shape = (tower_shape(image), tower_shape(text), str(text.context), str(config.head.dim))
            rows.append((name, str(image.size), str(image.patch), *shape, f"{parameters(config) / 1e6:.2f}"))
        towers = ("image tower", "text tower", "context", "embedding")
        say_table(rows, "size", "image", "patch", *towers, "M parameters")
        say("Towers are width x depth / heads. `kiloword plan` counts the FLOPs of a method at a size.")


def parameters(config: ModelConfig) -> int:
    """Number of parameters of a clip model."""
    import torch

    from kiloword.methods.registry import preset
    from kiloword.models.build import build

    with torch.device("meta"):
        return sum(p.numel() for p in build(config, preset("clip")).parameters())


@dataclass(frozen=True)
class Doctor:
    """Show versions, devices, extras and threads of this machine."""

    def run(self) -> None:
        """Print a table."""
        import torch

        from kiloword.distributed.device import cores
        from kiloword.model.trunks.libraries import torchvision_lines

        cards = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
        omp = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("OMP_", "MKL_NUM"))]
        rows = {
            "kiloword": __version__,
            "python": f"{platform.python_version()} ({sys.executable})",
            "torch": torch.__version__,
            "system": f"{platform.system()} {platform.machine()}",
            "devices": ", ".join(["cpu", *(f"{c.name} ({c.total_memory / 2**30:.0f} GiB)" for c in cards)]),
            "threads": f"{torch.get_num_threads()} of torch on {cores()} cores",
            "OpenMP": " ".join(omp) or "no OMP_... in the environment",
        }
        for extra, packages in extras().items():
            have = ", ".join(f"{package} {version}" for package, version in packages.items() if version)
            missing = ", ".join(package for package, version in packages.items() if not version)
            rows[f"extra {extra}"] = "; ".join(filter(None, [have, missing and needs("it", missing, extra)]))
        say_table(list(rows.items()), "", "")
        say(*torchvision_lines())


def extras() -> dict[str, dict[str, str]]:
    """Extra of kiloword -> its packages -> installed version, "" where it is missing; {}: it runs from its source."""
    versions: dict[str, dict[str, str]] = {}
    with suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("kiloword") or []:
            if match := re.match(r"""([\w.-]+).*;.*extra == ['"]([\w-]+)['"]""", line):
                here = versions.setdefault(match[2], {})
                here[match[1]] = ""
                with suppress(metadata.PackageNotFoundError):
                    here[match[1]] = metadata.version(match[1])
    return versions
