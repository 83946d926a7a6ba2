"""What six captions an image cost: steps of siglip with one and with six, packed as trained, and padded.

Captions have Flickr8k's lengths. Checks that padding behind the end changes no feature, then takes turns and prints the
ratios as JSON.

    python bench/captions.py --size b32 --batch 32
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from kiloword.config.recipes import sizes
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.training.step import Learner
from kiloword.types import Texts
from step import Given, Side, given, side, step as timed


def padded(batch: Given, context: int) -> Given:
    """The same captions, each followed by pads up to the context, which the tower then reads as tokens."""
    starts = batch.ours.texts.starts.tolist()
    ids = batch.ours.texts.ids.tolist()
    rows = [ids[a:b] + [0] * (context - b + a) for a, b in pairwise(starts)]
    texts = Texts.pack(rows).to(batch.ours.images.device)
    return Given(replace(batch.ours, texts=texts), batch.padded)


def check(model: Model, batch: Given) -> float:
    """Largest difference of a token before the end between packed and padded captions."""
    context = model.config.text.context
    with torch.no_grad():
        packed = model.text_tower(batch.ours.texts)
        all_tokens = model.text_tower(padded(batch, context).ours.texts).unflatten(0, (-1, context))
    lengths = batch.ours.texts.starts.diff()
    real = torch.arange(context, device=lengths.device) < lengths[:, None]
    difference = float((all_tokens[real] - packed).abs().max())
    assert difference < 1e-3, difference
    return difference


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=["s16", "b32", "b16", "l14"], default="b32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=32, help="images")
    parser.add_argument("--captions", type=int, default=6, help="captions an image, against one")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=4, help="steps of each, after one to warm up")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    method = preset("siglip")
    model = build(sizes()[args.size], method).to(args.device)
    learner = Learner(model, method)
    contestant: Side = side(model, lambda batch: learner(batch.ours, {})["loss"])
    one, many = (given(model, args.batch, n, 0, args.device) for n in (1, args.captions))
    agreement = check(model, given(model, 2, 2, 1, args.device))
    context = model.config.text.context
    batches = {"one": one, "many": many, "one padded": padded(one, context), "many padded": padded(many, context)}
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for n in range(args.steps + 1):
        for name in list(batches) if n % 2 else list(batches)[::-1]:
            took = timed(contestant, batches[name], args)
            if n:
                seconds[name].append(took)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        "many over one": middle["many"] / middle["one"],
        "many over one, both padded": middle["many padded"] / middle["one padded"],
        "many padded over many": middle["many padded"] / middle["many"],
        "many padded over one": middle["many padded"] / middle["one"],
    }
    print(
        json.dumps(
            {
                "setting": vars(args),
                "padding changes a token by": agreement,
                "ratios": {name: round(value, 3) for name, value in ratios.items()},
                "seconds": {name: [round(x, 3) for x in values] for name, values in seconds.items()},
                "tokens_per_caption": round(len(many.ours.texts.ids) / len(many.ours.texts), 2),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
