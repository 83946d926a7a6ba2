"""The verbs methods, sizes, bench and doctor: tables of methods and components, of sizes, and of this machine."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode

from kiloword.__version__ import __version__
from kiloword.config.options import Mixing
from kiloword.config.recipes import ImageConfig, ModelConfig, TextConfig, sizes
from kiloword.distributed.device import cores
from kiloword.errors import needs
from kiloword.files import write_json
from kiloword.methods.method import Method
from kiloword.methods.registry import components, names, preset
from kiloword.model.heads import Head
from kiloword.model.image import extra, grid, stem_plan
from kiloword.model.model import Model, tower_shape
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.terminal import say
from kiloword.terminal.screen import Screen, plain_table

if TYPE_CHECKING:
    from kiloword.apps.plan.measured import Measured

_WIDE = 280  # columns where the output is no terminal


def methods_table() -> None:
    """Print the methods with sources and components, then the components for mixing."""
    slots_shown = ("transforms", "captions", "pooling", "uncertainty", "positives", "pair loss", "contrasts", "terms")
    table = plain_table("method", "source", *slots_shown, "summary")
    for name in names():
        table.add_row(*slots(preset(name)).values())
    Screen(_WIDE).print(table)
    table = plain_table("component", "slot", "summary")
    for name, component in components().items():
        table.add_row(name, component.slot, component.summary)
    flags = " ".join(f"--{f.name.replace('_', '-')}" for f in fields(Mixing))
    say(f"Components fill a slot of another method: kiloword train siglip+NAME, or a flag with NAME: {flags}.")
    Screen(_WIDE).print(table)


def slots(method: Method) -> dict[str, str]:
    """Names of the components in the slots of a method; "" for an empty slot."""
    head = _head(method, sizes()["debug"])
    uncertainty = head.uncertainty
    return {
        "method": method.name,
        "source": method.source,
        "transforms": ", ".join(_word(transform) for transform in method.transforms),
        "captions": str(method.captions),
        "pooling": _word(head.pooling),
        "uncertainty": "" if uncertainty is None else _word(uncertainty),
        "positives": _word(method.positives),
        "pair loss": _word(method.pair_loss).removesuffix(" loss") if method.pair_weight else "",
        "contrasts": ", ".join(method.contrasts),
        "terms": ", ".join(method.terms),
        "summary": method.summary,
    }


def sizes_table() -> None:
    """Print the named sizes of towers with their parameters and FLOPs."""
    table = plain_table("size", "image", "patch", "image tower", "text tower", "context", "embedding")
    for name in ("M parameters", "GFLOP image", "text", "pair"):
        table.add_column(name, justify="right")
    for name, config in sizes().items():
        image, text = config.image, config.text
        flops = image_flops(config), text_flops(config), image_flops(config) + text_flops(config)
        table.add_row(
            *(name, str(image.size), str(image.patch), tower_shape(image), tower_shape(text), str(text.context)),
            *(str(config.head.dim), f"{parameters(config) / 1e6:.2f}", *(f"{w / 1e9:.3g}" for w in flops)),
        )
    Screen(_WIDE).print(table)
    say(
        "Towers are width x depth / heads. GFLOP: a forward pass (two per multiply-add) of one image and of one",
        "caption that fills the context; a training step takes three times as much. Captions are never padded.",
    )


def parameters(config: ModelConfig, method: str = "clip") -> int:
    """Number of parameters of a model, counted on the meta device."""
    with torch.device("meta"):
        model = Model(config, _head(preset(method), config))
    return sum(p.numel() for p in model.parameters())


def image_flops(config: ModelConfig) -> int:
    """FLOPs of matrix products in the forward pass of one image, two per multiply-add; any pool except "map"."""
    image = config.image
    if image.tower != "vit" or image.trunk.name:
        return _counted_flops(config)
    patches, side = grid(image) ** 2, grid(image) * image.patch
    stem = 2 * patches * 3 * image.patch**2 * image.width
    for before, after, kernel, stride in stem_plan(image) if image.stem == "conv" else ():
        side //= stride
        stem += 2 * side**2 * before * after * kernel**2
    return stem + _blocks(image, patches + extra(image)) + 2 * image.width * config.head.dim


def _counted_flops(config: ModelConfig) -> int:
    """FLOPs of the forward pass of one image, counted on the meta device."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = Model(config, _head(preset("clip"), config)).to("meta")
        model.encode_image(torch.empty(1, 3, config.image.size, config.image.size, dtype=torch.uint8))
    return int(counter.get_total_flops())


def text_flops(config: ModelConfig) -> int:
    """FLOPs of the forward pass of one caption that fills the context."""
    return _blocks(config.text, config.text.context) + 2 * config.text.width * config.head.dim


def _blocks(tower: ImageConfig | TextConfig, tokens: int) -> int:
    """FLOPs of projections, MLP and attention (without mask) of all blocks."""
    weights = 4 * tower.width**2 + 2 * tower.width * tower.mlp
    return 2 * tower.depth * (tokens * weights + 2 * tokens**2 * tower.width)


def bench_table(lines: Iterable[Measured], json: Path | None) -> None:
    """Print measurements as they come."""
    say(f"{'':<24}{'seconds':>10}{'a second':>16}{'TFLOP/s':>10}{'of products':>13}")
    every = list[dict[str, object]]()
    for line in lines:
        speed = f"{line.items / line.seconds:,.0f} {line.unit}" if line.items else ""
        rate, share = (f"{line.rate / 1e12:.3f}", f"{line.share:.2f}") if line.flop else ("", "")
        say(f"{line.what:<24}{line.seconds:>10.4f}{speed:>16}{rate:>10}{share:>13}")
        every.append(asdict(line))
    if json is not None:
        write_json(json, every)


def doctor_table() -> None:
    """Print versions, devices and extras of this machine, and hints."""
    table = plain_table("", "")
    for name, value in machine().items():
        table.add_row(name, value)
    for name, packages in extras().items():
        missing = [package for package, version in packages.items() if not version]
        have = ", ".join(f"{package} {version}" for package, version in packages.items() if version)
        install = needs("it", ", ".join(missing), name) if missing else ""
        table.add_row(f"extra {name}", "; ".join(part for part in (have, install) if part))
    Screen(_WIDE).print(table)
    say(*(f"hint: {hint}" for hint in hints()))


def machine() -> dict[str, str]:
    """Versions, devices and threads."""
    cards = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    omp = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("OMP_", "MKL_NUM"))]
    return {
        "kiloword": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(cores()),
        "devices": ", ".join(["cpu", *(f"{c.name} ({c.total_memory / 2**30:.0f} GiB)" for c in cards)]),
        "threads of torch": str(torch.get_num_threads()),
        "OpenMP": " ".join(omp) or "default of the library (no OMP_... in the environment)",
    }


def extras() -> dict[str, dict[str, str]]:
    """Extra of kiloword -> its packages -> installed version, "" where it is missing; {}: kiloword is not installed."""
    versions: dict[str, dict[str, str]] = {}
    try:
        lines = metadata.requires("kiloword") or []
    except metadata.PackageNotFoundError:  # it runs from its source
        return versions
    for line in lines:
        if match := re.match(r"""([\w.-]+).*;.*extra == ['"]([\w-]+)['"]""", line):
            versions.setdefault(match[2], {})[match[1]] = _version(match[1])
    return versions


def hints() -> list[str]:
    """Hints for better performance on this machine."""
    out = []
    if not torch.cuda.is_available():
        out.append("no CUDA device: sizes debug and tiny train on a CPU within minutes, s16 and up want a GPU.")
        if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
            out.append("OMP_WAIT_POLICY=PASSIVE keeps loader processes and training from fighting over the cores.")
    if torch.get_num_threads() > cores():
        out.append(f"torch uses {torch.get_num_threads()} threads on {cores()} cores: set OMP_NUM_THREADS={cores()}.")
    if not any(_version(package) for package in ("simplejpeg", "opencv-python-headless", "opencv-python")):
        out.append(needs("--decoder simplejpeg or opencv, which decodes faster,", "its package", "fast", "."))
    if hint := torchvision_hint():
        out.append(hint)
    return out


def torchvision_hint() -> str:
    """What to do about a torchvision that was built for another torch; "" where it fits."""
    if torchvision_ready() is None:
        return ""
    return (
        f"torchvision {_version('torchvision')} was built for another torch than {torch.__version__}: kiloword "
        "works, and a program that imports torchvision by itself stops (operator torchvision::nms does not exist). "
        f"{_matching(torch.__version__)} brings the matching one."
    )


def _matching(version: str) -> str:
    """The command that installs the torchvision of a version of torch: 0.15 came with 2.0, 0.28 with 2.13."""
    major, minor, *_ = version.split(".")
    build = version.partition("+")[2]
    which = f"'torchvision==0.{int(minor) + 15}.*'" if major == "2" else "torchvision"
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return f"pip install --force-reinstall --no-deps {which}{index}"


def _head(method: Method, config: ModelConfig) -> Head:
    return method.head(method.shape(config))


def _word(thing: object | Callable[..., object]) -> str:
    """The name of a component: of its function, else of its class."""
    thing = thing.func if isinstance(thing, partial) else thing
    name = getattr(thing, "__name__", type(thing).__name__)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").lower().strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
