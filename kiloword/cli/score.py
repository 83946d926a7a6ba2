"""The verbs score and classify: images against texts, and into classes named in words. No torch at import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from kiloword.config.execution import Device, Flat
from kiloword.errors import LeftOut, naming_truncated
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say, shown, warn
from kiloword.terminal.screen import say_table

if TYPE_CHECKING:
    from kiloword.api import Matcher

WIDE, MANY = 40, 8  # longest text and number of texts that are columns of a table

Drawing = Literal["maps", "words", "gradcam", "reconstruction"]


@dataclass(frozen=True, kw_only=True)
class Score(Device):
    """Score images against texts.

    Examples:
      kiloword score runs/first/model --images a.jpg b.jpg --texts "a dog" "a cat"
      kiloword score runs/first/model --images a.jpg --texts "a dog" --explain inside
    """

    model: Positional[str]  # model folder
    images: tuple[Path, ...]  # image files, or folders with subfolders
    texts: tuple[str, ...]  # texts to score
    explain: Path | None = None  # folder for a page of each image, IMAGE.html: where texts look, what decoders do
    # with explain, draw only some of: maps (attention of each text); of models with decoders, words (attention of the
    # text decoder for each word), gradcam (of its first layer), reconstruction (masked patches as the image decoder
    # reconstructs them)
    explain_what: tuple[Drawing, ...] = ()
    plane: Path | None = None  # write a page with the images and texts in a plane, Gaussians as ellipses, to this file
    beside: tuple[str, ...] = ()  # with plane, further models to draw beside the first, such as one without Gaussians
    # score to use in place of the model's own: cosine of the features, or csd (1 - CSD / 2 of Gaussians)
    nearest: Literal["cosine", "csd"] | None = None
    trust: Flat[Trust] = NONE

    def run(self) -> None:
        """Print the scores; draw what is asked for. Raises: ValueError for what cannot be scored or drawn."""
        if (self.beside and self.plane is None) or (self.explain_what and self.explain is None):
            raise ValueError("--beside needs --plane FILE; --explain-what needs --explain DIR.")
        if empty := next((n for n, text in enumerate(self.texts, 1) if not text.strip()), None):
            raise ValueError(f"text {empty} of --texts is empty: expected words.")
        from kiloword.distributed.by_device import announce, reason_of
        from kiloword.evaluation.command import labels

        images, names = image_files(self.images), labels([self.model, *self.beside])
        others = (loaded(model, self, Trust(trust_code=self.trust.trust_code)) for model in self.beside)
        matchers = [loaded(self.model, self, self.trust), *others]
        network = matchers[0].model
        announce(str(network.device), network.precision, reason_of(self.precision, network.config))
        if self.explain is not None:
            from kiloword.explain.sheets import possible, write

            possible(matchers[0], self.explain_what)
        with naming_truncated():
            scores, titles = matchers[0].score(images, list(self.texts), self.nearest), shown_names(images)
            if len(self.texts) <= MANY and max(map(len, self.texts)) <= WIDE:
                cells = [[f"{score:.3f}" for score in row] for row in scores.tolist()]
                say_table([[name, *row] for name, row in zip(titles, cells, strict=True)], "image", *self.texts)
            else:
                pairs = zip(product(titles, self.texts), scores.flatten().tolist(), strict=True)
                say_table([(f"{score:.3f}", *pair) for pair, score in pairs], "score", "image", "text")
            if self.plane is not None:
                from kiloword.explain.plane import write_plane

                write_plane(self.plane, dict(zip(names, matchers, strict=True)), images, self.texts)
                say(f"plane: {self.plane}")
            if self.explain is not None:
                write(self.explain, matchers[0], images, self.texts, self.explain_what)
                say(f"pages: {self.explain}")


def loaded(model: str, where: Device, trust: Trust) -> Matcher:
    """The model of a verb's flags."""
    from kiloword.api import load

    return load(model, where.device, method=trust.method, trust_code=trust.trust_code, precision=where.precision)


@dataclass(frozen=True, kw_only=True)
class Classify(Device):
    """Classify images by the names of classes.

    Examples:
      kiloword classify MODEL --images photos --classes dog cat bird
      kiloword classify MODEL --images photos --classes imagenet1k --templates imagenet1k --json classes.json
    """

    model: Positional[str]  # model folder
    images: tuple[Path, ...]  # image files, or folders with subfolders; what cannot be read is named and skipped
    # names of classes, a file of names (one per line, or JSON), or a known data set (`kiloword data names`)
    classes: tuple[str, ...]
    templates: tuple[str, ...] = ("a photo of a {c}.",)  # prompts with {c} for the class, a file, or a known data set
    top: int = 3  # number of classes shown of each image
    json: Path | None = None  # write the classes of all images to this file
    batch: int | None = None  # images in a batch; default: what fits into memory
    trust: Flat[Trust] = NONE

    def run(self) -> None:
        """Print the classes of each image. Raises: ValueError where no image can be used."""
        if self.top < 1 or (self.batch is not None and self.batch < 1):
            raise ValueError(f"--top is {self.top} and --batch {self.batch}: expected at least 1.")
        import torch

        from kiloword.api.features import batches
        from kiloword.data.classes.names import read_templates, slotted
        from kiloword.files import write_json
        from kiloword.model.encoding import chunks
        from kiloword.terminal.progress import showing, track

        files, names, given = image_files(self.images), _class_names(self.classes), self.templates
        templates = read_templates(given[0]) if len(given) == 1 else slotted(given, "--templates")
        matcher = loaded(self.model, self, self.trust)
        found, skipped, left = dict[Path, list[dict[str, Any]]](), dict[str, str](), LeftOut("image")
        with showing():
            classes = matcher.class_features(names, templates)
            parts = list(chunks(len(files), self.batch or batches(matcher.model)[0]))
            for part in track(parts, "images", "images", len(files), lambda part: part.stop - part.start):
                usable = {}
                for path in files[part]:
                    try:
                        usable[path] = matcher.preprocess(path)
                    except ValueError as error:
                        skipped[str(path)] = str(error)
                        left.add(str(path), str(error).removeprefix(f"image {path} "))
                if usable:
                    best = matcher.classify(torch.stack(list(usable.values())), classes).topk(min(self.top, len(names)))
                    for path, shares, places in zip(usable, best.values.tolist(), best.indices.tolist(), strict=True):
                        best_of = zip(places, shares, strict=True)
                        found[path] = [{"name": names[at], "probability": share} for at, share in best_of]
        warn(*left.lines())
        if not found:
            raise ValueError(f"none of {len(files)} images can be used: see above.")
        rows = zip(shown_names(list(found)), found.values(), strict=True)
        cells = [(title, c["name"], f"{c['probability']:.3f}") for title, classes_of in rows for c in classes_of]
        say_table(cells, "image", "class", "probability")
        if self.json is not None:
            images = [{"image": str(path), "classes": classes_of} for path, classes_of in found.items()]
            write_json(self.json, {"images": images, "skipped": skipped})


def _class_names(classes: Sequence[str]) -> list[str]:
    """Class names: those given, or of the file or data set that stands alone."""
    from kiloword.data.classes.names import classname_sets, read_classnames

    if len(classes) == 1 and (classes[0] in classname_sets() or Path(classes[0].partition("?")[0]).is_file()):
        return list(read_classnames(classes[0]))
    if len(classes) < 2 or len(set(classes)) < len(classes) or any(not name.strip() for name in classes):
        raise ValueError(
            f"--classes is {shown(', '.join(classes))[:200]}: expected two different names or more, a file of them, or "
            "a data set whose names are known (`kiloword data names`)."
        )
    return list(classes)


def image_files(images: Sequence[Path]) -> list[Path]:
    """Replace folders by the images in them and their subfolders, sorted. Prints which files are not images.

    Raises: ValueError for a folder without images.
    """
    from kiloword.data.folders import image_folders, no_images

    files, left = list[Path](), LeftOut("path")
    for path in images:
        inside = [path]
        if path.is_dir():
            inside = sorted(path / below / name for below, names, _ in image_folders(path, left) for name in names)
        if not inside:
            raise ValueError(no_images(path, left))
        files += inside
    warn(*left.lines())
    return files


def shown_names(images: Sequence[Path]) -> list[str]:
    """The names of files; where two have one name, their paths."""
    names = [path.name for path in images]
    return names if len(set(names)) == len(names) else list(map(str, images))
