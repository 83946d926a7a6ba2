"""Features as a `Matcher` takes them: as lists, and refused where they do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from kiloword.data.images.inputs import kind
from kiloword.types import Features


def rows_of(features: Features, gaussian: bool = False) -> Features:
    """Features of one item, "vec" [D], as features of a list of one. Args: gaussian: a variance is needed.

    Raises: ValueError for anything else.
    """
    vec: object = features.get("vec") if isinstance(features, dict) else features
    if not isinstance(vec, Tensor) or vec.ndim not in (1, 2) or not isinstance(features, dict):
        came = kind(vec) + (f" {list(vec.shape)}" if hasattr(vec, "shape") else "")
        raise ValueError(f'the "vec" of features is {came}: expected a tensor [D] or [N, D], as encode_image gives it.')
    if gaussian and "log_var" not in features:
        raise ValueError(
            'these features have no "log_var": their model is not Gaussian. Use a model of prolip, or of another '
            "method with +gaussian"
        )
    if gaussian and features["log_var"].shape != vec.shape:
        shapes = list(vec.shape), list(features["log_var"].shape)
        raise ValueError(f'got features "vec" {shapes[0]} and "log_var" {shapes[1]}: expected both [N, D]')
    return {name: value[None] for name, value in features.items()} if vec.ndim == 1 else features


def gaussians(a: Features, b: Features) -> tuple[Features, Features]:
    """As `rows_of`. Raises: ValueError for anything except features of one model with uncertainty."""
    a, b = rows_of(a, gaussian=True), rows_of(b, gaussian=True)
    check_widths(a, b)
    return a, b


@contextmanager
def naming_missing_features(images: Features, texts: Features) -> Iterator[None]:
    """Raises: ValueError where the score inside misses a feature that images or texts have not."""
    try:
        yield
    except KeyError as error:
        (name,) = error.args
        if name in images and name in texts:
            raise
        raise ValueError(
            f"the features lack {name!r}, which this model compares: pass all of encode_image or encode_text."
        ) from error


def finite(scores: Tensor) -> Tensor:
    """Scores [I, T], or of pairs [N], as they are. Raises: ValueError when any is NaN or infinite."""
    if not bool(scores.isfinite().all()):
        place = (~scores.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"the score of image {place[0]} with text {place[-1]} is {float(scores[tuple(place)])}: the model's "
            "weights are damaged, or diverged in training, or the features were computed by such a model."
        )
    return scores


def check_widths(a: Features, b: Features) -> None:
    """Raises: ValueError for features of two numbers of dimensions."""
    widths = [features["vec"].shape[-1] for features in (a, b)]
    if widths[0] != widths[1]:
        raise ValueError(f"got features of {widths[0]} and of {widths[1]} dimensions: expected features of one model")
