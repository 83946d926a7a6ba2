"""One CoCa training step (forward, backward, AdamW) of ours and of open_clip's: same weights, images and captions.

First asserts, in single precision, that both losses and the whole gradient agree; then takes turns and prints the
ratios as JSON. open_clip pads every caption to 76 tokens; ours are as long as Flickr8k's. On a CPU seconds are the
processor's, which other work hardly changes.

    python bench/coca.py --batch 8 --steps 3 --warmup 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from kiloword.interop.open_clip import import_state
from kiloword.interop.state_dicts import translated
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.models.build import build
from kiloword.randomness import key
from kiloword.training.step import Learner
from kiloword.types import Texts
from prolip import in_turns, ratio
from step import Given, Side, cast, given, memory, side

NAMES = {"b32": "coca_ViT-B-32", "l14": "coca_ViT-L-14"}
CONTEXT = 76  # open_clip's CoCa


def contestants(args: argparse.Namespace) -> tuple[Model, dict[str, Side], nn.Module]:
    """Our model, both sides, their model: the same weights."""
    torchvision_ready()
    import open_clip

    theirs = open_clip.create_model(NAMES[args.size], pretrained=None)
    fill(theirs)
    imported = import_state(NAMES[args.size], theirs.state_dict())
    method = preset("coca", imported.settings)
    ours = build(imported.config, method)
    ours.load_state_dict({**ours.state_dict(), **imported.state})
    ours, theirs = ours.to(args.device).train(), theirs.to(args.device).train()
    learner = Learner(ours, method)
    criterion = open_clip.CoCaLoss(caption_loss_weight=2.0, clip_loss_weight=1.0)

    def our_loss(batch: Given) -> Tensor:
        loss: Tensor = learner(batch.ours, learner.counts([batch.ours]))["loss"]
        return loss

    def their_loss(batch: Given) -> Tensor:
        contrast, caption = criterion(**theirs(ours.normalise(batch.ours.images), batch.padded))
        total: Tensor = contrast + caption
        return total

    return ours, {"ours": side(ours, our_loss), "open_clip": side(theirs, their_loss)}, theirs


def fill(theirs: nn.Module) -> None:
    """Matrices of the decoder, which open_clip leaves as they were in memory."""
    for name, p in theirs.named_parameters():
        if name.startswith("text_decoder.") and p.ndim == 2:
            p.data.normal_(std=p.shape[-1] ** -0.5, generator=torch.Generator().manual_seed(key(0, name)))


def batch_of(model: Model, images: int, seed: int, device: str) -> Given:
    """A batch whose packed texts have behind the end what the imported tower reads there."""
    made, text = given(model, images, 1, seed, "cpu"), model.config.text
    tail = [text.special[name] for name in text.extra_tokens]
    ids, bounds = made.ours.texts.ids.tolist(), made.ours.texts.starts.tolist()
    texts = Texts.pack([ids[a:b] + tail for a, b in pairwise(bounds)])
    ours = replace(made.ours, texts=texts).to(device)
    return Given(ours, made.padded[:, :CONTEXT].to(device))


def check(ours: Model, theirs: nn.Module, sides: Mapping[str, Side], batch: Given) -> dict[str, float]:
    """Relative differences of loss and of the whole gradient; asserts that they are rounding."""
    torch.backends.cudnn.allow_tf32 = False  # their patch embedding is a convolution
    losses = {}
    for name, contestant in sides.items():
        contestant.optimizer.zero_grad(set_to_none=True)
        loss = contestant.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses[name] = loss.item()
    given = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    wanted = translated(given, dict(ours.named_parameters()))[0]
    wanted["text_tower.tokens"][ours.config.text.special["mask"]] = 0  # a row that they do not have
    missing = [name for name, p in ours.named_parameters() if p.grad is None or name not in wanted]
    assert not missing, missing
    pairs = [(p.grad, wanted[name]) for name, p in ours.named_parameters() if p.grad is not None]
    difference = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    total = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
    mine, reference = losses["ours"], losses["open_clip"]
    found = {"loss": abs(mine - reference) / reference, "gradient": difference / total}
    assert found["loss"] < 1e-5, found
    assert found["gradient"] < 1e-4, found
    return found


def step(contestant: Side, batch: Given, args: argparse.Namespace) -> None:
    contestant.optimizer.zero_grad(set_to_none=True)
    with cast(args):
        loss = contestant.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    contestant.optimizer.step()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    ours, sides, theirs = contestants(args)
    agreement = check(ours, theirs, sides, batch_of(ours, min(args.batch, 4), 1000, args.device))
    batches = [batch_of(ours, args.batch, seed, args.device) for seed in range(3)]
    runs = {
        name: partial(lambda contestant, n: step(contestant, batches[n % len(batches)], args), contestant)
        for name, contestant in sides.items()
    }
    times = in_turns(runs, args.steps, args.warmup, args.device)
    used = {name: memory(contestant, batches[0], args) for name, contestant in sides.items()}
    texts = batches[0].ours.texts
    return {
        "agreement": agreement,
        "time_ratio": ratio(times, "open_clip", "ours"),  # above 1: ours is faster
        "memory_ratio": round(used["open_clip"] / used["ours"], 3),  # above 1: ours needs less
        "memory_mib": {name: round(value / 2**20, 1) for name, value in used.items()},
        "memory_is": "peak beyond weights and optimizer" if args.device == "cuda" else "saved for backward",
        "pairs_per_second": {name: round(args.batch / statistics.median(t), 2) for name, t in times.items()},
        "seconds": {name: [round(x, 4) for x in t] for name, t in times.items()},
        "tokens_per_caption": round(len(texts.ids) / len(texts) - len(ours.config.text.extra_tokens), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=NAMES, default="b32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=8, help="images, of one caption each")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=5, help="steps of each, after the warm-up")
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    found = {"setting": vars(args), **measure(args)}
    print(json.dumps({**found, "threads": torch.get_num_threads(), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
