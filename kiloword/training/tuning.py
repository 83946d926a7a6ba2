"""Tuning of pretrained towers: which blocks are frozen, for how long, and at which share of the learning rate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.tensor import DTensor

from kiloword.config.recipes import Recipe
from kiloword.errors import refuse
from kiloword.model import adapters
from kiloword.model.adapters import MARK
from kiloword.model.blocks import depths, layers_of, trunk_layers
from kiloword.model.model import Model
from kiloword.models.tensors import open_tensors
from kiloword.training.optimizer import Optimizer
from kiloword.training.step import Learner

TOWERS = ("image", "text")
SPEC = re.compile(r"(image|text)(?::(?:(trunk)|(\d{1,9})(?:-(\d{1,9}))?))?")


def frozen(recipe: Recipe) -> tuple[str, ...]:
    """What a recipe freezes, as `--freeze`; where it says nothing, the trunks of its towers.

    ("none",): nothing; (): only what `adapt` freezes.
    """
    trunks = tuple(f"{tower}:trunk" for tower in _trunks(recipe))
    return recipe.freeze or trunks or (() if recipe.lora.rank else ("none",))


def _trunks(recipe: Recipe) -> list[str]:
    return [tower for tower in TOWERS if (trunk := getattr(recipe.model, tower).trunk).name and not trunk.whole]


def check(recipe: Recipe) -> None:
    """Raises: ValueError for settings of freezing and of LoRA that contradict each other."""
    specs, shares, lora = frozen(recipe), recipe.unfreeze, recipe.lora
    wrong = {
        "--freeze none excludes others": "none" in specs and len(specs) > 1,
        "--unfreeze needs frozen blocks, which --freeze names": shares and specs == ("none",),
        "--unfreeze is one share of the steps, or two, the first not above the second": len(shares) > 2
        or list(shares) != sorted(shares),
        "--lora.rank freezes the towers that it adapts: omit --freeze none and --unfreeze": lora.rank
        and ("none" in recipe.freeze or shares),
        "--lora.save apart saves what a run changes of a model: it needs --init MODEL": lora.rank
        and lora.save == "apart"
        and recipe.init is None,
    }
    refuse(wrong)


def reason(recipe: Recipe) -> str:
    """Defaults that hold for the trunks of a recipe, and why, in sentences; "" without trunks."""
    specs, lora, trunks, messages = set(frozen(recipe)), recipe.lora.rank, _trunks(recipe), list[str]()
    if trunks and not recipe.freeze:
        thaw = "--freeze none trains all, --unfreeze 0.3 from that share of the steps on."
        messages.append(
            "Trunks are frozen by default: their features are pretrained, the layers above are not, and large first "
            f"gradients would spoil them. {'LoRA trains its adapters alone in them.' if lora else thaw}"
        )
    if not lora and any(recipe.unfreeze or not {tower, f"{tower}:trunk"} & specs for tower in trunks):
        messages.append(
            f"Trunks are trained by AdamW at {recipe.optim.trunk_lr:g} of its learning rate (--optim.trunk-lr): they "
            "are pretrained."
        )
    return " ".join(messages)


def _members(learner: Learner, recipe: Recipe) -> dict[str, tuple[str, int]]:
    """Frozen parameters by name, with their tower and block. Raises: ValueError for a block that is not there."""
    named: dict[str, tuple[str, int]] = {}
    for spec in frozen(recipe):
        if spec == "none":
            continue
        match = SPEC.fullmatch(spec)
        if match is None:
            raise ValueError(
                f"--freeze {spec}: expected none, image, text, image:trunk, image:3, image:0-8, text:3, ..."
            )
        tower, trunk, first, last = match.groups()
        part = getattr(learner.model, f"{tower}_tower")
        below, count = trunk_layers(part), len(layers_of(part))
        low, high = (0, below - 1) if trunk else (0, count - 1) if first is None else (int(first), int(last or first))
        if not low <= high < count:
            trunks = f"of which the first {below} are its trunk" if below else "and no trunk"
            there = f"{count} blocks, 0 to {count - 1}, {trunks}"
            raise ValueError(f"--freeze {spec}: the {tower} tower has {there}.")
        inside = {name: n for name, n in depths(part).items() if low <= n <= high and MARK not in name}
        named |= {f"model.{tower}_tower.{name}": (tower, n) for name, n in inside.items()}
    return named


def freeze(learner: Learner, recipe: Recipe) -> None:
    """Freeze what the recipe freezes for the whole run; what it unfreezes later is left to `Unfreezing`.

    Autograd then saves no activations below the first block that is trained.
    Raises: ValueError for blocks that are not there, and when nothing but the scale of the scores is left to train.
    """
    members, scales = _members(learner, recipe), {id(p) for p in learner.model.head.scales()}
    rest = [p for name, p in learner.named_parameters() if p.requires_grad and name not in members]
    if members and all(id(p) in scales for p in rest):
        specs = " ".join(frozen(recipe))
        raise ValueError(f"--freeze {specs} leaves nothing to train but the scale of the scores: freeze less.")
    for name, p in learner.named_parameters():
        if name in members and not recipe.unfreeze:
            p.requires_grad_(False)


def by_part(sizes: Iterable[tuple[str, int]]) -> Counter[str]:
    """Sums of sizes by the part of the learner that their names begin with: "image tower"."""
    counts: Counter[str] = Counter()
    for name, size in sizes:
        counts[name.removeprefix("model.").removeprefix("more.").split(".")[0].replace("_", " ")] += size
    return counts


def summary(learner: Learner, recipe: Recipe) -> str:
    """What is frozen, and how many parameters are trained, in total and by part; "" where nothing is frozen."""
    members, every = _members(learner, recipe), list(learner.named_parameters())
    if not members:
        return ""
    whole = by_part((name, p.numel()) for name, p in every)
    trained = by_part((name, p.numel() * (p.requires_grad and name not in members)) for name, p in every)
    parts = ", ".join(f"{part} {trained[part]:,} of {count:,}" for part, count in whole.items())
    later = " to ".join(str(round(share * recipe.steps)) for share in recipe.unfreeze)
    until = f", the rest from step {later} on" if later else ""
    sums = f"{trained.total():,} of {whole.total():,} parameters are trained ({parts})"
    return f"frozen {' '.join(frozen(recipe))}: {sums}{until}"


def adapt(model: Model, recipe: Recipe) -> str:
    """Attach the recipe's adapters to the towers that are pretrained: all of `init`, or those with a trunk.

    Returns: a note about them. Raises: ValueError as `adapters.attach`.
    """
    loaded = recipe.init and open_tensors(Path(recipe.init) / "model.safetensors")
    new = [name for name, _ in model.named_parameters() if loaded and name not in loaded]
    note = adapters.attach(model, recipe.lora, recipe.seed, TOWERS if loaded else _trunks(recipe), new)
    trained, whole = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (False, True))
    return f"{note} {trained:,} of {whole:,} parameters of the model are trained."


class Unfreezing:
    """Frozen blocks that begin to train later, those of each tower one by one from the top.

    `unfreeze` (a, b): the uppermost frozen block of a tower begins at the share a of the steps, the lowest at b; one
    share: all at once, a linear probe and then fine-tuning (arXiv:2202.10054). The step alone decides, so that a
    resumed run goes on exactly. A frozen parameter has no gradient, whatever the ranks and micro-batches.

    Attributes: blocks: tower and block -> the step from which it is trained.
    """

    def __init__(self, learner: Learner, recipe: Recipe) -> None:
        members = _members(learner, recipe) if recipe.unfreeze else {}
        trained = [(name, p) for name, p in learner.named_parameters() if name in members and p.requires_grad]
        self.blocks: dict[tuple[str, int], int] = {}
        for tower in sorted({tower for tower, _ in members.values()}):
            first, last = recipe.unfreeze[0], recipe.unfreeze[-1]
            layers = sorted({layer for of, layer in members.values() if of == tower}, reverse=True)
            for n, layer in enumerate(layers):
                share = first + (last - first) * n / max(len(layers) - 1, 1)
                self.blocks[tower, layer] = round(share * recipe.steps)
        self._members = {name: (p, self.blocks[members[name]]) for name, p in trained}
        self._still: frozenset[str] | None = None

    def before(self, step: int, optimizer: Optimizer) -> str:
        """Freeze and unfreeze before the forward pass of `step`; returns a message about blocks that begin with it."""
        still = frozenset(name for name, (_, first) in self._members.items() if step < first)
        if not self._members or still == self._still:
            return ""
        for name, (p, _) in self._members.items():
            # FSDP reads once which parameters are trained: those that it shards have gradients, which are dropped
            if not isinstance(p, DTensor):
                p.requires_grad_(name not in still)
        self._still = optimizer.frozen = still
        now = [f"{tower} {layer}" for (tower, layer), first in self.blocks.items() if first == step]
        return f"from step {step} on, {', '.join(now)} {'is' if len(now) == 1 else 'are'} trained" if now else ""
