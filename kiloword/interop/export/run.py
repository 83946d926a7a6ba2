"""`kiloword export`: write, compare, name what is omitted, and only then put the folder in its place."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

from kiloword.files import new_folder, write_atomic
from kiloword.interop.export.source import Exported, Precision
from kiloword.interop.export.targets import TARGETS
from kiloword.model.trunks.libraries import pip
from kiloword.models.card import CARD, card
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say

PHOTOS = (
    "Photos: kiloword turns them by their EXIF orientation, blends transparency with white, divides 16 bits by 257 and "
    "makes palettes and 1 bit RGB, all before it resizes. Give other libraries upright RGB of 8 bits."
)


def run(target: str, name: str, out: Path, trust: Trust = NONE, precision: Precision = "fp32") -> None:
    """Export a model.

    Args: name: a model folder, or another library's model by name; precision: of the weights, for onnx alone.
    Raises: ValueError for an `out` that is not empty, a model that the target cannot express, a target that is not
    installed, or features that differ by more than LIMIT; nothing is written then.
    """
    if precision != "fp32" and target != "onnx":
        raise ValueError(f"--precision {precision} is for onnx; {target} gets the weights as they are: omit it.")
    writer, load, packages = TARGETS[target]
    with new_folder(out, "exporting to") as work:
        source = Exported.of(name, trust, target, precision)
        source.notes.append(PHOTOS)
        try:
            lines = resolve_name(f"kiloword.interop.export.{writer}")(source, work)
        except ImportError as error:
            raise ValueError(f"an export to {target} needs {packages}: {pip('install', *packages.split())}") from error
        files = [path for path in work.rglob("*") if path.is_file()]
        listed = "".join(f"- `{file.relative_to(work).as_posix()}`\n" for file in sorted(files))  # for `kiloword push`
        text = card(source.file, source.folder, load, source.notes, target)
        write_atomic(work / CARD, f"{text}\n## Files\n\n{listed}".encode())
        for file in files:
            file.chmod((work / CARD).stat().st_mode)  # safetensors lets the owner alone read its files
    say(*lines, *source.notes, f"written: {out}")
