"""Print a plan as tables, or as a dictionary for `--json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kiloword.checkpoint.files import write_atomic
from kiloword.planning import gpu
from kiloword.planning.advice import Option, Planner, Work
from kiloword.planning.request import GIB, NODE
from kiloword.terminal import say
from kiloword.terminal.screen import Screen

WIDE = 160  # columns where the output is no terminal


@dataclass(frozen=True)
class Sheet:
    """A table: the first column is names, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    marked: int | None = None  # row that counts most


def show(planner: Planner) -> None:
    """Print a plan, and write it where `--json` says. Raises: ValueError, after both, when nothing fits the card."""
    options = planner.options()
    screen = Screen(WIDE)
    for sheet in sheets(planner, options):
        screen.print(sheet.title, style="bold", soft_wrap=True)
        screen.print(_rich(sheet))
        screen.print()
    say(*sentences(planner, options))
    if planner.plan.json is not None:
        write_atomic(planner.plan.json, (json.dumps(figures(planner, options), indent=1) + "\n").encode())
    if not options[0].fits:
        raise ValueError(_too_large(planner, options[0]))


def _rich(sheet: Sheet) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for n, column in enumerate(sheet.columns):
        table.add_column(column, justify="right" if n else "left")
    for n, row in enumerate(sheet.rows):
        table.add_row(*row, style="bold" if n == sheet.marked else None)
    return table


def sheets(planner: Planner, options: list[Option]) -> list[Sheet]:
    """Parameters, arithmetic, memory, traffic, texts, alternatives; of the first option, which is the advice."""
    best = options[0]
    sections = [_parameters(planner), _arithmetic(planner, best), _memory(best)]
    sections += [_traffic(best)] if best.traffic else []
    return [*sections, _texts(planner, best), _alternatives(planner, options)]


def _parameters(planner: Planner) -> Sheet:
    rows = [(name, f"{n / 1e6:.2f}") for name, n in gpu.parts(planner.learner).items() if n]
    rows.append(("total", f"{gpu.total(planner.learner) / 1e6:.2f}"))
    return Sheet("parameters", ("part", "M"), rows, len(rows) - 1)


def _arithmetic(planner: Planner, best: Option) -> Sheet:
    """Of a pair: an image with its captions."""
    images, total = planner.images * 1e9, best.step.total
    rows = [_row(work, images, total) for work in best.step.parts if work.forward]
    again = twice(best).items()
    rows += [(name, "", f"{v / images:.3g}", "", f"{100 * v / total:.1f}") for name, v in again]
    rows.append(("total", "", f"{total / images:.4g}", "", "100.0"))
    title = f"arithmetic of a pair: {_captions(planner)}"
    return Sheet(title, ("part", "of", "GFLOP forward", "backward", "share %"), rows, len(rows) - 1)


def _row(work: Work, images: float, total: float) -> tuple[str, ...]:
    both = work.forward + work.backward
    parts = (f"{work.forward / images:.3g}", f"{work.backward / images:.3g}", f"{100 * both / total:.1f}")
    return (work.name, work.group, *parts)


def twice(option: Option) -> dict[str, float]:
    """FLOP of a step and GPU that are no forward or backward pass of the method."""
    sections = {
        "recomputation of checkpointing": option.step.again,
        "first pass of micro-batches": option.step.replayed,
        "optimizer (Muon)": option.step.optimizer,
    }
    return {name: value for name, value in sections.items() if value}


def _memory(best: Option) -> Sheet:
    rows = [(name, f"{value / GIB:.3f}") for name, value in best.memory.items()]
    rows.append(("total", f"{best.bytes / GIB:.2f}"))
    return Sheet(f"memory of a GPU: {described(best)}", ("part", "GiB"), rows, len(rows) - 1)


def _traffic(best: Option) -> Sheet:
    rows = [(name, f"{value / 1e6:.1f}") for name, value in best.traffic.items()]
    return Sheet("traffic of a GPU and step", ("what", "MB sent"), rows)


def _texts(planner: Planner, best: Option) -> Sheet:
    """Captions packed end to end, as trained, against captions padded to the context."""
    context, rows = planner.learner.model.config.text.context, []
    padded = planner.padded(best)
    for name, tokens, option in (("packed, as trained", planner.tokens, best), ("padded", context, padded)):
        work = option.step.needed / planner.images / 1e9
        held = option.memory["activations"] / GIB
        rows.append((name, f"{tokens:.4g}", f"{work:.4g}", f"{held:.2f}", f"{planner.rate(option):,.0f}"))
    return Sheet("captions", ("", "tokens each", "GFLOP a pair", "activations GiB", "pairs/s"), rows, 0)


def _alternatives(planner: Planner, options: list[Option]) -> Sheet:
    columns = ("parallel, checkpointing", "images x micro-batches", "GiB", "fits", "GFLOP a pair", "pairs/s", "days")
    rows = []
    for option in options:
        days = planner.days(option)
        split = f"{option.micro} x {option.step.micro_batches}"
        cells = [f"{option.layout.parallel}, {option.layout.checkpointing}", split]
        cells += [f"{option.bytes / GIB:.1f}", "yes" if option.fits else "no"]
        cells += [f"{option.step.total / planner.images / 1e9:.4g}", f"{planner.rate(option):,.0f}"]
        rows.append([*cells, f"{days:.2f}", f"{24 * days * planner.plan.gpus:,.0f}"])
    return Sheet(f"alternatives: {planner.card.memory / GIB:g} GiB a GPU", (*columns, "GPU hours"), rows, 0)


def described(option: Option) -> str:
    layout, number = option.layout, option.step.micro_batches
    return f"{layout.parallel}, checkpointing {layout.checkpointing}, micro-batch {option.micro} x {number}"


def _captions(planner: Planner) -> str:
    n = planner.captions
    return f"an image with {n} caption{'s' if n > 1 else ''} of {planner.tokens:.4g} tokens"


def sentences(planner: Planner, options: list[Option]) -> list[str]:
    """What it comes to, where it fits, and what is assumed."""
    plan, best, card = planner.plan, options[0], planner.card
    sections = [_advice(planner, best)] if best.fits else []
    busy = "arithmetic" if best.compute >= 0.5 * best.seconds else "traffic"
    sections.append(
        f"A step takes {best.seconds:.3g} s, {best.compute:.3g} s of it arithmetic, at {plan.utilisation:g} of "
        f"{(card.flops if plan.precision == 'bf16' else card.flops_fp32) / 1e12:g} TFLOP/s and, of losses, of "
        f"{card.flops_fp32 / 1e12:g} (fp32); what counts is {busy}. Weights and gradients travel meanwhile, features "
        f"do not, at {(card.link if plan.gpus <= NODE else card.network) / 1e9:g} GB/s a GPU."
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
        "size": plan.size,
        "gpus": plan.gpus,
        "card": planner.card.name,
        "batch": plan.batch,
        "samples": plan.samples,
        "utilisation": plan.utilisation,
        "tokens": planner.tokens,
        "captions": planner.captions,
        "parameters": gpu.parts(planner.learner),
        "flop_a_pair": best.step.needed / planner.images,
        "flop_a_pair_padded": planner.padded(best).step.needed / planner.images,
        "largest_micro": planner.largest_micro(best),
        "options": [_option(planner, option) for option in options],
    }


def _option(planner: Planner, option: Option) -> dict[str, Any]:
    return {
        "parallel": option.layout.parallel,
        "checkpointing": option.layout.checkpointing,
        "micro": option.micro,
        "micro_batches": option.step.micro_batches,
        "fits": option.fits,
        "memory": option.memory,
        "bytes": option.bytes,
        "traffic": option.traffic,
        "work": [
            {"name": w.name, "group": w.group, "forward": w.forward, "backward": w.backward} for w in option.step.parts
        ],
        "done_again": twice(option),
        "seconds": option.seconds,
        "seconds_of_arithmetic": option.compute,
        "pairs_per_second": planner.rate(option),
        "days": planner.days(option),
        "gpu_hours": 24 * planner.days(option) * planner.plan.gpus,
    }
