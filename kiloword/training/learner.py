"""The learner: a model and a method's slots -> dict of losses. It is the one module that is wrapped for parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.distributed.collectives import ranks, sum_over_ranks
from kiloword.losses.inputs import PairInputs
from kiloword.losses.pairs import Blocks
from kiloword.methods.method import Between, Method, Weight, weight_at
from kiloword.model.image import grid
from kiloword.model.model import Model
from kiloword.model.pooling import AttentionalPool, at_least_float
from kiloword.model.resnet import check_vit
from kiloword.randomness import uniform
from kiloword.types import Batch, Encoded, Features, Pairs, Positives, Total


@dataclass
class Replay:
    """Gradients of a pair loss for one micro-batch, replayed through its second forward pass."""

    images: Features
    texts: Features
    weights: list[tuple[Tensor, Tensor]]  # head parameters and this micro-batch's share of their gradient

    def surrogate(self, inputs: PairInputs) -> Tensor:
        """A scalar whose gradient is the replayed gradient."""
        sides = (inputs.rows, self.images), (inputs.columns, self.texts)
        by_features = [(f[k] * g).sum() for f, gs in sides for k, g in gs.items()]
        parts = [*by_features, *((p * g).sum() for p, g in self.weights)]
        return torch.stack(parts).sum() if parts else inputs.rows["vec"].new_zeros(())


PAIR = "pair"  # the name of the main pair loss


class _Counted:
    """Positives that count the pairs which match without being annotated; a loss may visit blocks repeatedly."""

    def __init__(self, positives: Positives) -> None:
        self.positives, self.pairs = positives, 0
        self.mined: Tensor | float = 0.0

    def __call__(self, pairs: Pairs) -> Tensor:
        matches = self.positives(pairs)
        self.mined = self.mined + ((matches > 0) & ~pairs.annotated).sum().double()
        self.pairs += matches.numel()
        return matches

    def share(self) -> Tensor:
        """This rank's part of the share of mined pairs among all pairs; the sum over ranks is the share."""
        mined = torch.as_tensor(self.mined)
        return mined / sum_over_ranks(mined.new_full((), float(self.pairs)))


def kept(seeds: Tensor, patches: int, share: float) -> Tensor:
    """The patches that images keep when they lose `share` of them, at least one: [I, k] int64, ascending."""
    count = max(1, round(patches * (1 - share)))
    return uniform(seeds, "drop patches", patches).argsort(dim=1, stable=True)[:, :count].sort(1).values


class Learner(nn.Module):
    """Forward of one (micro-)batch: towers, head, pair loss, contrasts and terms.

    Args: chunk: rows and columns of a block of pairs, 0: automatic; drop_patches: share of its patches that each image
    loses, drawn anew in every epoch (arXiv:2212.00794, section 3.1).
    Attributes: done: share of the run that is done, for the weights of losses that depend on it.
    """

    done = 0.0

    def __init__(self, model: Model, method: Method, chunk: int = 0, drop_patches: float = 0.0) -> None:
        super().__init__()
        self.model, self.method, self.chunk, self.drop_patches = model, method, chunk, drop_patches
        if drop_patches:
            check_vit(model.config.image, "--augment.drop-patches")
        self.terms = _modules("term", method.terms, model.config)
        self.contrasts = _modules("contrast", method.contrasts, model.config)
        if method.pair_weight == 0:
            model.head.requires_grad_(False)
            for part in model.head.modules():
                if isinstance(part, AttentionalPool):
                    part.requires_grad_()  # the captioning term reads images through it

    def clamp_(self) -> None:
        """Clamp the scales of the head and of the contrasts to their limits, after each optimizer step."""
        for head in (self.model.head, *(contrast.head for contrast in self.contrasts.values())):
            head.clamp_()  # type: ignore[operator]

    def above_trunks(self, batch: Batch) -> Batch:
        """The batch with tokens of the trunks: for its images, and beside the ids of its texts; else the same batch.

        A trunk runs once, however often a term encodes images or texts again: its masks are then places of the tokens.
        """
        model, images, texts = self.model, batch.images, batch.texts
        if model.config.image.trunk.name and images.dtype == torch.uint8:
            images = model.image_trunk(images)
        if model.config.text.trunk.name:
            texts = model.with_tokens(texts)
        if images is batch.images and texts is batch.texts:
            return batch
        above = replace(batch, images=images, texts=texts)
        above.before_move = batch.before_move
        return above

    def encode(self, batch: Batch) -> Encoded:
        """Run the towers, on all patches or on those that images keep."""
        keep = kept(batch.seeds, grid(self.model.config.image) ** 2, self.drop_patches) if self.drop_patches else None
        encoded = self.method.encode(self.model, batch, keep)
        encoded.done = self.done
        return encoded

    def pair_inputs(self, encoded: Encoded, batch: Batch) -> PairInputs:
        """What the main pair loss takes: features of at least fp32, positions, precomputed features."""
        of, mineable = batch.image_of_text, ~batch.composed
        images = {k: at_least_float(v) for k, v in encoded.images.items()}
        texts = {k: at_least_float(v) for k, v in encoded.texts.items()}
        images |= {"position": batch.position, "mineable": mineable}
        texts |= {"position": batch.position[of], "mineable": mineable[of]}
        images |= {f"image_features.{name}": value for name, value in batch.image_features.items()}
        constants = {f"text_features.{name}": value for name, value in batch.text_features.items()}
        return PairInputs(images, texts, constants, of)

    def all_inputs(self, encoded: Encoded, batch: Batch) -> dict[str, PairInputs]:
        """What every pair loss takes: "pair", the main one, and the contrasts."""
        inputs = {PAIR: self.pair_inputs(encoded, batch)}
        for name, contrast in self.contrasts.items():
            sides = contrast.features(self.model, batch, encoded)  # type: ignore[operator]
            rows, columns = (_placed(side, batch, name) for side in sides)
            inputs[name] = PairInputs(rows, columns)
        return inputs

    def pair_losses(self, inputs: dict[str, PairInputs]) -> dict[str, Tensor]:
        """Shares of the main pair loss, as `pair_loss` returns them, and of every contrast."""
        out = self.pair_loss(inputs[PAIR])
        for name, contrast in self.contrasts.items():
            with torch.autocast(self.model.device.type, enabled=False):
                pairs = Blocks(contrast.head, inputs[name].rows, inputs[name].gathered(), self.chunk)  # type: ignore[arg-type]
                total = _total(contrast.loss(pairs), f"the contrast {name}")  # type: ignore[operator]
                out[name] = total.sum / sum_over_ranks(total.count)
        return out

    def pair_loss(self, inputs: PairInputs) -> dict[str, Tensor]:
        """Shares whose sums over ranks are the values: "pair", the mean pair loss; with transforms also `_apart`'s.

        With mined positives also "mined_share": the share of pairs that match though the data does not annotate them.
        """
        images = inputs.rows
        if self.method.pair_weight == 0:
            return {"pair": images["vec"].new_zeros(())}
        with torch.autocast(images["vec"].device.type, enabled=False):
            pairs = Blocks(self.model.head, images, inputs.gathered(), self.chunk)
            positives = self.method.positives
            positives = positives.bind(pairs) if hasattr(positives, "bind") else positives
            counted = _Counted(positives) if getattr(self.method.positives, "mined", False) else None
            total = _total(self.method.pair_loss(pairs, counted or positives), "the pair loss")
            shares = {"pair": total.sum / sum_over_ranks(total.count)}
            if counted is not None:
                shares["mined_share"] = counted.share()
            if self.method.transforms:
                shares |= self._apart(pairs, total, images["mineable"])
        return shares

    @torch.no_grad()
    def _apart(self, pairs: Blocks, total: Total, plain: Tensor) -> dict[str, Tensor]:
        """Loss by image and score of an image with its own texts, separately for plain and composed examples.

        Args: plain: bool [I]. Both losses are in the unit of "pair": their mean over all images is "pair". A value is
        NaN where the batch has no example of that kind.
        """
        images = sum_over_ranks(total.count.new_full((), float(len(plain))))
        by_image = (pairs.rows if total.rows is None else total.rows) * (images / sum_over_ranks(total.count))
        own_scores = self.model.head.score_of(pairs.annotated_sum / pairs.annotated_count)
        shares = {}
        for name, mask in (("plain", plain), ("composed", ~plain)):
            count = sum_over_ranks(mask.sum().to(own_scores.dtype))
            shares[f"pair_{name}"] = (by_image * mask).sum() / count
            shares[f"score_{name}"] = (own_scores * mask).sum() / count
        return shares

    def counts(self, batches: list[Batch]) -> dict[str, Tensor]:
        """Divisors of the terms' sums, summed over micro-batches and ranks."""
        if not self.terms:
            return {}
        local = torch.stack(
            [torch.stack([_count(term, name, b) for b in batches]).sum() for name, term in self.terms.items()]
        )
        return dict(zip(self.terms, sum_over_ranks(local), strict=True))

    def weights(self) -> dict[str, float]:
        """The weight of every loss that is computed at this point of the run: "pair", the terms, the contrasts."""
        method = self.method
        every: dict[str, Weight] = {PAIR: method.pair_weight}
        every |= {name: weight for name, (weight, _) in (*method.terms.items(), *method.contrasts.items())}
        outside = self._outside()
        return {name: weight_at(weight, self.done) for name, weight in every.items() if name not in outside}

    def _outside(self) -> set[str]:
        """The terms whose window the run is not in: they have no weight, and are not computed."""
        weights = ((name, weight) for name, (weight, _) in self.method.terms.items())
        return {name for name, weight in weights if isinstance(weight, Between) and not weight(self.done)}

    def forward(
        self, batch: Batch, counts: dict[str, Tensor], replays: dict[str, Replay] | None = None
    ) -> dict[str, Tensor]:
        """Shares of the losses: "pair", terms and contrasts, and "loss", whose gradients the reducer averages.

        With `replays`, pair losses are the surrogates whose gradients are those computed in the first pass.
        """
        batch = self.above_trunks(batch)
        encoded = self.encode(batch)
        inputs = self.all_inputs(encoded, batch)
        outside = self._outside()
        terms = {name: term for name, term in self.terms.items() if name not in outside}
        out = {name: term(self.model, batch, encoded) / counts[name].clamp_min(1) for name, term in terms.items()}
        if replays is None:
            out |= self.pair_losses(inputs)
        else:
            out |= {name: replay.surrogate(inputs[name]) for name, replay in replays.items()}
        out["loss"] = torch.stack([weight * out[name] for name, weight in self.weights().items()]).sum() * ranks()
        return out


MEMBERS = {"term": ("count",), "contrast": ("head", "features", "loss")}  # of each kind of further losses


def _modules(
    kind: str, losses: Mapping[str, tuple[Weight, Callable[[ModelConfig], nn.Module]]], config: ModelConfig
) -> nn.ModuleDict:
    """The modules of a method's terms or contrasts. Raises: ValueError for what is none, or lacks a member."""
    made = {name: make(config) for name, (_, make) in losses.items()}
    for name, loss in made.items():
        of = f"the {kind} {name} is made as a {type(loss).__name__}"
        if not isinstance(loss, nn.Module):
            raise ValueError(f"{of}: expected a torch.nn.Module.")
        if lacking := [member for member in MEMBERS[kind] if not hasattr(loss, member)]:
            raise ValueError(f"{of} without {', '.join(lacking)}: see {kind.capitalize()} of kiloword.methods.method.")
    return nn.ModuleDict(made)


def _count(term: nn.Module, name: str, batch: Batch) -> Tensor:
    """The count of a term, in double precision. Raises: ValueError for a number that is no tensor."""
    count = term.count(batch)  # type: ignore[operator]
    if not isinstance(count, Tensor):
        raise ValueError(
            f"the count of the term {name} is of type {type(count).__name__}: expected a scalar tensor on the device "
            "of the batch, such as batch.position.new_full((), len(batch))."
        )
    return count.to(torch.float64)


def _total(made: Any, what: str) -> Total:
    """What a pair loss returned. Raises: ValueError for anything but a total."""
    if not isinstance(made, Total):
        raise ValueError(f"{what} returned a {type(made).__name__}: expected kiloword.types.Total(sum, count).")
    return made


def _placed(features: Features, batch: Batch, name: str) -> Features:
    """Features of a contrast's side as its loss takes them: at least fp32, with the position of each image.

    Raises: ValueError where "vec" is missing, or "position" and it cannot be told from the number of rows.
    """
    if "vec" not in features:
        raise ValueError(
            f"the contrast {name} returned features {sorted(features)} for a side: 'vec' [N, D] is missing."
        )
    placed = {k: at_least_float(v) for k, v in features.items()}
    if "position" in placed:
        return placed
    n = len(placed["vec"])
    if n == len(batch):
        return placed | {"position": batch.position}
    if n == len(batch.texts):
        return placed | {"position": batch.position[batch.image_of_text]}
    raise ValueError(
        f"the contrast {name} returned {n} features, neither one for each of {len(batch)} images nor for each of "
        f"{len(batch.texts)} texts: add 'position' [{n}], the place of each one's image in the global batch."
    )


def learner_of(config: ModelConfig, method: Method, device: str = "meta") -> Learner:
    """The learner of a method with uninitialised parameters; on torch's meta device: shapes without storage."""
    with torch.device(device):
        shaped = method.shape(config)
        model = Model(shaped, method.head(shaped), {name: make(shaped) for name, make in method.towers.items()})
        return Learner(model, method)
