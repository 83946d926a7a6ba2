"""A training step at context 77 and at a longer one: same weights and captions, which are packed in both.

First asserts that losses and gradients of short captions are equal. Then takes turns and prints seconds of processor
time and memory as JSON: of short captions at both contexts, of short captions of which one is as long as the context,
and of long captions alone, with their tokens a second.

    python bench/context.py --size s16 --batch 8
    python bench/context.py --size tiny --batch 64 --context 512
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from kiloword.config.recipes import sizes
from kiloword.methods.registry import preset
from kiloword.model.model import Model, resize_text
from kiloword.models.build import build
from kiloword.types import Texts
from prolip import in_turns, ratio
from step import END, LENGTHS, Given, Side, given, memory, our_side, step

SHORT = 77


def models(args: argparse.Namespace) -> dict[int, Model]:
    """The same weights at both contexts."""
    config = sizes()[args.size]
    config = replace(config, text=replace(config.text, vocab=END + 1, context=SHORT))
    short = build(config, preset("clip"))
    longer, state = resize_text(config, short.state_dict(), args.context, keep=(SHORT - 2, 0))
    long = build(longer, preset("clip"))
    long.load_state_dict(state)
    return {SHORT: short.to(args.device).train(), args.context: long.to(args.device).train()}


def captions(args: argparse.Namespace, lengths: Sequence[int]) -> Given:
    """A batch of captions of these lengths, [batch]."""
    rng = np.random.default_rng(1)
    texts = Texts.pack([[END - 1, *rng.integers(1, END - 1, n - 2).tolist(), END] for n in lengths])
    made = given_short(args)
    return replace(made, ours=replace(made.ours, texts=texts.to(args.device)))


def given_short(args: argparse.Namespace) -> Given:
    model = build(sizes()[args.size], preset("clip"))
    return given(model, args.batch, 1, 1, args.device)


def check(by_context: dict[int, Model], sides: dict[int, Side], batch: Given) -> float:
    """The largest relative difference of loss and gradients; asserts that it is rounding."""
    measured = []
    for context, model in by_context.items():
        sides[context].optimizer.zero_grad(set_to_none=True)
        loss = sides[context].loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        rows = model.text_tower.positions.grad
        assert rows is not None
        gradients = [p.grad for p in model.parameters() if p.grad is not None and p is not model.text_tower.positions]
        measured.append([loss.detach(), rows[: SHORT - 2], *gradients])
    differences = [float((a - b).norm() / (a.norm() + 1e-12)) for a, b in zip(*measured, strict=True)]
    assert max(differences) < 1e-4, differences
    return max(differences)


def batches(args: argparse.Namespace) -> dict[str, Given]:
    rng = np.random.default_rng(0)
    share = np.array(LENGTHS) / sum(LENGTHS)
    short = (4 + rng.choice(len(LENGTHS), args.batch, p=share)).tolist()
    long = rng.integers(args.context // 4, args.context + 1, args.batch).tolist()
    return {
        "short": captions(args, short),
        "one long": captions(args, [args.context, *short[1:]]),
        "long": captions(args, long),
    }


def one_step(run: tuple[Side, Given], args: argparse.Namespace, turn: int) -> None:
    step(*run, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=sizes(), default="s16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=8, help="images")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=5, help="steps of each, after the warm-up")
    args = parser.parse_args()
    args.compile = False
    torch.set_num_threads(1)
    by_context = models(args)
    sides = {context: our_side(model, args) for context, model in by_context.items()}
    every = batches(args)
    agreement = check(by_context, sides, every["short"])
    runs = {(context, "short"): (sides[context], every["short"]) for context in by_context}
    runs |= {(args.context, kind): (sides[args.context], every[kind]) for kind in ("one long", "long")}
    turns = {" ".join(map(str, name)): run for name, run in runs.items()}
    each = {name: partial(one_step, run, args) for name, run in turns.items()}
    times = in_turns(each, args.steps, 1, args.device)
    result = {}
    for name, run in turns.items():
        tokens = len(run[1].ours.texts.ids)
        middle = statistics.median(times[name])
        result[name] = {
            "tokens": tokens,
            "seconds": round(middle, 3),
            "of the first": ratio(times, name, next(iter(turns))),
            "text tokens a second": round(tokens / middle),
            "MiB": round(memory(*run, args) / 2**20, 1),
        }
    print(json.dumps({"difference": agreement, **result}))


if __name__ == "__main__":
    main()
