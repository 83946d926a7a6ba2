"""A model with its tokenizer and preprocessing: images and strings in, features and scores out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kiloword.api.features import batches, both, finite, in_batches, rows_of
from kiloword.api.show import ScoreTable, ShownFeatures
from kiloword.config.recipes import Nearest
from kiloword.data.classes import Templates
from kiloword.data.classes.names import prompts
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.images.inputs import Images, OneImage, as_list, is_one, kind, prepare
from kiloword.distributed.device import choose
from kiloword.explain.maps import Explanation, explain, together
from kiloword.files import new_folder, write_atomic
from kiloword.methods.prolip.gaussian import Form, csd, csd_matrix, inclusion_matrix, variance_sum
from kiloword.methods.registry import preset
from kiloword.model.encoding import chunks, encode_texts, inference, join
from kiloword.model.pooling import at_least_float
from kiloword.models import card as cards
from kiloword.models.model_folder import save_model
from kiloword.terminal.progress import showing, track
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.config.recipes import ModelFile
    from kiloword.data.text.tokenizer import Tokenizer
    from kiloword.generation.captioner import Caption
    from kiloword.generation.options import GenerationOptions
    from kiloword.methods.method import Method
    from kiloword.model.model import Model


@dataclass(repr=False, eq=False)
class Matcher:
    """A model with its tokenizer and preprocessing. Every method works in batches and without gradients.

    Images are one or several `Images`: Pillow images, paths, bytes of files, arrays, tensors. Texts are one string or a
    list. For one item `encode_image` and `encode_text` return features without the leading dimension, "vec" [D]. All
    other methods treat one item, or its features, as a list of one: `score` of one image and one text is [1, 1].

    Batches are as large as the memory allows, unless `batch` is given. Long work shows its progress in notebooks;
    elsewhere `progress=True` asks for it, and `progress=False` shows nothing anywhere.

    Args: method: the method of the training, if known; its terms determine how images were masked; file: the
    `config.json` of its folder, which `save` needs; card: the text of the folder's README.md.
    """

    model: Model
    tokenizer: Tokenizer
    method: Method | None = None
    file: ModelFile | None = None
    card: str = ""

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the method where its name is known: it has functions that pickle cannot write."""
        return self.__dict__ | ({} if self.file is None else {"method": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if self.file is not None:
            self.method = preset(self.file.method, self.file.settings)

    def __repr__(self) -> str:
        from kiloword.model.model import model_in_words

        return f"Matcher({model_in_words(self.model, self.method.name if self.method else 'unknown method')})"

    def to(self, device: str | torch.device) -> Matcher:
        """Move the model to "cpu", "cuda", "cuda:N", "mps" or "auto", and return this Matcher. Raises: ValueError."""
        self.model.to(choose(str(device), mps=True))
        return self

    def half(self) -> Matcher:
        """Round the weights to fp16, half the memory, and return this Matcher; scores stay fp32."""
        self.model.half()
        self.model.precision = "fp32"  # no autocast above it
        return self

    def save(self, folder: str | Path) -> Path:
        """Write a model folder that `load` reads; returns it.

        The card of the folder that the model came from is copied. A model that was changed since gets a new card.
        Raises: ValueError when the folder holds something else, or for a model that no folder's config.json describes.
        """
        if self.file is None:
            raise ValueError(
                "this Matcher was not loaded from a model folder: kiloword.models.model_folder.save_model."
            )
        folder, file = Path(folder).expanduser(), replace(self.file, model=self.model.config)
        before = self.file.model if self.method is None else self.method.shape(self.file.model)
        card = self.card if before == file.model else cards.changed(replace(self.file, model=before), file)
        with new_folder(folder) as work:
            if self.card:
                write_atomic(work / cards.CARD, card.encode())
            save_model(work, self.model, self.tokenizer, file)
        return folder

    def show(self, images: Images, texts: Sequence[str], scores: Tensor | None = None) -> ScoreTable:
        """Scores of images with texts as a table, with thumbnails in a notebook.

        Args: scores: [I, T] to show in place of `score`, such as the probabilities of `classify`.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        pixels = self.pixels(images)
        scores = self.score(pixels, texts) if scores is None else torch.as_tensor(scores)
        if scores.shape != (len(pixels), len(texts)):
            raise ValueError(
                f"scores are {list(scores.shape)}: expected [{len(pixels)}, {len(texts)}], images by texts."
            )
        return ScoreTable(scores.cpu(), as_list(images), texts, pixels.cpu())

    def preprocess(self, image: OneImage) -> Tensor:
        """Preprocess one image: uint8 [3, H, W], which the model normalises itself."""
        return prepare([image], self._transform)[0]

    def pixels(self, images: Images, first: int = 0) -> Tensor:
        """Preprocess images: uint8 [I, 3, H, W] on the model's device. Raises: ValueError as `encode_image`."""
        return prepare(as_list(images), self._transform, first).to(self.model.device)

    def encode_image(self, images: Images, batch: int | None = None, progress: bool | None = None) -> Features:
        """Features of I images, every value [I, ...]: "vec" [I, D] has norm 1. For one image [...] and [D].

        Args: batch: images encoded at a time; None: 64 on a CPU, 512 on a GPU, and fewer where its memory is full.
        Raises: ValueError for an item that is not an image, or a file that cannot be read as one.
        """
        several, size = as_list(images), batches(self.model)[0] if batch is None else batch
        if size < 1:
            raise ValueError(f"the batch size is {size}: expected at least 1.")

        def encode(part: slice) -> Features:
            return self.model.image_features(self.pixels(several[part], part.start))

        with inference(self.model), showing(progress):
            encoded = in_batches(len(several), size, encode, smaller=batch is None)
            parts = list(track(encoded, "images", "images", len(several), lambda part: len(part["vec"])))
        return _features(join(parts), is_one(images))  # outside, so that gradients by it are allowed

    def encode_text(
        self, texts: str | Sequence[str], batch: int | None = None, progress: bool | None = None
    ) -> Features:
        """Features of T texts, every value [T, ...]: "vec" [T, D] has norm 1. For one string [...] and [D]."""
        several: Any = [texts] if isinstance(texts, str) else texts
        if not isinstance(several, Sequence):
            raise ValueError(f"got {kind(texts)} as texts: expected a string, or a list of strings.")
        if not several:
            raise ValueError("got no texts: expected at least one.")
        wrong = next((i for i, text in enumerate(several) if not isinstance(text, str)), None)
        if wrong is not None:
            raise ValueError(f"got {kind(several[wrong])} as text {wrong}: expected strings.")
        with showing(progress):
            features = encode_texts(self.model, self.tokenizer, several, batch or batches(self.model)[1])
        return _features(features, isinstance(texts, str))

    def score(
        self, images: Features | Images, texts: Features | str | Sequence[str], nearest: Nearest | None = None
    ) -> Tensor:
        """Scores of every image with every text: [I, T], higher is better (a cosine in most models).

        Args: features, or inputs of `encode_image` and `encode_text`; nearest: None: the model's own score; "cosine" of
        "vec"; "csd": 1 - distance / 2, which is the cosine where there is no variance. For probabilities see
        `classify`. Raises: ValueError for "csd" of features that are not Gaussian, and for scores that are NaN or
        infinite.
        Source: arXiv:2410.18857, eq. A.1.
        """
        images = images if isinstance(images, dict) else self.encode_image(images)
        texts = texts if isinstance(texts, dict) else self.encode_text(texts)
        return self._scores(images, texts, nearest, False)

    def score_pairs(self, images: Features, texts: Features, nearest: Nearest | None = None) -> Tensor:
        """Scores of image n with text n, for features of N images and N texts: [N]. Args, errors: as of `score`."""
        n, t = (len(rows_of(features)["vec"]) for features in (images, texts))
        if n != t:
            raise ValueError(f"score_pairs got {n} images and {t} texts: expected one text per image.")
        return self._scores(images, texts, nearest, True)

    def _scores(self, images: Features, texts: Features, nearest: Nearest | None, paired: bool) -> Tensor:
        if nearest not in (None, "cosine", "csd"):
            raise ValueError(f"nearest is {nearest!r}: expected cosine, csd or None, the model's score.")
        images, texts = both(images, texts, gaussian=nearest == "csd")
        with inference(self.model):
            if nearest == "csd":
                return finite(1 - 0.5 * (csd if paired else csd_matrix)(images, texts))
            if nearest == "cosine":
                a, b = at_least_float(images["vec"]), at_least_float(texts["vec"])
                return finite((a * b).sum(-1) if paired else a @ b.T)
            return finite((self.model.head.score_pairs if paired else self.model.score)(images, texts))

    def uncertainty(self, features: Features) -> Tensor:
        """Uncertainty of N images or texts, the sum of the variances of each: [N].

        Raises: ValueError when the features are not Gaussian. Source: arXiv:2410.18857, section 4.3.
        """
        with inference(self.model):
            return variance_sum(rows_of(features, gaussian=True))

    def distance(self, a: Features, b: Features) -> Tensor:
        """Expected squared distance of samples of every a and every b, each images or texts: [N_a, N_b].

        In closed form: 2 - 2 cosine of the means, plus both uncertainties.
        Raises: ValueError when the features are not Gaussian. Source: arXiv:2410.18857, eq. 1.
        """
        with inference(self.model):
            return csd_matrix(*both(a, b, gaussian=True))

    def inclusion(self, a: Features, b: Features, form: Form = "paper") -> Tensor:
        """H(a in b) of every a with every b, summed over dimensions: [N_a, N_b], positive where b is more general.

        H compares the widths of both and grows with their distance; it does not show whether they overlap, for which
        see `includes` and `distance`.

        Args: a, b: features of images or texts; form: "paper", eq. 3 as printed; "exact", its integral.
        Raises: ValueError when the features are not Gaussian. Source: arXiv:2410.18857, eq. 4.
        """
        if form not in ("paper", "exact"):
            raise ValueError(f"form is {form!r}: expected paper or exact.")
        with inference(self.model):
            return inclusion_matrix(*both(a, b, gaussian=True), form=form)

    def includes(self, a: Features, b: Features, overlap: float | None = None, form: Form = "paper") -> Tensor:
        """Whether a lies within b, for every a and every b: bool [N_a, N_b].

        It does where `inclusion` is positive and the two overlap; H alone would call a narrow Gaussian ten units
        outside a wide one included.

        Args: a, b, form: as of `inclusion`; overlap: the `distance` below which two overlap; None: where an image and
        a text so far apart would be a match more likely than not, as the model learned it. Texts lie nearer to texts
        than to images, and general captions far from everything: for either choose it on pairs that you know.
        Raises: ValueError as `inclusion`, for an overlap that is NaN, or None in a model without bias.
        """
        head = self.model.head
        if overlap is None and head.bias is None:
            raise ValueError("a model trained by softmax never learned that: give overlap, a distance in (0, 4).")
        within, distance = self.inclusion(a, b, form) > 0, self.distance(a, b)
        with inference(self.model):
            return within & (head.logits(1 - 0.5 * distance) > 0 if overlap is None else distance < overlap)

    def explain(self, images: Images, texts: Features | str | Sequence[str], batch: int = 16) -> Explanation:
        """Where on every image every text looks, and how it mixes the image's tokens: see `Explanation`."""
        captions = rows_of(texts if isinstance(texts, dict) else self.encode_text(texts))
        with inference(self.model):
            return together([explain(self.model, part, captions) for part in self._parts(images, batch)])

    def caption(self, images: Images, options: GenerationOptions | None = None, batch: int = 16) -> list[list[Caption]]:
        """Captions of I images, best first: I lists of at most `options.num` (one, unless options say more).

        Raises: ValueError for a model without a text decoder, or invalid options.
        """
        from kiloword.generation.captioner import Captioner

        captioner = Captioner(self.model, self.tokenizer)
        return [captions for part in self._parts(images, batch) for captions in captioner.caption(part, options)]

    def class_features(
        self, names: Sequence[str], templates: Templates = ("a photo of a {c}.",), progress: bool | None = None
    ) -> Features:
        """Features of C classes by their prompts, "vec" [C, D], for `classify` of many batches of images.

        Args: templates: prompts with `{c}` for the name, or each name's own prompts; ensembled as the head does.
        """
        if isinstance(names, str | None) or not len(names):
            raise ValueError(f"class names are {names!r}: expected a list of at least one name.")
        captions, group = prompts(names, templates)
        with showing(progress):
            texts = encode_texts(self.model, self.tokenizer, captions)
        group_of = torch.tensor(group, device=texts["vec"].device)
        with inference(self.model):
            return ShownFeatures(self.model.head.ensemble(texts, group_of, len(names)))

    def classify(
        self,
        images: Features | Images,
        names: Features | Sequence[str],
        templates: Templates = ("a photo of a {c}.",),
        batch: int | None = None,
        progress: bool | None = None,
    ) -> Tensor:
        """Probabilities of I images over C classes, [I, C], rows sum to 1: the softmax of the model's logits.

        Args: names: of the classes, or their `class_features`; templates: as of `class_features`; batch, progress: as
        of `encode_image`.
        """
        classes = names if isinstance(names, dict) else self.class_features(names, templates)
        features = images if isinstance(images, dict) else self.encode_image(images, batch, progress)
        scores = self.score(features, classes)
        with inference(self.model):
            return self.model.head.logits(scores).softmax(1)

    def _parts(self, images: Images, batch: int) -> Iterator[Tensor]:
        """Preprocessed images on the model's device, uint8 [batch, 3, H, W]."""
        several = as_list(images)
        return (self.pixels(several[part], part.start) for part in chunks(len(several), batch))

    @property
    def _transform(self) -> EvalTransform:
        config = self.model.config
        return EvalTransform(config.image.size, config.preprocess.resize)


def _features(features: Features, one: bool) -> Features:
    """What is shown; of one item without the leading dimension."""
    return ShownFeatures({name: value[0] if one else value for name, value in features.items()})
