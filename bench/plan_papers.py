"""What the papers' runs take, as a page: python bench/plan_papers.py > docs/plan.md"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kiloword.apps.plan.advice import Option, Planner
from kiloword.apps.plan.gpu import total
from kiloword.apps.plan.request import CARDS, GIB
from kiloword.cli.plan import planner_of
from kiloword.terminal import say


@dataclass(frozen=True)
class Setting:
    """A paper's run: what it states, and the command that plans it."""

    name: str
    stated: str
    ours: str  # what the paper leaves open, as it is planned here
    command: str


SETTINGS = (
    Setting(
        "Llip, ViT-B/16",
        '"12.8B pairs", "batch size of 32,768", "128 V100", checkpointed image tower (arXiv:2405.00740, section 4)',
        "A100 of 40 GB, as V100 have no bf16",
        "--recipe llip-b16",
    ),
    Setting("Llip, ViT-L/14", "the same on 128 A100, K 32", "A100 of 80 GB", "--recipe llip-l14"),
    Setting(
        "Llip, ViT-G/14",
        '"256 A100 80GB", K 64',
        "the widths of open_clip's ViT-bigG-14, as in the authors' configuration",
        "--recipe llip-g14",
    ),
    Setting(
        "ProLIP, ViT-B/16, 1.28 B",
        '"512 for each GPU", "32 NVIDIA H100", text 12 x 768, D 768, 64 tokens (arXiv:2410.18857, 4, B.1)',
        "vocabulary 49,408",
        "--recipe prolip-b16-1.28b",
    ),
    Setting(
        "ProLIP, ViT-B/16, 12.8 B",
        '"12.8 billion seen samples"',
        "the same cards",
        "--recipe prolip-b16-12.8b",
    ),
    Setting(
        "SyCoCa, base",
        '"12 million" pairs, "20 epochs", batch "2048", two machines of "8 NVIDIA A100", r 50% (arXiv:2401.02137, 4.1)',
        "patches of 16; A100 of 40 GB",
        "--recipe sycoca-cc12m",
    ),
    Setting(
        "FFF, ViT-B/32",
        '"32 epochs" of "8,096", "8 NVIDIA A100", 14,864,773 images, raw and 5 generated captions (2405.10286)',
        "A100 of 40 GB",
        "--recipe fff-yfcc15m",
    ),
    Setting(
        "CLIP-C, ViT-S/16",
        '"40 epochs on CC3M" (arXiv:2407.01408)',
        "CLIP's text tower, batch 1024, rho 0.3, one A100 of 40 GB: our copy of the paper does not state them",
        "--recipe clip-c-cc3m",
    ),
)

# open_clip's docs/model_profile.csv: million parameters, GFLOP of an image and of a caption of 77 tokens, forward
PROFILES = {
    "b32": ("ViT-B-32", 151.28, 8.82, 5.96),
    "b16": ("ViT-B-16", 149.62, 35.13, 5.96),
    "l16": ("ViT-L-16", 427.74, 123.11, 13.30),
    "l14": ("ViT-L-14", 427.62, 162.03, 13.30),
    "h14": ("ViT-H-14", 986.11, 334.59, 47.09),
    "g14": ("ViT-g-14", 1366.68, 534.06, 47.09),
    "bigg": ("ViT-bigG-14", 2539.57, 967.5, 97.86),
}
RATES = {"b32": 797, "b16": 343, "l14": 72}  # pairs/s and A100 that open_clip's docs/PRETRAINED.md reports

INTRO = """# What a run takes

`kiloword plan METHOD --size L --gpus N --batch B --samples S [--gpu h200]`, or `kiloword plan --recipe NAME`, tells
before machines are rented how many parameters a model has, what arithmetic a pair costs, how memory and traffic of a
GPU come about, how long the run takes at a stated utilisation, and which of ddp and fsdp, checkpointing and
micro-batches is the fastest that fits. It takes the method's settings, `--model.*` and `--optim.*` as `train` does;
`--json FILE` writes every figure. When nothing fits the card, the tables show the nearest way and the command ends with
exit code 2.

This page is what `python bench/plan_papers.py` prints. Everywhere: bf16, AdamW, captions of 20 tokens on average
(start and end included) packed end to end, 0.32 of the data sheet's FLOP/s for all arithmetic, recomputation included:
the mean of what an H200 reached at b32, b16 and l14 ([bench.md](bench.md#on-a-gpu)). A pair is an image with its
captions; a multiply-add is two FLOP. Losses compute in fp32, at the card's fp32 speed: on an A100 Llip's pair loss, 2%
of the arithmetic of G/14, takes a quarter of its time, and a quarter of b16's arithmetic most of its. What a recipe
sets, and where the paper states it: `kiloword recipes show NAME`.
"""

CHECKS = """## What the figures rest on

Nothing in the plan knows a method: it runs a micro-batch forward and backward by the learner's own code on tensors
without content (torch's FakeTensorMode; `kiloword/apps/plan`), for a GPU with the kernels that a GPU would run, and one
block of each shape of the pair loss. Counted are the FLOPs of products and attention, in-place ones too, and each
storage that autograd saves, so a method of your own is planned like any other; a term that reads values of tensors is
named as not counted. A block of a tower is measured once for each kind and shape of input; micro-batches above 256
images lie on a line through two sizes. Weights, optimizer states, gathered shards and traffic are sums over parameters
and features (`gpu.py`). `python bench/plan.py` compares with real steps: FLOPs, weights, gradients and optimizer states
(exact), activations (within 0.1% without checkpointing, 6% with it) and the peak (within 15%). On an H200 (`python
bench/plan.py --device cuda`, nine settings): activations within 0.02%, the peak within 2.1%, but 5.9% for l14 with
whole checkpointing.

What is not in it: data loading (`kiloword data stats` and the run's own log say how fast that is), evaluation,
`--freeze` (but trunks, `--image-tower` and `--text-tower`, are taken as frozen), LoRA, dropped patches, stored tokens,
`--compile` (which keeps less), the network's latency, stragglers and failures. The utilisation is an
assumption, not a forecast: the last table shows that public runs reach far less. The network between nodes is a guess
by card (`kiloword/apps/plan/request.py`); set yours with `--bandwidth`.
"""


def page() -> str:
    """The whole page."""
    planned = [(s, planner := planner_of(s.command.split()), planner.options()[0]) for s in SETTINGS]
    parts = [INTRO, "## The papers' settings\n", _stated(), _commands(), "## What they take\n"]
    parts += [
        _summary(planned),
        "Memory of a GPU, GiB:\n",
        _memory(planned),
        "Arithmetic of a pair, GFLOP forward and backward:\n",
    ]
    parts += [_work(planned), "## Against published figures\n", _profiles(), _speeds(planned), CHECKS]
    return "\n".join(parts)


Planned = Sequence[tuple[Setting, Planner, Option]]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: names on the left, numbers on the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _stated() -> str:
    lines = ["| run | the paper | left open, planned as |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {s.name} | {s.stated} | {s.ours} |" for s in SETTINGS)]) + "\n"


def _commands() -> str:
    return "```\n" + "".join(f"kiloword plan {s.command}\n" for s in SETTINGS) + "```\n"


def _summary(planned: Planned) -> str:
    columns = ("run", "M parameters", "GFLOP a pair", "padded", "advice", "GiB", "pairs/s", "days", "GPU hours")
    rows = []
    for setting, planner, best in planned:
        padded, days = planner.padded(best), planner.days(best)
        layout = best.layout
        micro_batches = f" x {layout.micro_batches}" if layout.micro_batches > 1 else ""
        advice = f"{layout.parallel}, {layout.checkpointing}, micro-batch {best.micro}{micro_batches}"
        cells = [setting.name, f"{total(planner.learner) / 1e6:.1f}"]
        cells += [f"{option.step.needed / planner.images / 1e9:.4g}" for option in (best, padded)]
        cells += [advice, f"{best.bytes / GIB:.1f} of {planner.card.memory / GIB:.0f}", f"{planner.rate(best):,.0f}"]
        rows.append([*cells, f"{days:.2f}", f"{24 * days * planner.plan.gpus:,.0f}"])
    return markdown(columns, rows)


def _memory(planned: Planned) -> str:
    names = list(dict.fromkeys(name for _, _, best in planned for name in best.memory))
    rows = [[name, *(f"{best.memory.get(name, 0.0) / GIB:.2f}" for _, _, best in planned)] for name in names]
    return markdown(("part", *(setting.name for setting, _, _ in planned)), rows)


def _work(planned: Planned) -> str:
    found = [
        {w.name: (w.forward + w.backward) / planner.images / 1e9 for w in best.step.parts}
        for _, planner, best in planned
    ]
    names = [name for name in dict.fromkeys(n for work in found for n in work) if any(work.get(name) for work in found)]
    rows = [[name, *(f"{work[name]:.3g}" if name in work else "" for work in found)] for name in names]
    return markdown(("part", *(setting.name for setting, _, _ in planned)), rows)


def _profiles() -> str:
    rows = []
    for size, (name, millions, image, text) in PROFILES.items():
        planner = planner_of(f"clip --size {size} --samples 1e9 --tokens 77 --batch 1".split())
        work = {w.name: w.forward / 1e9 for w in planner.option("ddp", "none", 1).step.parts}
        ours = total(planner.learner) / 1e6
        cells = [f"{size}, {name}", f"{ours:.2f}", f"{millions:.2f}"]
        cells += [f"{work['image tower']:.2f}", f"{image:.2f}", f"{work['text tower']:.2f}", f"{text:.2f}"]
        rows.append(cells)
    columns = ("size", "M parameters", "open_clip's", "GFLOP image", "open_clip's", "GFLOP 77 tokens", "open_clip's")
    return "open_clip's `docs/model_profile.csv`, forward pass:\n\n" + markdown(columns, rows)


def _speeds(planned: Planned) -> str:
    """Utilisation that published speeds imply."""
    rows, peak = [], CARDS["a100-80"].flops
    for size, rate in RATES.items():
        planner = planner_of(f"clip --size {size} --samples 1e9 --tokens 77 --batch 1".split())
        work = planner.option("ddp", "none", 1).step.needed
        rows.append([f"open_clip {size}, padded", f"{rate} pairs/s an A100", f"{rate * work / peak:.3f}"])
    for setting, planner, best in planned:
        if setting.name.startswith("ProLIP") and planner.plan.samples < 2e9:
            used = best.step.needed / planner.images * planner.plan.samples / (86400 * planner.plan.gpus)
            rows.append([setting.name, '"about one day" on 32 H100', f"{used / planner.card.flops:.3f}"])
        if "G/14" in setting.name:
            used = best.step.needed / planner.images * planner.plan.samples / (11.99e4 * 3600)
            cost = "11.99e4 A100 hours (its figure 8b, our copy does not show for which run)"
            rows.append([setting.name, cost, f"{used / planner.card.flops:.3f}"])
    intro = "Utilisation that published speeds imply (arithmetic of the method alone, over the data sheet's bf16):\n\n"
    return intro + markdown(("run", "published", "utilisation"), rows)


if __name__ == "__main__":
    say(*page().splitlines())
