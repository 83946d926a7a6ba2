"""Peak memory and time of a text decoder and its caption loss, in chunks of words and with all logits at once.

Memory is that of tensors which are alive at once, counted without computing them, so that any size can be asked for;
gradients count, but not the weights and what both towers made. Time is the loss's alone, forward and
backward; first asserts that every chunk size gives the same loss and gradient.

    python bench/words.py --captions 1024 --tokens 20
    python bench/words.py --captions 64 --time
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parent))
from kiloword.apps.plan.simulation import Count
from kiloword.config.recipes import sizes
from kiloword.methods.coca.coca import CHUNK, word_loss
from kiloword.model.attention import Packing
from kiloword.model.decoder import TextDecoder
from kiloword.model.image import grid
from kiloword.types import Texts
from prolip import in_turns

WHOLE = 0  # all logits at once, by torch's cross-entropy


def loss_of(x: Tensor, table: Tensor, targets: Tensor, chunk: int) -> Tensor:
    if chunk != WHOLE:
        return word_loss(x, table, targets, chunk=chunk)
    return F.cross_entropy(x @ table.T, targets, reduction="sum")


def peak(args: argparse.Namespace, chunk: int, alone: bool) -> float:
    """GiB of one forward and backward pass of decoder and loss, or of the loss alone."""
    config = sizes()[args.size]
    text, n, length = config.text, args.captions, args.tokens - 1  # the end token predicts nothing
    with FakeTensorMode():
        decoder = TextDecoder(text, text.depth, config.image.width)
        tokens = torch.zeros(n * length, text.width, requires_grad=True)
        patches = grid(config.image) ** 2 + 1
        image = torch.zeros(n, patches, config.image.width, requires_grad=True)
        texts = Texts(torch.zeros(n * length, dtype=torch.int64), torch.arange(0, n * length + 1, length), length)
        with Count([image, tokens, *decoder.parameters()]) as alive:
            with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
                x = tokens if alone else decoder(tokens, decoder.remember(image), Packing.of(texts))
                loss = loss_of(x, decoder.table(tokens), texts.ids, chunk)
            del x
            loss.backward()  # type: ignore[no-untyped-call]
    return round(alive.peak / 2**30, 3)


def seconds(args: argparse.Namespace, chunks: list[int]) -> dict[int, float]:
    """Median seconds of the loss alone, after the check that all agree."""
    text, n = sizes()[args.size].text, args.captions * (args.tokens - 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, text.width, generator=generator).to(args.device).requires_grad_()
    table = torch.randn(text.vocab, text.width, generator=generator) * text.width**-0.5
    table = table.to(args.device).requires_grad_()
    targets = torch.randint(0, text.vocab, (n,), generator=generator).to(args.device)

    def step(chunk: int, turn: int) -> tuple[Tensor, ...]:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = loss_of(x, table, targets, chunk)
        return loss.detach(), *torch.autograd.grad(loss, (x, table))

    expected = step(chunks[0], 0)
    for chunk in chunks[1:]:
        for a, b in zip(step(chunk, 0), expected, strict=True):
            off = float((a - b).norm() / b.norm())
            assert off < (2e-2 if args.dtype == "bf16" else 1e-5), (chunk, off)
    times = in_turns({str(chunk): partial(step, chunk) for chunk in chunks}, args.repeat, 1, args.device)
    return {chunk: round(statistics.median(times[str(chunk)]), 4) for chunk in chunks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=list(sizes()), default="b32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--captions", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=20, help="of each caption, start and end included")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--chunks", type=int, nargs="+", default=[WHOLE, 256, CHUNK, 4096], help="0: all at once")
    parser.add_argument("--time", action="store_true", help="measure the loss's time too, which computes it")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, Any] = {"setting": vars(args)}
    found["peak_gib"] = {chunk: peak(args, chunk, alone=False) for chunk in args.chunks}
    found["peak_gib_of_the_loss"] = {chunk: peak(args, chunk, alone=True) for chunk in args.chunks}
    if args.time:
        found["loss_seconds"] = seconds(args, args.chunks)
    print(json.dumps({**found, "threads": torch.get_num_threads(), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
