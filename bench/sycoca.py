"""What captions and masked images cost: steps of `coca`, `sycoca` and their variants against steps of `siglip`.

All arms read the same images and words; parameters of the same name start equal (asserted) and are shared. Counts the
passes of towers and decoders (asserted: texts pass once, images once a mask), then takes turns and prints ratios of
times and of FLOPs as one JSON line. On a CPU seconds are the processor's, which other work hardly changes.

    python bench/sycoca.py --size tiny --batch 64 --dtype bf16 --steps 20
    python bench/sycoca.py --size tiny --batch 32 --captions 5 --dtype bf16
    python bench/sycoca.py --size b32 --batch 8 --steps 3 --warmup 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from kiloword.config.recipes import ModelConfig, sizes
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.training.step import Learner
from kiloword.types import Batch, Texts
from prolip import Arm as Steps, in_turns, ratio
from step import LENGTHS

DROP = {"mim_op": "drop"}
TOKEN = {"caption_op": "token"}
ALONE = {"guide": "none", "mim_mask": "random", **DROP}
# arm: method, settings, and how often it encodes every image and how often every caption's image
ARMS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "siglip": ("siglip", {}, 1, 0),
    "clip": ("clip", {}, 1, 0),
    "coca": ("coca", {}, 1, 0),
    "coca, random drop": ("coca", {"caption_mask": "random"}, 2, 0),
    "coca, attentive drop": ("coca", {"caption_mask": "attentive"}, 1, 1),
    "coca, attentive token": ("coca", {"caption_mask": "attentive", **TOKEN}, 1, 1),
    "siglip+mim, without text, random drop": ("siglip+mim", {"mim": ALONE}, 2, 0),
    "siglip+mim": ("siglip+mim", {}, 1, 1),
    "sycoca, all drop": ("sycoca", DROP, 1, 2),
    "sycoca": ("sycoca", {}, 1, 2),
    "sycoca, all token": ("sycoca", TOKEN, 1, 2),
}


class Arm(Steps):
    """One contestant of the steps, whose parameters are those of the arms before where names and shapes are."""

    def __init__(self, args: argparse.Namespace, name: str, known: dict[str, nn.Parameter]) -> None:
        method = preset(*ARMS[name][:2])
        model = build(sizes()[args.size], method).to(args.device)
        share(model, known)
        self.args, self.name = args, name
        self.learner = Learner(model, method)
        self.batches = [batch(model.config, args, seed) for seed in range(3)]  # lengths change from step to step

    def loss(self) -> float:
        """Of the first batch, so that two versions of the library can be compared."""
        with torch.no_grad(), torch.autocast(self.args.device, torch.bfloat16, enabled=self.args.dtype == "bf16"):
            return float(self.learner(self.batches[0], self.learner.counts(self.batches[:1]))["loss"])

    def passes(self) -> dict[str, list[int]]:
        """Of each tower and decoder: passes, and sequences in all."""
        model, found = self.learner.model, dict[str, list[int]]()
        towers = {"image": model.image_tower, "text": model.text_tower, **model.more}
        hooks = [tower.register_forward_hook(counter(found, name)) for name, tower in towers.items()]
        self.loss()
        for hook in hooks:
            hook.remove()
        images, texts = len(self.batches[0]), len(self.batches[0].texts)
        by_image, by_caption = ARMS[self.name][2:]
        assert found["text"] == [1, texts], found
        assert found["image"] == [by_image + by_caption, by_image * images + by_caption * texts], found
        return found


def counter(found: dict[str, list[int]], name: str) -> Callable[[nn.Module, Any, Any], None]:
    """A hook that adds a pass to what was found."""

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        passes, rows = found.get(name, [0, 0])
        packed = [x for x in inputs if not isinstance(x, torch.Tensor) and hasattr(x, "longest")]
        found[name] = [passes + 1, rows + len(packed[0] if packed else inputs[0])]

    return hook


def share(model: nn.Module, known: dict[str, nn.Parameter]) -> None:
    """Replace parameters by those known by name, where they start equal: in towers always. Know the others."""
    for name, parameter in list(model.named_parameters()):
        theirs = known.setdefault(name, parameter)
        if torch.equal(theirs, parameter):
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, theirs)
        else:  # an unguided decoder has half the blocks, and a head's scale is its loss's
            assert not name.startswith(("image_tower.", "text_tower.", "more.text_decoder.")), name


def batch(config: ModelConfig, args: argparse.Namespace, seed: int) -> Batch:
    """Noise with captions of Flickr8k's lengths; the same words for every arm."""
    rng, text, size = np.random.default_rng(seed), config.text, config.image.size
    words, numbers = max(text.special.values()) + 1, torch.arange(args.batch)
    tail = [text.special["end"], *(text.special[name] for name in text.extra_tokens)]
    lengths = 4 + rng.choice(len(LENGTHS), args.batch * args.captions, p=np.array(LENGTHS) / sum(LENGTHS))
    captions = [[text.special["start"], *rng.integers(words, text.vocab, n - 2).tolist(), *tail] for n in lengths]
    return Batch(
        images=torch.from_numpy(rng.integers(0, 256, (args.batch, 3, size, size), dtype=np.uint8)),
        texts=Texts.pack(captions),
        image_of_text=numbers.repeat_interleave(args.captions),
        seeds=numbers,
        position=numbers,
        composed=torch.zeros(args.batch, dtype=torch.bool),
    ).to(args.device)


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Losses, passes, and times and FLOPs as ratios to siglip's."""
    known: dict[str, nn.Parameter] = {}
    arms = {name: Arm(args, name, known) for name in ARMS if not args.arms or name in ("siglip", *args.arms)}
    every = {id(p): p for arm in arms.values() for p in arm.learner.parameters()}
    optimizer = torch.optim.AdamW(every.values(), lr=1e-5, fused=True)  # leaves what has no gradient as it is
    for arm in arms.values():
        arm.optimizer = optimizer
    found = {"loss": {name: arm.loss() for name, arm in arms.items()}}
    found |= {"passes_and_rows": {name: arm.passes() for name, arm in arms.items()}}
    flops = {name: arm.gflop() for name, arm in arms.items()}
    times = in_turns({name: arm.step for name, arm in arms.items()}, args.steps, args.warmup, args.device)
    least = {name: round(min(times[name]) / min(times["siglip"]), 3) for name in arms}
    return {
        **found,
        "flops_over_siglip": {name: round(flops[name] / flops["siglip"], 3) for name in arms},
        "time_over_siglip": {name: ratio(times, name, "siglip") for name in arms},
        "least_over_siglip": least,
        "seconds": {name: round(statistics.median(t), 4) for name, t in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=[s for s in sizes() if s != "debug"], default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=64, help="images")
    parser.add_argument("--captions", type=int, default=1, help="captions an image")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=[], help="beside siglip; all when left away")
    parser.add_argument("--steps", type=int, default=10, help="steps of each, after the warm-up")
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    found = {"setting": vars(args), **steps(args)}
    print(json.dumps({**found, "threads": torch.get_num_threads(), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
