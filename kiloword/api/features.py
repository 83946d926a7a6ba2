"""Features as a `Matcher` takes them: as lists, and refused where they do not fit."""

from __future__ import annotations

from torch import Tensor

from kiloword.types import Features


def rows_of(features: Features, gaussian: bool = False) -> Features:
    """Features of one item, "vec" [D], as features of a list of one. Args: gaussian: a variance is needed.

    Raises: ValueError for anything else.
    """
    vec = features.get("vec") if isinstance(features, dict) else None
    if not isinstance(vec, Tensor) or vec.ndim not in (1, 2):
        raise ValueError('features need a "vec", a tensor [D] or [N, D], as encode_image gives it.')
    if gaussian and ("log_var" not in features or features["log_var"].shape != vec.shape):
        raise ValueError(
            'these features have no "log_var": their model is not Gaussian. Use prolip, or another method '
            "with +gaussian, and all features of one item or list."
        )
    return {name: value[None] for name, value in features.items()} if vec.ndim == 1 else features


def both(a: Features, b: Features, gaussian: bool = False) -> tuple[Features, Features]:
    """As `rows_of`. Raises: ValueError for features of two numbers of dimensions, too."""
    a, b = rows_of(a, gaussian), rows_of(b, gaussian)
    if (one := a["vec"].shape[1]) != (other := b["vec"].shape[1]):
        raise ValueError(f"got features of {one} and of {other} dimensions: expected features of one model.")
    return a, b


def finite(scores: Tensor) -> Tensor:
    """Scores [I, T], or of pairs [N], as they are. Raises: ValueError when any is NaN or infinite."""
    if not bool(scores.isfinite().all()):
        place = (~scores.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"the score of image {place[0]} with text {place[-1]} is {float(scores[tuple(place)])}: the model's "
            "weights are damaged, or diverged in training, or the features were computed by such a model."
        )
    return scores
