"""Print a plan as tables, or as a dictionary for `--json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from kiloword.apps.plan import gpu
from kiloword.apps.plan.advice import CLASSES, Option, Planner
from kiloword.apps.plan.request import GIB, NODE
from kiloword.files import write_atomic
from kiloword.terminal import say
from kiloword.terminal.screen import Screen

WIDE = 160  # columns where the output is no terminal


Sheet = tuple[str, Sequence[str], Sequence[Sequence[str]], int | None]
"""Title, columns, rows of a name and numbers, and the place of the row that counts most."""


def show(planner: Planner) -> None:
    """Print a plan, and write it where `--json` says. Raises: ValueError, after both, when nothing fits the card."""
    options = planner.options()
    screen = Screen(WIDE)
    for title, columns, rows, most in sheets(planner, options):
        table = Table(box=None, header_style="bold", pad_edge=False)
        for n, column in enumerate(columns):
            table.add_column(column, justify="right" if n else "left")
        for n, row in enumerate(rows):
            table.add_row(*row, style="bold" if most is not None and n == most % len(rows) else None)
        screen.print(title, style="bold", soft_wrap=True)
        screen.print(table)
        screen.print()
    say(*sentences(planner, options))
    if planner.plan.json is not None:
        write_atomic(planner.plan.json, (json.dumps(figures(planner, options), indent=1) + "\n").encode())
    if not options[0].fits:
        raise ValueError(_too_large(planner, options[0]))


def sheets(planner: Planner, options: list[Option]) -> Iterator[Sheet]:
    """Parameters, arithmetic, memory, traffic, texts, alternatives; of the first option, which is the advice."""
    best, parameters = options[0], gpu.parts(planner.learner)
    numbers = [(name, f"{n / 1e6:.2f}") for name, n in parameters.items() if n]
    yield "parameters", ("part", "M"), [*numbers, ("total", f"{gpu.total(planner.learner) / 1e6:.2f}")], -1
    yield _arithmetic(planner, best)
    held = [(name, f"{value / GIB:.3f}") for name, value in best.memory.items()]
    yield f"memory of a GPU: {described(best)}", ("part", "GiB"), [*held, ("total", f"{best.bytes / GIB:.2f}")], -1
    if best.traffic:
        sent = [(name, f"{value / 1e6:.1f}") for name, value in best.traffic.items()]
        yield "traffic of a GPU and step", ("what", "MB sent"), sent, None
    yield _texts(planner, best)
    yield _inference(planner)
    yield _alternatives(planner, options)


def _arithmetic(planner: Planner, best: Option) -> Sheet:
    """Of a pair: an image with its captions."""
    images, total, n = planner.images * 1e9, best.step.total, planner.captions
    rows = [
        (w.name, w.group, f"{w.forward / images:.3g}", f"{w.backward / images:.3g}", _percent(w.both, total))
        for w in best.step.parts
        if w.forward
    ]
    rows += [(name, "", f"{v / images:.3g}", "", _percent(v, total)) for name, v in best.step.twice.items()]
    rows.append(("total", "", f"{total / images:.4g}", "", "100.0"))
    captions = f"{n} caption{'s' if n > 1 else ''} of {planner.tokens:.4g} tokens"
    columns = ("part", "of", "GFLOP forward", "backward", "share %")
    return f"arithmetic of a pair: an image with {captions}", columns, rows, -1


def _percent(part: float, total: float) -> str:
    return f"{100 * part / total:.1f}"


def _texts(planner: Planner, best: Option) -> Sheet:
    """Captions packed end to end, as trained, against captions padded to the context."""
    context, rows = planner.learner.model.config.text.context, []
    for name, tokens, option in (
        ("packed, as trained", planner.tokens, best),
        ("padded", context, planner.padded(best)),
    ):
        work, held = option.step.needed / planner.images / 1e9, option.memory["activations"] / GIB
        rows.append((name, f"{tokens:.4g}", f"{work:.4g}", f"{held:.2f}", f"{planner.rate(option):,.0f}"))
    return "captions", ("", "tokens each", "GFLOP a pair", "activations GiB", "pairs/s"), rows, 0


def _inference(planner: Planner) -> Sheet:
    """Zero-shot classification of an image, as in Llip's figures 1b and 8a."""
    cost = planner.inference
    names = {
        "encode the image": cost["image"],
        f"score {CLASSES:,} classes": cost["scores"],
        "an image": tuple(map(sum, zip(cost["image"], cost["scores"], strict=True))),
        f"once: encode {CLASSES:,} prompts": cost["texts"],
    }
    rows = [(name, f"{flop / 1e9:.4g}", f"{1e3 * seconds:.3g}") for name, (flop, seconds) in names.items()]
    title = f"inference: zero-shot classification of an image, prompts of {planner.tokens:.4g} tokens"
    return title, ("part", "GFLOP", "ms"), rows, 2


def _alternatives(planner: Planner, options: list[Option]) -> Sheet:
    columns = ("parallel, checkpointing", "images x micro-batches", "GiB", "fits", "GFLOP a pair", "pairs/s", "days")
    rows = [
        (
            f"{option.layout.parallel}, {option.layout.checkpointing}",
            f"{option.micro} x {option.layout.micro_batches}",
            f"{option.bytes / GIB:.1f}",
            "yes" if option.fits else "no",
            f"{option.step.total / planner.images / 1e9:.4g}",
            f"{planner.rate(option):,.0f}",
            f"{planner.days(option):.2f}",
            f"{24 * planner.days(option) * planner.plan.gpus:,.0f}",
        )
        for option in options
    ]
    return f"alternatives: {planner.card.memory / GIB:g} GiB a GPU", (*columns, "GPU hours"), rows, 0


def described(option: Option) -> str:
    layout = option.layout
    return (
        f"{layout.parallel}, checkpointing {layout.checkpointing}, micro-batch {option.micro} x {layout.micro_batches}"
    )


def sentences(planner: Planner, options: list[Option]) -> list[str]:
    """What it comes to, where it fits, and what is assumed."""
    plan, best, card = planner.plan, options[0], planner.card
    sections = [_advice(planner, best)] if best.fits else []
    busy = "arithmetic" if best.compute >= 0.5 * best.seconds else "traffic"
    sections.append(
        f"A step takes {best.seconds:.3g} s, {best.compute:.3g} s of it arithmetic, at {plan.utilisation:g} of "
        f"{(card.flops if plan.precision == 'bf16' else card.flops_fp32) / 1e12:g} TFLOP/s and, of losses, of "
        f"{card.flops_fp32 / 1e12:g} (fp32); {busy} is the bottleneck. Weights and gradients travel meanwhile, "
        f"features do not, at {(card.link if plan.gpus <= NODE else card.network) / 1e9:g} GB/s a GPU."
    )
    if uncounted := sorted(planner.simulation.uncounted):
        sections.append(f"Not counted, because they read values of tensors: {', '.join(uncounted)}.")
    return sections


def _too_large(planner: Planner, best: Option) -> str:
    smaller = "a smaller --micro or --batch" if planner.plan.micro else "a smaller --batch"
    return (
        f"nothing fits: {described(best)} takes {best.bytes / GIB:.1f} GiB of {planner.card.memory / GIB:g}. "
        f"Take more --gpus (fsdp divides weights over them), {smaller}, or a larger --gpu."
    )


def _advice(planner: Planner, best: Option) -> str:
    plan = planner.plan
    days, most = planner.days(best), planner.largest_micro(best)
    return (
        f"Take {described(best)}: {best.bytes / GIB:.1f} GiB of {planner.card.memory / GIB:.0f}, "
        f"{planner.rate(best):,.0f} pairs/s, {days:.2f} days for {plan.samples:.4g} pairs, "
        f"{24 * days * plan.gpus:,.0f} GPU hours. The largest micro-batch is {most} of a share of {planner.images}."
    )


def figures(planner: Planner, options: list[Option]) -> dict[str, Any]:
    """Everything as plain data; bytes, FLOP, seconds."""
    plan, best = planner.plan, options[0]
    return {
        "method": planner.method.name,
        **{name: getattr(plan, name) for name in ("size", "gpus", "batch", "samples", "utilisation")},
        "card": planner.card.name,
        "tokens": planner.tokens,
        "captions": planner.captions,
        "parameters": gpu.parts(planner.learner),
        "flop_a_pair": best.step.needed / planner.images,
        "flop_a_pair_padded": planner.padded(best).step.needed / planner.images,
        "inference": {name: {"flop": f, "seconds": s} for name, (f, s) in planner.inference.items()},
        "largest_micro": planner.largest_micro(best),
        "options": [_option(planner, option) for option in options],
    }


def _option(planner: Planner, option: Option) -> dict[str, Any]:
    days = planner.days(option)
    return {
        "parallel": option.layout.parallel,
        "checkpointing": option.layout.checkpointing,
        "micro": option.micro,
        "micro_batches": option.layout.micro_batches,
        "fits": option.fits,
        "memory": option.memory,
        "bytes": option.bytes,
        "traffic": option.traffic,
        "work": [asdict(work) for work in option.step.parts],
        "done_again": option.step.twice,
        "seconds": option.seconds,
        "seconds_of_arithmetic": option.compute,
        "pairs_per_second": planner.rate(option),
        "days": days,
        "gpu_hours": 24 * days * planner.plan.gpus,
    }
