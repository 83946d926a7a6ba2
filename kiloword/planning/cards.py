"""Specifications of GPUs from their data sheets. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2.0**30
NODE = 8  # GPUs that the fast link joins; more talk over the network


@dataclass(frozen=True)
class Card:
    """One GPU, and how it talks to others."""

    name: str
    flops: float  # FLOP/s of dense products in bf16
    flops_fp32: float  # FLOP/s in fp32, as torch computes it by default (no TF32)
    memory: float  # bytes that torch can see
    link: float  # bytes/s a direction to GPUs of the same node
    network: float  # bytes/s a direction to other nodes: a guess, say yours by --bandwidth


CARDS = {
    # an H200 was measured at 790 TFLOP/s of bf16 products: 0.4 of the data sheet is half of what it really does
    "h200": Card("h200", 989e12, 67e12, 139 * GIB, 450e9, 50e9),
    "h100": Card("h100", 989e12, 67e12, 79 * GIB, 450e9, 50e9),
    "a100-80": Card("a100-80", 312e12, 19.5e12, 79 * GIB, 300e9, 25e9),
    "a100-40": Card("a100-40", 312e12, 19.5e12, 39 * GIB, 300e9, 25e9),
    "4090": Card("4090", 165e12, 83e12, 23.5 * GIB, 25e9, 5e9),
    "cpu": Card("cpu", 0.2e12, 0.1e12, 16 * GIB, 5e9, 1e9),  # a small one: say yours by --flops and --memory
}


def card(name: str, flops: float | None = None, memory: float | None = None, bandwidth: float | None = None) -> Card:
    """A card of the table, or one's own.

    Args: flops: TFLOP/s in the run's precision; memory: GiB; bandwidth: GB/s between GPUs. Raises: ValueError.
    """
    given = {"--flops": flops, "--memory": memory, "--bandwidth": bandwidth}
    for flag, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{flag} is {value:g}: expected a number above 0.")
    if name != "custom" and name not in CARDS:
        raise ValueError(f"unknown GPU {name!r}: expected {', '.join(CARDS)}, or custom with --flops and --memory.")
    if name == "custom" and (flops is None or memory is None):
        raise ValueError("--gpu custom needs --flops (TFLOP/s), --memory (GiB) and, of several, --bandwidth (GB/s).")
    base = CARDS.get(name, CARDS["cpu"])
    return Card(
        name,
        base.flops if flops is None else flops * 1e12,
        base.flops_fp32 if flops is None else flops * 1e12,
        base.memory if memory is None else memory * GIB,
        base.link if bandwidth is None else bandwidth * 1e9,
        base.network if bandwidth is None else bandwidth * 1e9,
    )
