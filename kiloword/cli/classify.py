"""The verb classify: images into classes that are named in words. No torch at import, so that help is instant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from kiloword.cli.score import entry_lines, image_files, shown_names
from kiloword.errors import LeftOut
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say, shown, warn

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.data.classes import Templates

LISTED = 1000  # images that are printed; --json has all


@dataclass(frozen=True)
class Answer:
    """An image and its best classes with their probabilities, best first."""

    image: Path
    classes: list[tuple[str, float]]


def classify(
    model: Positional[str],
    images: tuple[Path, ...],
    classes: tuple[str, ...],
    templates: tuple[str, ...] = ("a photo of a {c}.",),
    top: int = 3,
    json: Path | None = None,
    batch: int | None = None,
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    trust: Annotated[Trust, arg(name="")] = NONE,
) -> None:
    """Classify images: kiloword classify MODEL --images photos --classes dog cat bird

    Into the classes of a known data set, as a file: kiloword classify MODEL --images photos --classes imagenet1k
    --templates imagenet1k --json classes.json

    Args:
        model: model folder.
        images: image files, or folders with subfolders; what cannot be read is named and skipped.
        classes: names of classes; or a file of names (a line each, or JSON), or a data set (`kiloword data names`).
        templates: prompts with {c} for the name of the class; or a file of them, or a data set.
        top: number of classes shown of each image.
        json: write the classes of all images to this file.
        batch: images in a batch; default: what fits into memory.
        device: auto, cpu, mps, cuda, cuda:N.
        precision: precision of the encoders; auto: bf16 on CUDA for models larger than size tiny.
        trust: code that the model folder may run.
    """
    if top < 1:
        raise ValueError(f"--top is {top}: expected at least 1.")
    files, names = image_files(images), _names(classes)
    from kiloword.api import load
    from kiloword.files import write_json
    from kiloword.terminal.progress import showing

    matcher = load(model, device=device, method=trust.method, trust_code=trust.trust_code, precision=precision)
    skipped: dict[Path, str] = {}
    with showing():
        answers = list(_answers(matcher, files, names, _templates(templates), top, batch, skipped))
    left = LeftOut("image")
    for path, reason in skipped.items():
        left.add(str(path), reason.removeprefix(f"image {path} "))
    warn(*left.lines())
    if not answers:
        raise ValueError(f"none of {len(files)} images can be used: see above.")
    _print(answers)
    if json is not None:
        described = [
            {"image": str(a.image), "classes": [{"name": n, "probability": p} for n, p in a.classes]} for a in answers
        ]
        write_json(json, {"images": described, "skipped": {str(path): reason for path, reason in skipped.items()}})


def _names(classes: Sequence[str]) -> list[str]:
    """Class names: those given, or of the file or data set that stands alone. Raises: ValueError for fewer than two."""
    from kiloword.data.classes.names import classname_sets, read_classnames

    alone = classes[0] if len(classes) == 1 else None
    if alone is not None and (alone in classname_sets() or Path(alone.partition("?")[0]).is_file()):
        classes = read_classnames(alone)
    if any(not name.strip() for name in classes):
        raise ValueError("a name of --classes is empty: expected words.")
    if len(classes) < 2:
        raise ValueError(
            f"--classes is {shown(', '.join(classes))[:200] or 'empty'}: expected two names or more, a file of them, "
            "or a data set whose names are known (`kiloword data names`)."
        )
    if alone is None and (twice := [name for n, name in enumerate(classes) if name in classes[:n]]):
        raise ValueError(
            f"--classes names {shown(twice[0])[:100]} twice, which would share its probability: give it once."
        )
    return list(classes)


def _templates(templates: Sequence[str]) -> Templates:
    from kiloword.data.classes.names import read_templates, slotted

    return read_templates(templates[0]) if len(templates) == 1 else slotted(templates, "--templates")


def _answers(
    matcher: Matcher,
    files: Sequence[Path],
    names: Sequence[str],
    templates: Templates,
    top: int,
    batch: int | None,
    skipped: dict[Path, str],
) -> Iterator[Answer]:
    """The best classes of every image, a batch at a time; images that cannot be read go to `skipped`."""
    import torch

    from kiloword.api.batches import image_batch
    from kiloword.model.encoding import chunks
    from kiloword.terminal.progress import track

    classes = matcher.class_features(names, templates)
    size = image_batch(matcher.model) if batch is None else batch
    parts = list(chunks(len(files), size))
    for part in track(parts, "images", "images", len(files), lambda part: part.stop - part.start):
        usable = {}
        for path in files[part]:
            try:
                usable[path] = matcher.preprocess(path)
            except ValueError as error:
                skipped[path] = str(error)
        if not usable:
            continue
        best = matcher.classify(torch.stack(list(usable.values())), classes).topk(min(top, len(names)))
        for path, shares, places in zip(usable, best.values.tolist(), best.indices.tolist(), strict=True):
            yield Answer(path, [(names[at], share) for at, share in zip(places, shares, strict=True)])


def _print(answers: Sequence[Answer]) -> None:
    """Print the classes of each image, with their probabilities."""
    from rich.table import Table
    from rich.text import Text

    from kiloword.terminal.screen import Screen

    table, entries = Table("image", "class", "probability"), []
    listed = answers[:LISTED]
    for answer, image in zip(listed, shown_names([answer.image for answer in listed]), strict=True):
        for place, (name, share) in enumerate(answer.classes):
            style = "" if place else "bold"
            number = Text(f"{share:.3f}", style)
            table.add_row(Text("" if place else shown(image)), Text(shown(name), style), number)
            entries.append((number, image, name))
    Screen(120).print_table(table, entry_lines(entries))
    if len(answers) > LISTED:
        say(f"and {len(answers) - LISTED:,} more images: --json FILE writes all.")
