"""Distillation from stored features of teachers, as in MobileCLIP. Source: arXiv:2311.17049, arXiv:2508.20691."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from kiloword.config.recipes import AugmentConfig, Recipe
from kiloword.config.settings import ABOVE_0, BELOW_1, BaseSettings, setting
from kiloword.data.images.views import in_words
from kiloword.data.stored import store_file
from kiloword.losses.pairs import anchor_weights, summed, sums_of
from kiloword.methods.method import Component, Method, Part, ScaledContrast
from kiloword.model.model import Model
from kiloword.types import Batch, Encoded, Features, PairBlocks, Pairs, Total


@dataclass(frozen=True, kw_only=True)
class Reinforced(BaseSettings):
    """Distillation from precomputed features; the scales are those of MobileCLIP2's published script."""

    teachers: tuple[str, ...] = setting(("teacher",), "names of the precomputed features, one for each teacher")
    scales: tuple[float, ...] = setting(
        (70.0,), "each teacher's scale of cosines, 1 / temperature; one: of all", ABOVE_0
    )
    weight: float = setting(0.75, "weight of the distillation; the pair loss keeps the rest of 1", 0, BELOW_1)


def reinforced(method: Method, settings: Reinforced) -> Method:
    """Add the distillation, and scale the pair loss by the rest of its weight.

    Raises: ValueError for settings or methods that it does not fit.
    """
    names, scales = settings.teachers, settings.scales
    if not names or len(set(names)) < len(names) or len(scales) not in (1, len(names)):
        raise ValueError(
            f"{len(names)} teachers {', '.join(names)} have {len(scales)} scales: expected different names, at least "
            "one, and one scale, or one for each teacher."
        )
    if callable(method.pair_weight) or not method.pair_weight or not method.pooling.kind.one_vector:
        raise ValueError(
            f"reinforced compares one vector per image with one per text and shares the weight of the pair loss, which "
            f"{method.name} has not, or changes."
        )
    return replace(
        method.plus(contrasts={"reinforced": (settings.weight, Part(ReinforcedContrast, settings))}),
        pair_weight=(1 - settings.weight) * method.pair_weight,
        notes=(*method.notes, partial(unlike, teachers=settings.teachers)),
        needs=(*(name for name in method.needs if name not in settings.teachers), *settings.teachers),
    )


def unlike(recipe: Recipe, teachers: tuple[str, ...]) -> str:
    """A note where the run trains on crops or other colours, which no teacher has seen; else ""."""
    if any(store_file(path).augmented for path in recipe.data.features):
        return ""  # the student sees the teachers' views
    changed = in_words(replace(recipe.data.augment, flip=0.0))
    if changed == in_words(AugmentConfig()):
        return ""
    plural = "s" if len(teachers) > 1 else ""
    return (
        f"the teacher{plural} {', '.join(teachers)} saw whole images in their own colours, the run trains on others: "
        f"{changed}. The student is asked for what its image may not show: --augment.crop nearer 1 and no jitter agree "
        "with the stored features, and a lower --settings.reinforced.weight asks for less."
    )


class ReinforcedContrast(ScaledContrast):
    """Student and teachers agree which text of the batch belongs to an image, and which image to a text.

    The student's scale is that of the model's head, as in the paper; its features are unit vectors "vec".
    """

    def features(self, model: Model, batch: Batch, encoded: Encoded) -> tuple[Features, Features]:
        """Images as rows, times the head's scale; texts as columns; each with the features of every teacher.

        Features of examples that a transform mixed are zeros: no teacher has seen them, and the loss omits them.
        """
        rows = {"vec": encoded.images["vec"] * model.head.log_scale.exp()}
        columns = {"vec": encoded.texts["vec"]}
        plain = ~batch.composed[:, None]
        for name in self.settings.teachers:
            rows[f"image_features.{name}"] = batch.image_features[name] * plain
            columns[f"text_features.{name}"] = batch.text_features[name] * plain[batch.image_of_text]
        return rows, columns

    def loss(self, pairs: PairBlocks) -> Total:
        scales = cycle(self.settings.scales)
        return distillation(pairs, dict(zip(self.settings.teachers, scales, strict=False)))


def distillation(pairs: PairBlocks, teachers: dict[str, float]) -> Total:
    """KL divergence of the student's matches from the teachers': the mean over teachers, and of both directions.

    Image to text, a mean over images; text to image, a mean over texts. Images and texts without features of all
    teachers are omitted. Source: arXiv:2311.17049, section 3.3 (L_distill).

    Args: teachers: names of features, and scales of their cosines.
    """
    row_norms, column_norms = sums_of(pairs, lambda block: (list(_logits(block, teachers)), []))
    by_image, by_text = anchor_weights(pairs, "apart", row_norms)

    def loss(block: Pairs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        student, *others = _logits(block, teachers)
        seen = student > -torch.inf
        values, gradient = block.logits.new_zeros(len(student)), torch.zeros_like(student)
        for weight, norms in ((by_image, row_norms[:, rows, None]), (by_text, column_norms[:, None, columns])):
            of_student = student - norms[0]
            gradient += weight * of_student.exp()
            for teacher, norm in zip(others, norms[1:], strict=True):
                log = teacher - norm
                share = weight / len(others)
                values += share * torch.where(seen, log.exp() * (log - of_student), 0).sum(1)
                gradient -= share * log.exp()
        return values, torch.where(seen, gradient, 0)

    return summed(pairs, loss, pairs.shape[0])


def _logits(block: Pairs, teachers: dict[str, float]) -> Tensor:
    """Logits [1 + K, i, t] of the student and of every teacher; minus infinity where a teacher lacks features."""
    sides = [(block.images[f"image_features.{n}"], block.texts[f"text_features.{n}"]) for n in teachers]
    seen = torch.stack([image.any(1)[:, None] & text.any(1) for image, text in sides]).all(0)
    z = block.logits.detach()
    taught = [s * (image.to(z) @ text.to(z).T) for (image, text), s in zip(sides, teachers.values(), strict=True)]
    return torch.stack([z, *taught]).masked_fill(~seen, -torch.inf)


COMPONENTS = {
    "reinforced": Component("contrasts", "distillation from stored features of teachers", Reinforced, reinforced)
}
