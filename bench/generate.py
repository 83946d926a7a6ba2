"""What keys and values that are kept save: captions written with a cache, and with all tokens computed again each step.

Random weights, and no end before the limit, so that both do the same work for the same number of steps. They take
turns; each turn asserts that both wrote the same tokens and gave them the same probabilities. Prints the ratios as
JSON, of seconds and of the processor's, which other programs on the machine hardly change.

    python bench/generate.py --size b32 --batch 16 --tokens 32 --method greedy
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from kiloword.config.recipes import sizes
from kiloword.generation.decoding import ModelDecoding, text_decoder
from kiloword.generation.options import GenerationOptions
from kiloword.generation.search import Found, Rules, search
from kiloword.methods.registry import preset
from kiloword.model.decoder import DecoderMemory
from kiloword.model.model import Model
from kiloword.models.build import build
from whole_decoding import WholeDecoding

Write = Callable[[], list[list[Found]]]


def writers(model: Model, memory: DecoderMemory, options: GenerationOptions, tokens: int) -> dict[str, Write]:
    """Both ways to write texts of `tokens` tokens about the same images."""
    words, device = text_decoder(model).words, next(model.parameters()).device
    never = torch.zeros(words, dtype=torch.bool, device=device)
    rules = Rules(start=words - 2, end=words - 1, never=never, longest=tokens, shortest=tokens)
    kinds = {"cached": ModelDecoding, "whole": WholeDecoding}

    def write(kind: type[ModelDecoding] | type[WholeDecoding]) -> list[list[Found]]:
        with torch.inference_mode():
            return search(kind(model, memory), len(memory), rules, options)

    return {name: lambda kind=kind: write(kind) for name, kind in kinds.items()}


def check(one: list[list[Found]], other: list[list[Found]], tokens: int) -> float:
    """Largest difference between log probabilities; the tokens are the same."""
    pairs = [(a[0], b[0]) for a, b in zip(one, other, strict=True)]
    assert all(a.ids == b.ids for a, b in pairs), "the same tokens"
    assert all(len(a.ids) == tokens for a, _ in pairs), "the same number of steps"
    difference = max(abs(a.logprob - b.logprob) for a, b in pairs)
    assert difference < 1e-3 * max(abs(a.logprob) for a, _ in pairs), difference
    return difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=sorted(sizes()), default="b32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--batch", type=int, default=16, help="images")
    parser.add_argument("--tokens", type=int, default=32, help="of a caption")
    parser.add_argument("--method", choices=["greedy", "beam"], default="greedy")
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=3, help="turns of which the median counts")
    given = parser.parse_args()
    config = sizes()[given.size]
    config = replace(config, text=replace(config.text, vocab=49408, context=max(77, given.tokens + 1)))
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[given.dtype]
    model = build(config, preset("coca", {"class_token": False}), 0).to(given.device, kind).eval()
    side = config.image.size
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (given.batch, 3, side, side), dtype=torch.uint8, generator=generator)
    with torch.inference_mode():
        tokens = model.image_tokens(images.to(given.device))
        memory = DecoderMemory(text_decoder(model).remember(model.memory(tokens)))
    both = writers(model, memory, GenerationOptions(method=given.method, beams=given.beams), given.tokens)
    seconds: dict[str, list[float]] = {name: [] for name in both}
    processor: dict[str, list[float]] = {name: [] for name in both}
    difference = 0.0
    for _ in range(given.repeat):
        found = {}
        for name, write in both.items():
            start, busy = time.perf_counter(), time.process_time()
            found[name] = write()
            seconds[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - busy)
        difference = max(difference, check(found["cached"], found["whole"], given.tokens))
    median = {name: statistics.median(some) for name, some in seconds.items()}
    busiest = {name: statistics.median(some) for name, some in processor.items()}
    print(
        json.dumps(
            {
                **vars(given),
                "threads": torch.get_num_threads(),
                "logprob_difference": difference,
                "seconds": median,
                "tokens_per_s": given.batch * given.tokens / median["cached"],
                "ratio": median["whole"] / median["cached"],
                "processor_seconds": busiest,
                "processor_ratio": busiest["whole"] / busiest["cached"],
            }
        )
    )


if __name__ == "__main__":
    main()
