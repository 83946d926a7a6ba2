"""Encoding of images and of texts, ours over open_clip's: same weights, images and captions, without gradients.

First asserts, in single precision, that the features agree; then takes turns and prints seconds and ratios (above 1
where ours is faster) as JSON. Both get the same bytes of images, and normalise them.

    python bench/encode.py --size b32 [--dtype bf16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import sizes
from step import NAMES, cast, contestants, given, wait

Encoder = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=[size for size in sizes() if size in NAMES], default="b32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=32, help="images, and captions")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--turns", type=int, default=7, help="calls of each, after one that is not counted")
    parser.set_defaults(compile=False)
    args = parser.parse_args()
    encoders = pairs(args)
    with torch.no_grad():
        for what, (our, their) in encoders.items():
            torch.testing.assert_close(F.normalize(our(), dim=-1), their(), rtol=0, atol=1e-5, msg=what)
        with cast(args):
            figures = {what: measured(our, their, args) for what, (our, their) in encoders.items()}
    print(json.dumps({"setting": vars(args), "threads": torch.get_num_threads(), **figures}))


def pairs(args: argparse.Namespace) -> dict[str, tuple[Encoder, Encoder]]:
    """Images and texts: our encoder of one batch, and theirs."""
    ours, _, _, theirs = contestants(args)
    ours, theirs = ours.eval(), theirs.eval()
    batch = given(ours, args.batch, 1, 0, args.device)
    return {
        "images": (
            lambda: ours.encode_image(batch.ours.images)[1]["vec"],
            lambda: theirs.encode_image(ours.normalise(batch.ours.images), normalize=True),
        ),
        "texts": (
            lambda: ours.encode_text(batch.ours.texts)[1]["vec"],
            lambda: theirs.encode_text(batch.padded, normalize=True),
        ),
    }


def measured(our: Encoder, their: Encoder, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of each, and the median ratio of turns."""
    turns = [(seconds(our, args), seconds(their, args)) for _ in range(1 + args.turns)][1:]
    ratio = statistics.median(theirs / ours for ours, theirs in turns)
    medians = [statistics.median(side) for side in zip(*turns, strict=True)]
    return {"ratio": round(ratio, 3), "kiloword_s": round(medians[0], 4), "open_clip_s": round(medians[1], 4)}


def seconds(encode: Encoder, args: argparse.Namespace) -> float:
    wait(args.device)
    began = time.perf_counter()
    encode()
    wait(args.device)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
