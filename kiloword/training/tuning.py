"""Tuning of pretrained towers: which blocks are frozen, for how long, and at which share of the learning rate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch.distributed.tensor import DTensor

from kiloword.config.recipes import Recipe
from kiloword.errors import suggestion
from kiloword.model import adapters
from kiloword.model.adapters import MARK
from kiloword.model.layers import depths, layers_of, trunk_layers
from kiloword.model.model import Model
from kiloword.models.tensors import open_tensors
from kiloword.training.learner import Learner
from kiloword.training.optimizer import Optimizer

TOWERS = ("image", "text")
SPEC = re.compile(r"([^:]*)(?::(?:(trunk)|(\d{1,9})(?:-(\d{1,9}))?))?")
EXPECTED = "expected none, image, text, image:trunk, image:3 or image:0-8, and so for text"


def frozen(recipe: Recipe) -> tuple[str, ...]:
    """What a recipe freezes, as `--freeze`; where it says nothing, the trunks of its towers.

    ("none",): nothing; (): only what `adapt` freezes.
    """
    trunks = tuple(f"{tower}:trunk" for tower in _trunks(recipe))
    return recipe.freeze or trunks or (() if recipe.lora.rank else ("none",))


def _trunks(recipe: Recipe) -> list[str]:
    """The towers that have a trunk."""
    return [tower for tower in TOWERS if getattr(recipe.model, tower).trunk.name]


def check(recipe: Recipe) -> None:
    """Raises: ValueError for settings of freezing and of LoRA that contradict each other."""
    if recipe.lora.rank:
        _check_adapters(recipe)
    specs, shares = frozen(recipe), recipe.unfreeze
    if "none" in specs and len(specs) > 1:
        raise ValueError(f"--freeze {' '.join(specs)}: none excludes the others.")
    if not shares:
        return
    flag = f"--unfreeze {' '.join(f'{share:g}' for share in shares)}"
    if specs == ("none",):
        raise ValueError(f"{flag} without frozen blocks: name them by --freeze, or omit it.")
    if len(shares) > 2 or list(shares) != sorted(shares):
        raise ValueError(f"{flag}: expected one share of the steps, or two, the first not above the second.")


def _check_adapters(recipe: Recipe) -> None:
    wrong = {"--freeze none": "none" in recipe.freeze, "--unfreeze": bool(recipe.unfreeze)}
    if excluded := [flag for flag, is_set in wrong.items() if is_set]:
        raise ValueError(
            f"{' and '.join(excluded)} and --lora.rank exclude each other: LoRA freezes the towers that it adapts. "
            "Omit one of them."
        )
    if recipe.lora.save == "apart" and recipe.init is None:
        raise ValueError("--lora.save apart needs --init MODEL: it saves what the run changes of that model.")


def reason(recipe: Recipe) -> str:
    """Defaults that hold for the trunks of a recipe, and why, in sentences; "" without trunks."""
    specs, messages = frozen(recipe), list[str]()
    if not recipe.freeze and specs not in ((), ("none",)):
        thaw = "--freeze none trains all, --unfreeze 0.3 from that share of the steps on."
        messages.append(
            "Trunks are frozen by default: their features are pretrained, the layers above are not, and large first "
            f"gradients would spoil them. {'LoRA trains its adapters alone in them.' if recipe.lora.rank else thaw}"
        )
    tuned = [tower for tower in _trunks(recipe) if not {tower, f"{tower}:trunk"} & set(specs) or recipe.unfreeze]
    if tuned and not recipe.lora.rank:
        messages.append(
            f"Trunks are trained by AdamW at {recipe.optim.trunk_lr:g} of its learning rate (--optim.trunk-lr): they "
            "are pretrained."
        )
    return " ".join(messages)


def layers_named(specs: Sequence[str], model: Model) -> dict[str, set[int]]:
    """Tower -> the layers that `specs` name. Raises: ValueError for a spec that names no tower or no block of it."""
    named: dict[str, set[int]] = {}
    for spec in specs:
        if spec != "none":
            tower, layers = _named(spec, model)
            named.setdefault(tower, set()).update(layers)
    return named


def _named(spec: str, model: Model) -> tuple[str, range]:
    match = SPEC.fullmatch(spec)
    if match is None or match[1] not in TOWERS:
        near = suggestion(spec.partition(":")[0], (*TOWERS, "none"))
        raise ValueError(f"--freeze {spec}: {EXPECTED}.{near}")
    tower, trunk, first, last = match.groups()
    part = getattr(model, f"{tower}_tower")
    below, count = trunk_layers(part), len(layers_of(part))
    there = f"the {tower} tower has the blocks 0 to {count - 1}" if count > 1 else f"the {tower} tower is one block, 0"
    if below:
        there += f", of which 0 to {below - 1} are its trunk"
    if trunk:
        if not below:
            raise ValueError(f"--freeze {spec}: {there}, and no trunk (--{tower}-tower).")
        return tower, range(below)
    if first is None:
        return tower, range(count)
    low, high = int(first), int(last or first)
    if not low <= high < count:
        raise ValueError(f"--freeze {spec}: {there}.")
    return tower, range(low, high + 1)


def _members(learner: Learner, recipe: Recipe) -> dict[str, str]:
    """Frozen parameters by name, with their blocks: "image 3"."""
    named: dict[str, str] = {}
    for tower, layers in layers_named(frozen(recipe), learner.model).items():
        of = depths(getattr(learner.model, f"{tower}_tower"))
        inside = {name: n for name, n in of.items() if n in layers and MARK not in name}
        named |= {f"model.{tower}_tower.{name}": f"{tower} {n}" for name, n in inside.items()}
    return named


def freeze(learner: Learner, recipe: Recipe) -> None:
    """Freeze what the recipe freezes for the whole run; what it unfreezes later is left to `Unfreezing`.

    Autograd then saves no activations below the first block that is trained.
    Raises: ValueError as `layers_named`, and when nothing but the scale of the scores is left to train.
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
    return (
        f"frozen {' '.join(frozen(recipe))}: {trained.total():,} of {whole.total():,} parameters are trained "
        f"({parts}){until}"
    )


def adapt(model: Model, recipe: Recipe) -> str:
    """Attach the recipe's adapters to the towers that are pretrained: all of `init`, or those with a trunk.

    Returns: a note about them. Raises: ValueError as `adapters.attach`.
    """
    loaded = None if recipe.init is None else open_tensors(Path(recipe.init) / "model.safetensors")
    new = [] if loaded is None else [name for name, _ in model.named_parameters() if name not in loaded]
    pretrained = [t for t in TOWERS if loaded is not None or trunk_layers(getattr(model, f"{t}_tower"))]
    note = adapters.attach(model, recipe.lora, recipe.seed, pretrained, new)
    trained, whole = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (False, True))
    return f"{note} {trained:,} of {whole:,} parameters of the model are trained."


class Unfreezing:
    """Frozen blocks that begin to train later, those of each tower one by one from the top.

    `unfreeze` (a, b): the uppermost frozen block of a tower begins at the share a of the steps, the lowest at b; one
    share: all at once, a linear probe and then fine-tuning (arXiv:2202.10054). The step alone decides, so that a
    resumed run goes on exactly. A frozen parameter has no gradient, whatever the ranks and micro-batches.
    """

    def __init__(self, learner: Learner, recipe: Recipe) -> None:
        self.begins: dict[str, int] = {}  # name of a frozen parameter -> step from which it is trained
        self.blocks: dict[str, int] = {}  # its block -> that step
        self._still: frozenset[str] | None = None
        if not recipe.unfreeze:
            return
        for tower, layers in layers_named(frozen(recipe), learner.model).items():
            steps = begins(layers, recipe.unfreeze, recipe.steps)
            self.blocks |= {f"{tower} {layer}": step for layer, step in steps.items()}
        members = _members(learner, recipe)
        trained = {name: p for name, p in learner.named_parameters() if name in members and p.requires_grad}
        self.begins = {name: self.blocks[members[name]] for name in trained}
        # FSDP reads once which parameters are trained: those that it shards have gradients, which are dropped
        self._plain = {name: p for name, p in trained.items() if not isinstance(p, DTensor)}

    def before(self, step: int, optimizer: Optimizer) -> str:
        """Freeze and unfreeze before the forward pass of `step`; returns a message about blocks that begin with it."""
        still = frozenset(name for name, first in self.begins.items() if step < first)
        if not self.begins or still == self._still:
            return ""
        for name, p in self._plain.items():
            p.requires_grad_(name not in still)
        self._still = optimizer.frozen = still
        now = [block for block, first in self.blocks.items() if first == step]
        return f"from step {step} on, {', '.join(now)} {'is' if len(now) == 1 else 'are'} trained" if now else ""


def begins(layers: set[int], shares: Sequence[float], steps: int) -> Mapping[int, int]:
    """Layer -> the step from which it is trained, of a run of `steps`; see `Unfreezing`."""
    first, last, most = shares[0], shares[-1], max(len(layers) - 1, 1)
    order = sorted(layers, reverse=True)
    return {layer: round((first + (last - first) * n / most) * steps) for n, layer in enumerate(order)}
