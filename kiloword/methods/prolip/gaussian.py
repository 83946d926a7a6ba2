"""Features as Gaussians: distance and inclusion of pairs, and the uncertainty of a head.

No tensor `[I, T, D]` is made. Source: arXiv:2410.18857.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import DEPTH, ModelConfig
from kiloword.config.settings import BaseSettings, setting
from kiloword.model.blocks import Init
from kiloword.model.heads import Pooling, Uncertainty, shares
from kiloword.model.image import extra
from kiloword.model.pooling import at_least_float, place_from_end
from kiloword.types import Features, Texts

Form = Literal["paper", "exact"]
LN2 = math.log(2)
CELLS = 2**18  # pairs x dimensions per block of inclusions: fits in a cache


def rows(features: Features, which: Tensor) -> Features:
    """The Gaussians of the rows at indices [n]: "vec" and "log_var" [n, D]."""
    return {name: features[name].index_select(0, which) for name in ("vec", "log_var")}


def variance_sum(features: Features) -> Tensor:
    """Uncertainty of N images or texts: the trace of each covariance, [N]."""
    return at_least_float(features["log_var"]).exp().sum(-1)


def csd(a: Features, b: Features) -> Tensor:
    """Closed-form sampled distance of N pairs, the expected squared distance of their samples: [N].

    Source: eq. 1.
    """
    return _gap(a, b)[0].square().sum(-1) + variance_sum(a) + variance_sum(b)


def log_inclusion(a: Features, b: Features, eps: float = 0.0, form: Form = "paper") -> Tensor:
    """Log of the integral of p_a^2 p_b without its constants, per dimension of N pairs: [N, D].

    B^2 / 4A - C of eq. 3 cancels catastrophically; the equal -d^2 / (v_a + 2 v_b) does not.

    Args: eps: in log space, added to -log var inside A, B and C; form: "paper", eq. 3 as printed; "exact", the
    integral (eq. 3 counts the log variance of the normalisers twice, the integral once).
    """
    gap, log_a, log_b = _gap(a, b)
    log_A = eps + torch.logaddexp(-log_a, -log_b - LN2)
    exponent = gap.square() * (eps - torch.logaddexp(log_a, log_b + LN2)).exp()
    normalisers = 2 * log_a + log_b if form == "paper" else log_a + 0.5 * log_b
    return -normalisers - 0.5 * log_A - exponent


def inclusion(a: Features, b: Features, eps: float = 0.0, form: Form = "paper") -> Tensor:
    """H(a in b) = inc(a, b) - inc(b, a) per dimension of N pairs, positive where a is the narrower: [N, D].

    With u = log var_b - log var_a and t = tanh(u / 2) = (var_b - var_a) / (var_b + var_a),
    H = k u - atanh(t / 3) + d^2 e^eps / (var_a + var_b) * 4 t / (9 - t^2), k = 1 (paper) or 1/2 (exact). All three
    summands have the sign of u and none is a difference of large numbers, so the relative error is of the order of
    rounding. The sign in each dimension depends on u alone, and distance increases |H|; check the overlap too.
    Source: eq. 4.
    """
    gap, log_a, log_b = _gap(a, b)
    u = log_b - log_a
    t = torch.tanh(0.5 * u)
    # 1 / (var_a + var_b) relative to the larger: no overflow, and large logarithms are rounded once
    narrow = (gap * (0.5 * (eps - torch.maximum(log_a, log_b))).exp()).square() / (1 + (-u.abs()).exp())
    return (1.0 if form == "paper" else 0.5) * u - torch.atanh(t / 3) + narrow * (4 * t / (9 - t.square()))


def csd_matrix(a: Features, b: Features) -> Tensor:
    """`csd` of every a with every b, by one matmul: [N_a, N_b]."""
    x, y = at_least_float(a["vec"]), at_least_float(b["vec"])
    with torch.autocast(x.device.type, enabled=False):
        distance = x.square().sum(-1)[:, None] + y.square().sum(-1) - 2 * x @ y.T
    return distance.clamp_min(0) + variance_sum(a)[:, None] + variance_sum(b)


def inclusion_matrix(a: Features, b: Features, form: Form = "paper") -> Tensor:
    """H(a in b) of every a with every b, summed over dimensions: [N_a, N_b].

    H is not separable, so pairs are computed in blocks; [N_a, N_b, D] is never held.
    """
    step = max(1, int((CELLS / a["vec"].shape[1]) ** 0.5))
    rows, columns = (
        [
            {"vec": vec.unsqueeze(axis), "log_var": log_var.unsqueeze(axis)}
            for vec, log_var in zip(*(torch.split(part[name], step) for name in ("vec", "log_var")), strict=True)
        ]
        for part, axis in ((a, 1), (b, 0))
    )
    return torch.cat([torch.cat([inclusion(x, y, form=form).sum(-1) for y in columns], 1) for x in rows])


def _gap(a: Features, b: Features) -> tuple[Tensor, Tensor, Tensor]:
    """Difference of means and both log variances, [N, D], at least single precision."""
    gap = at_least_float(a["vec"]) - at_least_float(b["vec"])
    return gap, at_least_float(a["log_var"]), at_least_float(b["log_var"])


def inclusion_loss(
    a: Features, b: Features, eps: float, c: float, form: Form, reduction: Literal["per_dimension", "joint"]
) -> Tensor:
    """-log sigmoid(c H(a in b)) of N pairs: [N].

    Args: c: sharpness; the paper uses eps -20 and c 1000, its authors later recommend -10 and 10. reduction:
    "per_dimension", mean of the losses of all dimensions (the authors' code); "joint", loss of the sum of H (eq. 5).
    """
    h = inclusion(a, b, eps, form)
    return F.softplus(-c * h.sum(-1)) if reduction == "joint" else F.softplus(-c * h).mean(-1)


def vib(features: Features, form: Literal["textbook", "released"] = "textbook") -> Tensor:
    """KL divergence to N(0, 1), mean over dimensions: [N].

    Args: form: "released", as in the authors' code: log sigma in place of the log variance, in the exponential too.
    """
    mean, log_var = at_least_float(features["vec"]), at_least_float(features["log_var"])
    spread = log_var if form == "textbook" else 0.5 * log_var
    return -0.5 * (1 + spread - mean.square() - spread.exp()).mean(-1)


@dataclass(frozen=True, kw_only=True)
class GaussianSettings(BaseSettings):
    """Initial variance, and how variances of prompts are combined."""

    log_var: float = setting(-10.0, "initial log variance", -50, 50)
    variance_blocks: int = setting(
        0, "blocks of each tower, beside its last ones, for the variance: PCME++'s; 0: an uncertainty token", 0, DEPTH
    )
    ensemble: Literal["mean", "of_average"] = setting("mean", "variance of a class of N prompts: sum / N, or sum / N^2")


def log_variance(layer: nn.Linear, tokens: Tensor) -> Tensor:
    """[N, W] -> [N, D], at least single precision: near the bias of -10, bfloat16 has steps of 1/16."""
    return at_least_float(F.linear(tokens, layer.weight)) + at_least_float(layer.bias)


class Gaussian(Uncertainty):
    """Diagonal Gaussians: log variance from an uncertainty token by one linear layer per tower (section 3.1).

    A tower of another library that is used whole gives one vector, which is read in place of the token. A causal text
    tower needs no class token: its end token attends to all words, and not to [UNC]. With `variance_blocks` no token
    attends to [UNC], which is only a place of the output: that of a second path through copies of the last blocks
    (PCME++, arXiv:2305.18171, its public code).
    """

    @staticmethod
    def towers(config: ModelConfig, settings: GaussianSettings) -> ModelConfig:
        text, beside = config.text, settings.variance_blocks
        if config.image.trunk.whole and not beside:
            return config
        cls = "cls" in text.extra_tokens or (config.head.text_pool == "last" and not text.causal)
        text = replace(text, extra_tokens=("unc", "cls") if cls else ("unc",), uncertainty_blocks=beside)
        image = replace(config.image, uncertainty_token=True, uncertainty_blocks=beside)
        return replace(config, image=image, text=text)

    def __init__(self, config: ModelConfig, settings: GaussianSettings) -> None:
        super().__init__()
        self.settings = settings
        self.image_place = extra(config.image) - 1
        self.text_place = place_from_end(config.text, "unc")
        self.image_log_var = nn.Linear(config.image.width, config.head.dim)
        self.text_log_var = nn.Linear(config.text.width, config.head.dim)

    def image(self, tokens: Tensor, pooling: Pooling) -> Features:
        """[I, E + P, W] -> "log_var" [I, D]."""
        return {"log_var": log_variance(self.image_log_var, tokens[:, self.image_place])}

    def text(self, tokens: Tensor, texts: Texts, pooling: Pooling) -> Features:
        """Packed [S, W] -> "log_var" [T, D]."""
        unc = tokens.index_select(0, texts.starts[1:] - self.text_place)
        return {"log_var": log_variance(self.text_log_var, unc)}

    def penalty(self, features: Features) -> Tensor:
        """[N]: half the trace, so that similarity minus both penalties is 1 - CSD / 2 (eq. A.1)."""
        return 0.5 * variance_sum(features)

    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None) -> Features:
        """Log variance of each class [n, D]: with weights p of its prompts that sum to 1, of sum p var ("mean") or
        of sum p^2 var ("of_average"). Source: section 4.2.
        """
        log_var = at_least_float(texts["log_var"])
        var = log_var.double().exp()  # a variance can underflow or overflow single precision
        share = shares(var, group, n, weights)
        share = share.square() if self.settings.ensemble == "of_average" else share
        summed = var.new_zeros(n, var.shape[1]).index_add(0, group, share[:, None] * var)
        return {"log_var": summed.log().to(log_var)}

    def initial(self) -> dict[str, Init]:
        return {f"{name}.bias": Init(self.settings.log_var) for name, _ in self.named_children()}
