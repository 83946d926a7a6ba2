"""Cost of towers and decoders: FLOP and saved activations, from their configurations."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from kiloword.config.recipes import ImageConfig, TextConfig
from kiloword.model.decoder import ImageDecoder, TextDecoder
from kiloword.model.image import extra, stem_plan
from kiloword.model.model import Model
from kiloword.planning.layers import AttendedTokens, Work, block, cross_block, linear, outside
from kiloword.planning.shapes import Kernels, Lengths, Load, Sequences


def patches(config: ImageConfig) -> int:
    """P."""
    return (config.size // config.patch) ** 2


def image_tower(config: ImageConfig, images: float, kernels: Kernels, kept: int | None = None) -> Work:
    """One pass of images, of `kept` patches each (all when None).

    The patch embedding reads pixels [I, p, 3 P^2], which are kept and have no gradient: backward costs what forward
    does. Of E + p tokens an image; the norms before and behind the blocks keep their inputs.
    """
    read = patches(config) if kept is None else kept
    tokens, width = images * (extra(config) + read), config.width
    a, r = kernels.product, kernels.stream
    embedding = linear(images * read, 3 * config.patch**2, width)
    pixels = images * read * 3 * config.patch**2 * a
    norms = (1 + config.pre_norm) * tokens * (width + 2) * r
    stem = _stem(config, images, kernels) if config.stem == "conv" else Work()
    seq = Sequences.dense(images, extra(config) + read)
    blocks = block(width, config.heads, config.mlp, seq, kernels).times(config.depth)
    return replace(
        outside(embedding, pixels + norms, backward=embedding) + stem + blocks,
        name="image tower",
        group="towers",
    )


def _stem(config: ImageConfig, images: float, kernels: Kernels) -> Work:
    """Convolutions: 2 I h w c k^2 C each, h x w the output's places; the first gives no gradient to pixels.

    Kept: each one's input, and the norm's input and output (which the GELU reads) of all but the last.
    """
    side, total, a, r = config.size, Work(), kernels.product, kernels.stream
    plan = stem_plan(config)
    for n, (before, after, kernel, stride) in enumerate(plan):
        read, side = images * before * side**2, side // stride
        forward = 2 * images * side**2 * before * after * kernel**2
        made = images * after * side**2
        normed = made * (a + r) if n + 1 < len(plan) else 0
        total = total + outside(forward, read * a + normed, backward=forward if n == 0 else 2 * forward)
    return total


def text_tower(config: TextConfig, texts: Lengths, kernels: Kernels) -> Work:
    """One pass of packed texts: the table is read without arithmetic; blocks; the last norm keeps its input."""
    seq = texts.sequences(kernels)
    blocks = block(config.width, config.heads, config.mlp, seq, kernels).times(config.depth)
    norm = outside(0, seq.tokens * (config.width + 2) * kernels.stream)
    return replace(norm + blocks, name="text tower", group="towers")


def text_decoder(
    decoder: TextDecoder,
    config: TextConfig,
    texts: Lengths,
    memory: AttendedTokens,
    kernels: Kernels,
    joined: float = 0,
) -> Work:
    """A pass over texts that each look at a memory, and the loss of the next word.

    Args: texts: the tokens that have a next one; joined: rows of a memory that several texts share, 0: a row a text;
    a kernel that pads then pads to the longest of a row's texts together.
    Logits of n words cost 2 n W V, and so do both gradients, which the forward pass makes and keeps: n W and the table.
    """
    seq, depth = texts.sequences(kernels), len(decoder.layers)
    looking = seq
    if joined and kernels.padded:
        looking = replace(seq, slots=joined * texts.together)
    own = block(config.width, config.heads, config.mlp, seq, kernels)
    cross = cross_block(config.width, config.heads, config.mlp, looking, memory, kernels)
    words = linear(seq.tokens, config.width, decoder.words)
    table = decoder.words * config.width * kernels.stream
    r = kernels.stream
    rest = outside(words, table + seq.tokens * config.width * 2 * r)
    normed = outside(0, memory.tokens * memory.width * r)  # what all layers' norms of the memory read
    return replace((own + cross).times(depth) + rest + normed, name="text decoder", group="decoders")


def image_decoder(
    decoder: ImageDecoder,
    config: ImageConfig,
    text_width: int,
    rows: float,
    hidden: int,
    texts: Lengths,
    kernels: Kernels,
) -> Work:
    """A pass over rows of E + P tokens that look at texts; the last layer goes on with `hidden` patches alone.

    Pixels of n hidden patches cost 2 n W 3 P^2; the L1 loss keeps their differences.
    """
    length, depth = extra(config) + patches(config), len(decoder.layers)
    seq, few = Sequences.dense(rows, length), Sequences.dense(rows, hidden)
    guided = decoder.layers[0].cross is not None
    work = Work()
    for n in range(depth):
        last = n == depth - 1
        passed = rows * hidden if last else None
        work = work + block(config.width, config.heads, config.mlp, seq, kernels, passed)
        if guided:
            looking = few if last else seq
            memory = seen_texts(texts, looking.tokens / rows, text_width, kernels)
            work = work + cross_block(config.width, config.heads, config.mlp, looking, memory, kernels)
    a, r, n_hidden, pixels = kernels.product, kernels.stream, rows * hidden, 3 * config.patch**2
    rest = outside(linear(n_hidden, config.width, pixels), n_hidden * (config.width * (r + a) + pixels * r))
    normed = outside(0, texts.tokens * text_width * r if guided else 0)
    return replace(work + rest + normed, name="image decoder", group="decoders")


def seen_texts(texts: Lengths, queries: float, width: int, kernels: Kernels) -> AttendedTokens:
    """Packed texts as a memory of `queries` queries each."""
    slots = texts.texts * texts.longest if kernels.padded else texts.tokens
    return AttendedTokens(texts.tokens, slots, kernels.padded and slots != texts.tokens, slots * queries, width)


def seen_images(
    texts: Lengths, rows: float, length: float, width: int, kernels: Kernels, joined: bool
) -> AttendedTokens:
    """Dense rows of `length` tokens as a memory of packed texts."""
    slots = (rows * texts.together if joined else texts.texts * texts.longest) if kernels.padded else texts.tokens
    return AttendedTokens(rows * length, rows * length, False, slots * length, width)


def fuser(config: TextConfig, model: Model, load: Load, length: float) -> Work:
    """A pass of questions through the text tower's blocks, each followed by one that looks at the image."""
    assert load.questions is not None
    texts, kernels = load.questions, load.kernels
    seq, width = texts.sequences(kernels), model.image_tower.config.width
    own = block(config.width, config.heads, config.mlp, seq, kernels)
    memory = seen_images(texts, load.images, length, width, kernels, joined=False)
    cross = cross_block(config.width, config.heads, config.mlp, seq, memory, kernels)
    bridge = getattr(model.more["fuser"], "bridge", None)
    out = bridge.out_features if isinstance(bridge, nn.Linear) else 0
    rest = outside(linear(seq.tokens, config.width, out), seq.tokens * config.width * 2 * kernels.stream)
    return replace((own + cross).times(config.depth) + rest, name="fuser", group="decoders")
