"""Peak memory of the pair loss alone, forward and backward: in blocks against all pairs at once.

First asserts that losses and gradients agree. Then prints, by number of texts, the features and their gradients (one
number each, and one more for what backward may hand on: 3 T D numbers in all, and 3 I D of the images), the peak of
both ways, and what the blocks take beyond features and gradients: it must not grow with the number of texts. On a CPU
every allocation of torch is counted by its profiler; on a GPU its allocator knows.

    python bench/loss.py --images 1024 --texts 4096 8192 16384 32768
    python bench/loss.py --head gaussian contextual --loss sigmoid matching
    python bench/loss.py --device cuda --images 1024 --texts 4096 8192 16384 32768 65536
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import sizes
from kiloword.losses.pairs import Balanced, Blocks, sigmoid_loss, softmax_loss, supcon_loss
from kiloword.methods.method import annotated
from kiloword.methods.pcmepp import matching_loss
from kiloword.methods.registry import preset
from kiloword.model.heads import Head
from kiloword.model.model import initialise
from kiloword.types import Features, PairLoss
from plan_allocated import peak

PRESETS = {"single": "siglip", "gaussian": "prolip", "contextual": "llip"}
LOSSES: dict[str, PairLoss] = {
    "softmax": softmax_loss,
    "sigmoid": sigmoid_loss,
    "supcon": supcon_loss,
    "supcon-in": partial(supcon_loss, form="in"),
    "matching": matching_loss,
    "balanced": lambda pairs, positives: sigmoid_loss(pairs, Balanced(positives).bind(pairs)),  # type: ignore[arg-type]
}
FULL = 4 << 30  # bytes of one [I, T] beyond which the full form is left out
MIB = 1 << 20

Run = Callable[[], list[Tensor]]
"""The loss and its gradients by all that learns."""


def make(
    args: argparse.Namespace, head_name: str, dtype: torch.dtype = torch.float32
) -> tuple[Head, Features, Features]:
    """A head, and features as `Learner.pair_inputs` gives them: text t was written for image t % I."""
    size = sizes()["debug"]
    size = replace(size, head=replace(size.head, dim=args.dim))
    slots = preset(PRESETS[head_name])
    head = slots.head(slots.shape(size))
    initialise(head, 0)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    images: Features = {"vec": F.normalize(numbers(args.images, args.dim), dim=1)}
    texts: Features = {"vec": F.normalize(numbers(args.texts_now, args.dim), dim=1)}
    if head_name == "gaussian":
        images["log_var"], texts["log_var"] = (numbers(*side["vec"].shape) - 8 for side in (images, texts))
    if head_name == "contextual":
        pooling = head.pooling
        settings = pooling.settings  # type: ignore[attr-defined]
        d = args.dim // settings.heads
        images |= {name: numbers(args.images, settings.k, settings.heads, d) for name in ("keys", "values")}
        texts["query"] = numbers(args.texts_now, settings.heads, d)
    head.to(args.device, dtype)
    for side in (images, texts):
        side.update({k: v.to(args.device, dtype).requires_grad_() for k, v in side.items()})
    images["position"] = torch.arange(args.images, device=args.device)
    texts["position"] = torch.arange(args.texts_now, device=args.device) % args.images
    return head, images, texts


def leaves(head: Head, images: Features, texts: Features) -> list[Tensor]:
    every = [*images.values(), *texts.values(), *head.parameters()]
    return [x for x in every if x.requires_grad]


def in_blocks(loss: PairLoss, head: Head, images: Features, texts: Features, chunk: int) -> Run:
    def run() -> list[Tensor]:
        total = loss(Blocks(head, images, texts, chunk), annotated)
        value = total.sum / total.count
        return [value.detach(), *torch.autograd.grad(value, leaves(head, images, texts), allow_unused=True)]

    return run


def at_once(name: str, head: Head, images: Features, texts: Features) -> Run:
    """The plain formula over all pairs, by autograd."""

    def run() -> list[Tensor]:
        z = head.logits(head.score(images, texts))
        y = (images["position"][:, None] == texts["position"]).to(z.dtype)
        if name == "sigmoid":
            value = -F.logsigmoid((2 * y - 1) * z).sum(1).mean()
        else:
            by_image = -(y / y.sum(1, keepdim=True) * z.log_softmax(1)).sum(1).mean()
            value = 0.5 * (by_image - (y / y.sum(0) * z.log_softmax(0)).sum(0).mean())
        return [value.detach(), *torch.autograd.grad(value, leaves(head, images, texts), allow_unused=True)]

    return run


def check(args: argparse.Namespace) -> None:
    """Blocks and the plain formula agree in double precision."""
    small = argparse.Namespace(**{**vars(args), "images": 24, "texts_now": 60, "dim": 64})
    for name in ("softmax", "sigmoid"):
        head, images, texts = make(small, "single", torch.float64)
        found = in_blocks(LOSSES[name], head, images, texts, 16)()
        for a, b in zip(found, at_once(name, head, images, texts)(), strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-10, atol=1e-12)


def measure(args: argparse.Namespace, head_name: str, loss: str, texts_now: int) -> dict[str, float | str | None]:
    """One row: bytes."""
    made = make(argparse.Namespace(**{**vars(args), "texts_now": texts_now}), head_name)
    features = sum(x.numel() * x.element_size() for x in leaves(*made))
    blocks = peak(in_blocks(LOSSES[loss], *made, args.chunk), args.device)
    full = None
    if loss in ("softmax", "sigmoid") and head_name != "contextual" and args.images * texts_now * 4 <= FULL:
        full = peak(at_once(loss, *made), args.device)
    beyond = blocks - features  # of the gradients
    return {
        "head": head_name, "loss": loss, "images": args.images, "texts": texts_now, "features": features,
        "blocks": blocks, "full": full, "blocks_beyond": beyond,
        "full_over_blocks": None if full is None else round((features + full) / (features + blocks), 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", nargs="+", default=["single"], choices=PRESETS)
    parser.add_argument("--loss", nargs="+", default=["softmax", "sigmoid"], choices=LOSSES)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--texts", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=0, help="rows and columns of a block, 0: what the head takes")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    check(args)
    print("MiB               texts   features  +gradients   blocks: peak   beyond   all at once: peak   full/blocks")
    rows = []
    for head in args.head:
        for loss in args.loss:
            for texts in args.texts:
                row = measure(args, head, loss, texts)
                rows.append(row)
                print(line(row), flush=True)
    print(json.dumps({"device": args.device, "dim": args.dim, "chunk": args.chunk, "rows": rows}))


def line(row: dict[str, float | str | None]) -> str:
    def mib(name: str) -> str:
        value = row[name]
        return "-" if value is None else f"{float(value) / MIB:.1f}"

    twice = 2 * float(row["features"] or 0) / MIB
    whole = (float(row["features"] or 0) + float(row["blocks"] or 0)) / MIB
    full = "-" if row["full"] is None else f"{(float(row['features'] or 0) + float(row['full'])) / MIB:.1f}"
    return (
        f"{row['head']:10s} {row['loss']:9s} {row['texts']:6d} {mib('features'):>8s} {twice:11.1f} {whole:14.1f} "
        f"{mib('blocks_beyond'):>8s} {full:>19s} {row['full_over_blocks'] or '-':>13}"
    )


if __name__ == "__main__":
    main()
