"""One step: a model and the losses of a method, and the exact gradient of one big batch from any micro-batches.

Several micro-batches take two passes. The first computes the features of all without a graph and the gradients of the
pair losses by these features. The second runs each again and backpropagates its share. (GradCache, arXiv:2101.06983.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.distributed.collectives import ranks, sum_over_ranks
from kiloword.distributed.device import PrecisionContext
from kiloword.losses.pairs import Blocks, PairInputs
from kiloword.methods.method import PAIR, Between, Contrast, Method, Weight
from kiloword.model.encoding import TEXTS, rows
from kiloword.model.heads import Head, Piece
from kiloword.model.image import grid
from kiloword.model.model import Model
from kiloword.model.pooling import AttentionalPool, at_least_float
from kiloword.model.resnet import check_vit
from kiloword.models.build import empty
from kiloword.randomness import uniform
from kiloword.training.engine import replicated
from kiloword.types import Batch, Encoded, Features, PairBlocks, Pairs, Positives, Rule, Total


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
        return sum(parts, inputs.rows["vec"].new_zeros(()))  # where nothing learns there are no parts


class MainContrast(Contrast):
    """The main pair loss of a method: images and texts as the towers encode them, scored by the head of the model."""

    def __init__(self, model: Model, method: Method) -> None:
        super().__init__()
        self.method, self.model = method, (model,)  # in a tuple: its weights are not those of this module
        self.mined: Tensor | None = None

    @property
    def head(self) -> Head:  # type: ignore[override]
        """The head of the model."""
        return self.model[0].head

    def inputs(self, model: Model, batch: Batch, encoded: Encoded) -> PairInputs:
        """Features of at least fp32, positions, precomputed features."""
        of, mineable = batch.image_of_text, ~batch.composed
        images = {k: at_least_float(v) for k, v in encoded.images.items()}
        texts = {k: at_least_float(v) for k, v in encoded.texts.items()}
        images |= {"position": batch.position, "mineable": mineable}
        texts |= {"position": batch.position[of], "mineable": mineable[of]}
        of_images = {f"image_features.{name}": value for name, value in batch.image_features.items()}
        constants = {f"text_features.{name}": value for name, value in batch.text_features.items()}
        return PairInputs(images | of_images, texts, constants | {name: value[of] for name, value in of_images.items()})

    def loss(self, pairs: PairBlocks) -> Total:
        """The pair loss of the method, with its positives of these pairs."""
        rule = self.method.positives
        bound = rule.bind(pairs) if isinstance(rule, Rule) else rule
        counted = _Counted(bound) if getattr(rule, "mined", False) else None
        total = self.method.pair_loss(pairs, counted or bound)
        if counted is not None:
            self.mined = counted.share()
        return total

    @torch.no_grad()
    def figures(self, inputs: PairInputs, total: Total) -> dict[str, Tensor]:
        """Shares of further figures: "mined_share", the share of pairs that match though the data does not annotate
        them; with transforms, loss by image and score of an image with its own texts, separately for plain and composed
        examples. Both losses are in the unit of "pair": their mean over all images is "pair". A value is NaN where the
        batch has no example of that kind.
        """
        shares = {} if self.mined is None else {"mined_share": self.mined}
        if not self.method.transforms or total.rows is None:
            return shares
        plain, order = inputs.rows["mineable"], inputs.rows["position"].argsort()
        of = order[torch.searchsorted(inputs.rows["position"], inputs.columns["position"], sorter=order)]
        images = sum_over_ranks(total.count.new_full((), float(len(plain))))
        by_image = total.rows * (images / sum_over_ranks(total.count))
        texts = torch.split(torch.arange(len(of), device=of.device), TEXTS)
        sides = ((rows(inputs.rows, of[t]), rows(inputs.columns, t)) for t in texts)
        scores = torch.cat([self.head.score_pairs(*pair) for pair in sides])
        sums, number = (scores.new_zeros(len(plain)).index_add(0, of, x) for x in (scores, torch.ones_like(scores)))
        own = sums / number
        for name, mask in (("plain", plain), ("composed", ~plain)):
            count = sum_over_ranks(mask.sum().to(own.dtype))
            shares[f"pair_{name}"] = (by_image * mask).sum() / count
            shares[f"score_{name}"] = (own * mask).sum() / count
        return shares


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
    return uniform(seeds, "drop patches", patches).argsort(stable=True)[:, :count].sort(1).values


class Learner(nn.Module):
    """Forward of one (micro-)batch: towers, head, pair losses and terms.

    Args: chunk: rows and columns of a block of pairs, 0: automatic; drop_patches: share of its patches that each image
    loses, drawn anew in every epoch (arXiv:2212.00794, section 3.1).
    Attributes: contrasts: every pair loss by name, the main one first, as "pair", unless its weight is 0; done: share
    of the run that is done, for the weights of losses that depend on it.
    """

    done = 0.0

    def __init__(self, model: Model, method: Method, chunk: int = 0, drop_patches: float = 0.0) -> None:
        super().__init__()
        self.model, self.method, self.chunk, self.drop_patches = model, method, chunk, drop_patches
        if drop_patches:
            check_vit(model.config.image, "--augment.drop-patches")
        self.terms = nn.ModuleDict({name: make(model.config) for name, (_, make) in method.terms.items()})
        self.contrasts = nn.ModuleDict({PAIR: MainContrast(model, method)} if method.pair_weight else {})
        self.contrasts.update({name: make(model.config) for name, (_, make) in method.contrasts.items()})
        if method.pair_weight == 0:
            model.head.requires_grad_(False)
            for part in model.head.modules():
                if isinstance(part, AttentionalPool):
                    part.requires_grad_()  # the captioning term reads images through it

    def clamp_(self) -> None:
        """Clamp the scales of the head and of the contrasts to their limits, after each optimizer step."""
        for head in (self.model.head, *(contrast.head for contrast in self.contrasts.values())):
            head.clamp_()  # type: ignore[operator]

    def after_step(self, step: int) -> None:
        """Let every part change what has no gradient. Args: step: number of steps done, 0 before the first."""
        for part in self.modules():
            if isinstance(part, Piece):
                part.after_step(self.model, step, self.done)

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
        """Run both towers, on all patches or on those that images keep."""
        keep = kept(batch.seeds, grid(self.model.config.image) ** 2, self.drop_patches) if self.drop_patches else None
        image_tokens, images = self.model.encode_image(batch.images, keep)
        text_tokens, texts = self.model.encode_text(batch.texts)
        return Encoded(image_tokens, text_tokens, images, texts, done=self.done)

    def inputs(self, batch: Batch, encoded: Encoded) -> dict[str, PairInputs]:
        """What every pair loss takes."""
        weights = self.weights()
        losses = {name: loss for name, loss in self.contrasts.items() if name in weights}
        return {name: loss.inputs(self.model, batch, encoded) for name, loss in losses.items()}  # type: ignore[operator]

    def pair_losses(self, inputs: dict[str, PairInputs]) -> dict[str, Tensor]:
        """Shares of every pair loss, and of the figures logged with them: their sums over ranks are the values."""
        out: dict[str, Tensor] = {}
        for name, mine in inputs.items():
            contrast: Any = self.contrasts[name]
            with torch.autocast(self.model.device.type, enabled=False):
                pairs = Blocks(contrast.head, mine.rows, mine.gathered(), self.chunk)
                total = contrast.loss(pairs)
                if not isinstance(total, Total):
                    raise ValueError(
                        f"the loss {name} returned a {type(total).__name__}: expected kiloword.types.Total(sum, count)."
                    )
                total.rows = pairs.rows if total.rows is None else total.rows
                out[name] = total.sum / sum_over_ranks(total.count)
                out |= contrast.figures(mine, total)
        return out

    def counts(self, batches: list[Batch]) -> dict[str, Tensor]:
        """Divisors of the terms' sums, summed over micro-batches and ranks."""
        if not self.terms:
            return {}
        local = torch.zeros(len(self.terms), dtype=torch.float64, device=batches[0].position.device)
        for of_term, term in zip(local, self.terms.values(), strict=True):
            for batch in batches:
                of_term += term.count(batch)  # type: ignore[operator]
        return dict(zip(self.terms, sum_over_ranks(local), strict=True))

    def weights(self) -> dict[str, float]:
        """The weight of every loss that is computed at this point of the run."""
        method = self.method
        every: dict[str, Weight] = {PAIR: method.pair_weight} if PAIR in self.contrasts else {}
        every |= {name: weight for name, (weight, _) in (*method.terms.items(), *method.contrasts.items())}
        now = {name: weight(self.done) if callable(weight) else weight for name, weight in every.items()}
        return {name: weight for name, weight in now.items() if weight or not isinstance(every[name], Between)}

    def forward(
        self, batch: Batch, counts: dict[str, Tensor], replays: dict[str, Replay] | None = None
    ) -> dict[str, Tensor]:
        """Shares of the losses, by name, and "loss", whose gradients the reducer averages.

        With `replays`, pair losses are the surrogates whose gradients are those computed in the first pass.
        """
        batch = self.above_trunks(batch)
        encoded = self.encode(batch)
        inputs, weights = self.inputs(batch, encoded), self.weights()
        out = {
            name: Total(term(self.model, batch, encoded), counts[name]).sum / counts[name].clamp_min(1)
            for name, term in self.terms.items()
            if name in weights
        }
        if replays is None:
            out |= self.pair_losses(inputs)
        else:
            out |= {name: replay.surrogate(inputs[name]) for name, replay in replays.items()}
        out["loss"] = torch.stack([weight * out[name] for name, weight in weights.items()]).sum() * ranks()
        return out


def learner_of(config: ModelConfig, method: Method, device: str = "meta") -> Learner:
    """The learner of a method with uninitialised parameters; on torch's meta device: shapes without storage."""
    with torch.device(device):
        return Learner(empty(config, method), method)


def backward(
    learner: Learner, micro: list[Batch], precision: PrecisionContext = nullcontext, reducer: nn.Module | None = None
) -> dict[str, Tensor]:
    """Compute the gradient of the mean loss over the `micro` of all ranks; it is added to the parameters' `grad`.

    Args: micro: this rank's share of the batch as one or more micro-batches; precision: a context for the towers
    (autocast); reducer: `engine.replicated(learner)`, to reuse over many steps.
    Returns: mean losses over the global batch, detached: "loss", "pair" and every term.
    """
    reducer = replicated(learner) if reducer is None else reducer
    counts = learner.counts(micro)
    totals: dict[str, Tensor] = {}
    replays: Sequence[dict[str, Replay] | None] = [None] * len(micro)
    if len(micro) > 1 and learner.contrasts:
        totals, replays = _pair_gradients(learner, micro, precision)
    reports = []
    for n, (batch, replay) in enumerate(zip(micro, replays, strict=True), 1):
        reducer.require_backward_grad_sync = n == len(micro)  # type: ignore[assignment]  # read by DDP
        with precision():
            out = reducer(batch, counts, replay)
        out.pop("loss").backward()
        reports.append({name: value.detach() for name, value in out.items()})
    shares = {name: torch.stack([report[name] for report in reports]).sum() for name in reports[0]} | totals
    means = dict(zip(shares, sum_over_ranks(torch.stack(list(shares.values()))), strict=True))
    loss = torch.stack([weight * means[name] for name, weight in learner.weights().items()]).sum()
    return {**means, "loss": loss}


def _pair_gradients(
    learner: Learner, micro: list[Batch], precision: PrecisionContext
) -> tuple[dict[str, Tensor], list[dict[str, Replay]]]:
    """The pair losses (and metrics reported with them) over all micro-batches, and the gradients each one replays."""
    with torch.no_grad(), precision():
        parts = [learner.inputs(b, learner.encode(b)) for b in map(learner.above_trunks, micro)]
    joined = {name: PairInputs.join([part[name] for part in parts]) for name in parts[0]}
    losses = learner.pair_losses(joined)
    replays: list[dict[str, Replay]] = [{} for _ in micro]
    for name, inputs in joined.items():
        weights = [p for p in learner.contrasts[name].head.parameters() if p.requires_grad]  # type: ignore[union-attr]
        each = _replays(losses[name], inputs, weights, [part[name] for part in parts])
        for replayed, replay in zip(replays, each, strict=True):
            replayed[name] = replay
    return {name: value.detach() for name, value in losses.items()}, replays


def _replays(loss: Tensor, joined: PairInputs, weights: Sequence[Tensor], parts: list[PairInputs]) -> Iterator[Replay]:
    """The gradients of one pair loss for every micro-batch. Args: weights: of its head."""
    floats = [[k for k, v in f.items() if v.requires_grad] for f in (joined.rows, joined.columns)]
    leaves = [joined.rows[k] for k in floats[0]] + [joined.columns[k] for k in floats[1]]
    gradients = torch.autograd.grad(loss, [*leaves, *weights], allow_unused=True)
    by_row = dict(zip(floats[0], gradients, strict=False))
    by_column = dict(zip(floats[1], gradients[len(floats[0]) :], strict=False))
    by_weight = [(p, g / len(parts)) for p, g in zip(weights, gradients[len(leaves) :], strict=True) if g is not None]
    rows = _split(by_row, [len(part.rows["vec"]) for part in parts])
    columns = _split(by_column, [len(part.columns["vec"]) for part in parts])
    return (Replay(i, t, by_weight) for i, t in zip(rows, columns, strict=True))


def _split(gradients: Mapping[str, Tensor | None], sizes: list[int]) -> list[Features]:
    """Rows of every gradient for each micro-batch; features that the score did not use are omitted."""
    rows = {k: torch.split(g, sizes) for k, g in gradients.items() if g is not None}
    return [{k: parts[n] for k, parts in rows.items()} for n in range(len(sizes))]
