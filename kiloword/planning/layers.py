"""Arithmetic and saved activations of one layer.

A product [n, a] x [a, b] costs 2 n a b FLOP forward and twice that backward, once for each factor's gradient. Norms,
activations and softmax are omitted, as in torch's FlopCounterMode: they are below 1% of the arithmetic.

Autograd saves the inputs of products and norms and what attention and activations need, each
storage once. `r` are bytes of the residual stream, `a` of what products read and write (`Kernels`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kiloword.planning.shapes import Kernels, Sequences


@dataclass(frozen=True)
class Work:
    """What a part of a step costs on one GPU, for one micro-batch."""

    name: str = ""
    group: str = ""  # towers, decoders, head, pair loss, terms
    forward: float = 0.0  # FLOP
    backward: float = 0.0  # FLOP
    kept: float = 0.0  # bytes that wait for the backward pass
    whole: float = 0.0  # the same where blocks keep their inputs alone
    selective: float = 0.0  # the same where blocks keep products and attention
    again: float = 0.0  # FLOP that "whole" repeats in the backward pass
    block: float = 0.0  # bytes inside one block, the largest: there again while "whole" repeats it
    single: float = 0.0  # of the FLOP, those of products in full precision whatever the run's is
    first: bool = False  # part of encoding: done twice where micro-batches need all features first

    def __add__(self, other: Work) -> Work:
        """Both, under the name of the first."""
        return replace(
            self,
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            kept=self.kept + other.kept,
            whole=self.whole + other.whole,
            selective=self.selective + other.selective,
            again=self.again + other.again,
            single=self.single + other.single,
            block=max(self.block, other.block),
        )

    def times(self, n: float) -> Work:
        """n of the same, one after the other."""
        names = ("forward", "backward", "kept", "whole", "selective", "again", "single")
        return replace(self, **{name: n * getattr(self, name) for name in names})

    def keeps(self, checkpointing: str) -> float:
        return {"none": self.kept, "whole": self.whole, "selective": self.selective}[checkpointing]


def outside(forward: float, kept: float, backward: float | None = None) -> Work:
    """What no block contains: kept whatever the checkpointing. backward: twice the forward pass when None."""
    return Work(
        forward=forward, backward=2 * forward if backward is None else backward, kept=kept, whole=kept, selective=kept
    )


def linear(tokens: float, inputs: float, outputs: float) -> float:
    """FLOP of a linear layer on a number of tokens."""
    return 2 * tokens * inputs * outputs


def attention_kept(
    q: Sequences, k_tokens: float, k_slots: float, k_copied: bool, width: float, heads: float, kernels: Kernels
) -> float:
    """Bytes that attention keeps, with its input and its output, which the layer behind it keeps.

    Fused kernels keep q, k and v, which are views of the projections' outputs, their own output, and for every query
    and head one logarithm. Where texts are padded, the copies are kept beside what was copied, and the output beside
    its packed copy. Plain products keep copies of q, k and v head by head and the weights.
    """
    a, r = kernels.product, kernels.stream
    read = (q.tokens + 2 * k_tokens) * width * a  # the projections' outputs
    out = q.tokens * width * a
    copies = ((q.slots if q.copied else 0) + 2 * (k_slots if k_copied else 0)) * width * a
    if kernels.plain:
        sources = (q.tokens if q.copied else 0) + (2 * k_tokens if k_copied else 0)
        return (sources + q.slots + 2 * k_slots) * width * a + q.pairs * heads * a + out
    padded_out = q.slots * width * a if q.copied else 0
    return read + copies + out + padded_out + q.slots * heads * r


def block(width: int, heads: int, mlp: int, seq: Sequences, kernels: Kernels, passed: float | None = None) -> Work:
    """One pre-norm block: x + out(attention(qkv(norm1 x))), then x + proj(act(fc(norm2 x))).

    FLOP forward, n tokens and p pairs: 2 n (3 W^2 + W^2) + 4 p W + 4 m W M, where m tokens go on to the MLP.
    Kept: both norms' inputs (r W each) and statistics, their outputs (a W each), what attention keeps, and before and
    behind the activation 2 a M. "whole" keeps r W, the block's input; "selective" what attention keeps and the outputs
    of out, fc and proj beside it. Repeating stops before proj, whose output nobody needs.

    Args: passed: tokens that go on to the MLP, all when None (the last layer of a painter).
    """
    n, a, r = seq.tokens, kernels.product, kernels.stream
    m = n if passed is None else passed
    attention = attention_kept(seq, n, seq.slots, seq.copied, width, heads, kernels)
    proj = linear(m, mlp, width)
    forward = linear(n, width, 4 * width) + 4 * seq.pairs * width + linear(m, width, mlp) + proj
    kept = (n + m) * width * (r + a) + 2 * (n + m) * r + attention + 2 * m * mlp * a
    products = attention + n * width * a + m * (mlp + width) * a
    return _in_block(forward, proj, kept, n * width * r, products)


def _in_block(forward: float, last: float, kept: float, stream: float, products: float) -> Work:
    """Work inside a block, in FLOP and bytes, which checkpointing repeats but for its last product.

    Args: last: FLOP of that product; kept: bytes without checkpointing; stream: of the block's input; products: of what
    selective checkpointing keeps beside it.
    """
    return Work(
        forward=forward,
        backward=2 * forward,
        kept=kept,
        whole=stream,
        selective=stream + products,
        again=forward - last,
        block=kept,
    )


@dataclass(frozen=True)
class AttendedTokens:
    """What queries look at: dense rows or packed texts."""

    tokens: float
    slots: float
    copied: bool
    pairs: float  # of a query and a key of this memory
    width: int


def cross_block(width: int, heads: int, mlp: int, seq: Sequences, memory: AttendedTokens, kernels: Kernels) -> Work:
    """One block that looks at a memory: x + out(attention(q(norm1 x), kv(norm m))), then the MLP.

    FLOP forward, n queries, k keys of width V, p pairs: 2 n 2 W^2 + 4 p W + 4 n W M, and for keys and values
    2 k V 2 W, which are made outside the block and stay kept: the norm's output a k V, its statistics, and 2 a k W.
    """
    n, a, r = seq.tokens, kernels.product, kernels.stream
    looking = replace(seq, pairs=memory.pairs)
    attention = attention_kept(looking, memory.tokens, memory.slots, memory.copied, width, heads, kernels)
    proj = linear(n, mlp, width)
    forward = linear(n, width, 2 * width) + 4 * memory.pairs * width + linear(n, width, mlp) + proj
    keys = 2 * memory.tokens * width * a
    kept = 2 * n * width * (r + a) + 4 * n * r + attention - keys + 2 * n * mlp * a
    products = attention - keys + n * (2 * width + mlp) * a
    inside = _in_block(forward, proj, kept, n * width * r, products)
    made = outside(linear(memory.tokens, memory.width, 2 * width), memory.tokens * (memory.width * a + 2 * r) + keys)
    return inside + made
