"""One training step (forward, backward, AdamW) of ours and of open_clip's: same weights, images and captions.

First asserts, in single precision, that loss and gradients agree; then takes turns and prints the ratios as JSON. Both
sides get the same bytes of images on the device, and normalise them in the step. With --compile (both
sides) nothing is asserted (each check would compile anew), and all batches have as many tokens, so that shapes are
static. --alone times ours, where open_clip is not installed.

    python bench/step.py --size b32 --device cpu
    python bench/step.py --size debug --alone
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kiloword.config.recipes import sizes
from kiloword.interop.open_clip import import_state
from kiloword.interop.state_dicts import translated
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.models.build import build
from kiloword.training import engine
from kiloword.training.step import Learner
from kiloword.types import Batch, Texts

NAMES = {
    "s16": "ViT-S-16",
    "b32": "ViT-B-32",
    "b16": "ViT-B-16",
    "l16": "ViT-L-16",
    "l14": "ViT-L-14",
    "h14": "ViT-H-14",
}
END = 49407
# captions of Flickr8k's training split by length in CLIP's tokens, start and end included, from 4; mean 14.1
LENGTHS = [8, 24, 132, 366, 855, 1795, 2413, 2666, 3129, 3095, 3090, 2741, 2432, 1938, 1493, 1061, 786, 611]
LENGTHS += [420, 293, 192, 144, 89, 78, 52, 33, 25, 8, 6, 7, 6, 5, 2, 2, 1, 1]


@dataclass
class Given:
    """One batch, as each side takes it."""

    ours: Batch
    padded: Tensor  # [T, 77]


@dataclass
class Side:
    """One contestant."""

    parameters: list[torch.nn.Parameter]
    loss: Callable[[Given], Tensor]
    optimizer: torch.optim.Optimizer


def given(model: Model, images: int, captions: int, seed: int, device: str, lengths_of: int | None = None) -> Given:
    """Noise. Args: captions: of each image; lengths_of: another seed that draws the lengths, in another order."""
    rng = np.random.default_rng(seed)
    size = model.config.image.size
    pixels = torch.from_numpy(rng.integers(0, 256, (images, 3, size, size), dtype=np.uint8))
    share = np.array(LENGTHS) / sum(LENGTHS)
    of_lengths = rng if lengths_of is None else np.random.default_rng(lengths_of)
    lengths = 4 + rng.permutation(of_lengths.choice(len(LENGTHS), images * captions, p=share))
    sequences = [[END - 1, *rng.integers(1, END - 1, n - 2).tolist(), END] for n in lengths]
    padded = torch.zeros(len(sequences), 77, dtype=torch.int64)
    for row, ids in zip(padded, sequences, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    numbers = torch.arange(images)
    batch = Batch(
        images=pixels,
        texts=Texts.pack(sequences),
        image_of_text=numbers.repeat_interleave(captions),
        seeds=numbers,
        position=numbers,
        composed=torch.zeros(images, dtype=torch.bool),
    ).to(device)
    return Given(batch, padded.to(device))


def alone(args: argparse.Namespace) -> tuple[Model, Side]:
    """Our model with fresh weights, and our side."""
    config = sizes()[args.size]
    config = replace(config, text=replace(config.text, vocab=END + 1, context=77))
    model = build(config, preset("clip")).to(args.device).train()
    return model, our_side(model, args)


def our_side(model: Model, args: argparse.Namespace) -> Side:
    learner = Learner(model, preset("clip"))
    engine.compile_model(model, "towers" if args.compile else "none")

    def our_loss(batch: Given) -> Tensor:
        loss: Tensor = learner(batch.ours, {})["loss"]
        return loss

    return side(model, our_loss)


def contestants(args: argparse.Namespace) -> tuple[Model, Side, Side, Any]:
    """Our model, our side, theirs, their model: the same weights."""
    torchvision_ready()
    import open_clip

    torch.manual_seed(0)
    theirs = open_clip.create_model(NAMES[args.size], pretrained=None)
    imported = import_state(NAMES[args.size], theirs.state_dict())
    ours = Model(imported.config, preset("clip").head(imported.config))
    ours.load_state_dict(imported.state)
    theirs, ours = theirs.to(args.device).train(), ours.to(args.device).train()
    run = torch.compile(theirs) if args.compile else theirs

    def their_loss(batch: Given) -> Tensor:
        normalised = ours.normalise(batch.ours.images)
        if len(batch.padded) == len(normalised):
            images, texts, scale = run(normalised, batch.padded)[:3]
            return symmetric(images, texts, scale, batch.ours.image_of_text)
        images, texts = (
            theirs.encode_image(normalised, normalize=True),
            theirs.encode_text(batch.padded, normalize=True),
        )
        return symmetric(images, texts, theirs.logit_scale.exp(), batch.ours.image_of_text)

    return ours, our_side(ours, args), side(theirs, their_loss), theirs


def side(model: torch.nn.Module, loss: Callable[[Given], Tensor]) -> Side:
    parameters = list(model.parameters())
    return Side(parameters, loss, torch.optim.AdamW(parameters, lr=1e-5, fused=True))


def symmetric(images: Tensor, texts: Tensor, scale: Tensor, image_of_text: Tensor) -> Tensor:
    """CLIP's loss; an image's captions share its probability equally."""
    with torch.autocast(images.device.type, enabled=False):
        logits = scale * images.float() @ texts.float().T  # [I, T]
        match = image_of_text[None] == torch.arange(len(images), device=images.device)[:, None]
        by_row = -(logits.log_softmax(1) * match).sum(1) / match.sum(1)
        return (by_row.mean() + F.cross_entropy(logits.T, image_of_text)) / 2


def check(ours: Model, our: Side, their: Side, theirs: torch.nn.Module, batch: Given, half: bool) -> dict[str, float]:
    """Relative differences of loss and of the whole gradient; asserts that they are rounding."""
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # their patch embedding is a convolution
    losses = []
    for contestant in (our, their):
        contestant.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(batch.padded.device.type, torch.bfloat16, enabled=half):
            loss = contestant.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    torch.backends.cudnn.allow_tf32 = tf32
    mine = {k: p.grad for k, p in ours.named_parameters()}
    given = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    foreign, unused = translated(given, dict(ours.named_parameters()))
    assert not unused
    assert foreign.keys() == mine.keys()
    pairs = [(mine[name], gradient) for name, gradient in foreign.items()]
    difference = sum(float((a - b).square().sum()) for a, b in pairs if a is not None) ** 0.5
    total = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
    found = {"loss": abs(losses[0] - losses[1]) / losses[1], "gradient": difference / total}
    assert found["loss"] < (1e-2 if half else 1e-5), found
    assert found["gradient"] < (0.2 if half else 1e-4), found
    return found


def step(contestant: Side, batch: Given, args: argparse.Namespace) -> float:
    """Seconds of one step."""
    wait(args.device)
    began = time.perf_counter()
    forward_and_back(contestant, batch, args)
    wait(args.device)
    return time.perf_counter() - began


def forward_and_back(contestant: Side, batch: Given, args: argparse.Namespace) -> None:
    """One step; on CUDA it returns when all is launched."""
    contestant.optimizer.zero_grad(set_to_none=True)
    with cast(args):
        loss = contestant.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    contestant.optimizer.step()


def cast(args: argparse.Namespace) -> AbstractContextManager[Any]:
    return torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bf16")


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def work(contestant: Side, batch: Given, args: argparse.Namespace) -> dict[str, float]:
    """Seconds in which the host launches a step on CUDA, seconds of its kernels together, and their number."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        forward_and_back(contestant, batch, args)
        host = time.perf_counter() - began
        wait(args.device)
    kernels = [event for event in profiler.key_averages() if event.self_device_time_total]
    seconds = sum(event.self_device_time_total for event in kernels) / 1e6
    return {"host_s": round(host, 4), "card_s": round(seconds, 4), "kernels": sum(event.count for event in kernels)}


def memory(contestant: Side, batch: Given, args: argparse.Namespace) -> int:
    """Bytes of a step beyond weights and optimizer: the peak on CUDA, what backward waits for on CPU."""
    contestant.optimizer.zero_grad(set_to_none=True)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
        step(contestant, batch, args)
        return torch.cuda.max_memory_allocated() - rest
    own = {p.untyped_storage().data_ptr() for p in contestant.parameters}
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return x.detach()  # not x: a graph that holds its own results is never freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), cast(args):
        contestant.loss(batch)
    return sum(saved.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=sizes(), default="b32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=32, help="images")
    parser.add_argument("--captions", type=int, default=1, help="captions an image")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--alone", action="store_true", help="without open_clip; any size")
    parser.add_argument("--steps", type=int, default=5, help="steps of each, after the warm-up")
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    if not args.alone and args.size not in NAMES:
        parser.error(f"open_clip has no model of size {args.size}: give --alone")
    agreement = {}
    if args.alone:
        ours, our = alone(args)
        sides = {"ours": our}
    else:
        ours, our, their, theirs = contestants(args)
        sides = {"ours": our, "open_clip": their}
        agreement = {} if args.compile else agreements(ours, our, their, theirs, args)
    print(json.dumps(measured(ours, sides, args) | {"agreement": agreement}))


def agreements(
    ours: Model, our: Side, their: Side, theirs: torch.nn.Module, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """See `check`; in bf16 too, where that is timed: it has other kernels."""
    small = given(ours, min(args.batch, 8), args.captions, 1000, args.device)
    kinds = ["fp32", "bf16"] if args.dtype == "bf16" else ["fp32"]
    return {kind: check(ours, our, their, theirs, small, half=kind == "bf16") for kind in kinds}


def measured(ours: Model, sides: dict[str, Side], args: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of all sides, which take turns; ratios above 1 where ours is the better."""
    # several batches, so that caption lengths change from step to step as they do in training
    lengths_of, numbers = 0 if args.compile else None, range(min(args.steps, 4))
    batches = [given(ours, args.batch, args.captions, seed, args.device, lengths_of) for seed in numbers]
    for n in range(args.warmup):
        for contestant in sides.values():
            step(contestant, batches[n % len(batches)], args)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for n in range(args.steps):
        turn = list(sides.items())
        for name, contestant in turn if n % 2 else turn[::-1]:
            seconds[name].append(step(contestant, batches[n % len(batches)], args))
    used = {name: memory(contestant, batches[0], args) for name, contestant in sides.items()}
    extra = {}
    if args.device == "cuda":
        extra["work"] = {name: work(contestant, batches[0], args) for name, contestant in sides.items()}
    ratios = {}
    if "open_clip" in sides:
        times = [b / a for a, b in zip(seconds["ours"], seconds["open_clip"], strict=True)]
        ratios = {
            "time_ratio": round(statistics.median(times), 3),
            "memory_ratio": round(used["open_clip"] / used["ours"], 3),
        }
    texts = batches[0].ours.texts
    return {
        "setting": vars(args),
        **ratios,
        "pairs_per_second": {k: round(args.batch / statistics.median(v), 2) for k, v in seconds.items()},
        "seconds": {k: [round(x, 4) for x in v] for k, v in seconds.items()},
        "memory_mib": {k: round(v / 2**20, 1) for k, v in used.items()},
        "memory_is": "peak beyond weights and optimizer" if args.device == "cuda" else "saved for backward",
        "tokens_per_caption": round(len(texts.ids) / len(texts), 2),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **extra,
    }


if __name__ == "__main__":
    main()
