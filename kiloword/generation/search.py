"""Greedy, nucleus and beam search over next tokens, for a batch of images."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kiloword.generation.options import GenerationOptions
from kiloword.randomness import uniform

NEVER = float("-inf")  # log probability of forbidden tokens


class Found(NamedTuple):
    """A finished text. One that was cut at the length limit has no end token."""

    ids: tuple[int, ...]  # without the start token, with the end
    logprob: float
    score: float  # logprob / tokens^penalty


def beginnings(texts: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """The next tokens of each beginning of a closed list of texts. Args: texts: without start, with end tokens."""
    following: dict[tuple[int, ...], list[int]] = {}
    for text in texts:
        for n, token in enumerate(text):
            following.setdefault(text[:n], []).append(token)
    return following


@dataclass(frozen=True)
class Rules:
    """Constraints on generated tokens."""

    start: int
    end: int
    never: Tensor  # [V] bool, forbidden tokens: start, pads, masks
    longest: int  # largest number of tokens, end included
    shortest: int = 0  # smallest number of tokens before the end
    no_repeat: int = 0  # n-grams of this size occur only once; 0: no limit
    closed: Mapping[tuple[int, ...], list[int]] | None = None  # `beginnings`; shortest, no_repeat are ignored then

    def next(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Log probabilities of the token after ids [N, n], fp32 [N, V], -inf for forbidden tokens.

        The probabilities are those of the model, not renormalised over the allowed tokens.
        """
        logp, n, size = logits.float().log_softmax(-1), ids.shape[1], self.no_repeat
        if self.closed is not None:
            banned = torch.ones_like(logp, dtype=torch.bool)
            for row, said in enumerate(ids.tolist()):
                banned[row, self.closed.get(tuple(said), [])] = False
            return logp.masked_fill(banned, NEVER)
        banned = self.never.expand_as(logp).clone()
        if size and n >= size:
            runs = ids.unfold(1, size, 1)  # [N, n - size + 1, size]
            again = (runs[..., :-1] == ids[:, None, n - size + 1 :]).all(-1)
            rows, place = torch.nonzero(again, as_tuple=True)
            banned[rows, runs[rows, place, -1]] = True
        if n < self.shortest:
            banned[:, self.end] = True
            banned[:, self.end] = ~banned.all(1)  # a text without another allowed token may end
        return logp.masked_fill(banned, NEVER)


def search(
    decoding: Any, images: int, rules: Rules, options: GenerationOptions, seeds: Sequence[Sequence[int]] = ()
) -> list[list[Found]]:
    """Finished texts of B images, best first; none where the decoder outputs NaN.

    Beam search takes the 2 * beams most likely extensions. Of the first `beams`, those that end are finished. An image
    is done when `beams` finished texts score at least as high as its best unfinished text (as `early_stopping=False` of
    transformers), or when the unfinished text cannot come before the last requested one at any length. Greedy search is
    beam search with one beam.

    Args: decoding: a `ModelDecoding` of B rows, before the first step; seeds [B, num]: of the samples of nucleus.
    """
    device, penalty, sampled = rules.never.device, options.length_penalty, options.method == "nucleus"
    beams, each = options.beams if options.method == "beam" else 1, options.num if sampled else 1
    found: list[list[Found]] = [[] for _ in range(images)]
    drawn = torch.tensor(seeds, dtype=torch.int64, device=device).flatten()
    which = torch.arange(images * each, device=device)  # samples, or images that are searched by beams
    decoding.reorder(which // each)
    ids, logprob = which.new_empty(len(which), 0), torch.zeros(len(which), device=device)
    newest = torch.full_like(which, rules.start)
    for n in range(1, rules.longest + 1):
        logp, row = rules.next(decoding.step(newest), ids), torch.arange(len(which), device=device)[:, None]
        if sampled:
            chance = uniform(drawn[which], f"token {n - 1}", 1)[:, 0]
            beam, token = row, nucleus(logp, chance, options.top_p, options.temperature)[:, None]
            best = logprob[:, None] + logp.gather(1, token)
        else:
            old, vocab = len(ids) // len(which), logp.shape[1]
            best, place = (logprob[:, None] + logp).view(len(which), -1).topk(min(2 * beams, old * vocab))  # [b, C]
            token, beam = place % vocab, place // vocab + row * old
        ended = (token == rules.end) | (n == rules.longest)
        texts = torch.cat([ids[beam], token[..., None]], 2)
        at = (ended & (best > NEVER))[:, :beams].nonzero(as_tuple=True)
        columns = (which[at[0]] // each, texts[at], best[at], best[at] / n**penalty)
        for image, text, *values in zip(*(x.tolist() for x in columns), strict=True):
            insort(found[image], Found(tuple(text), *values), key=lambda one: -one.score)
        live, chosen = best.masked_fill(ended, NEVER).topk(min(beams, best.shape[1]))
        first = live[:, 0]
        done = first == NEVER
        if not sampled:
            bars = [(options.num, (rules.longest if penalty > 0 else n + 1)), *([] if options.exact else [(beams, n)])]
            for rank, length in bars:
                scores = [found[i][rank - 1].score if len(found[i]) >= rank else NEVER for i in which.tolist()]
                done |= live.new_tensor(scores) >= first / length**penalty
        on = (~done).nonzero()[:, 0]
        if not len(on):
            break
        parents = beam.gather(1, chosen)[on].flatten()
        decoding.reorder(parents)
        ids, logprob = texts.gather(1, chosen[..., None].expand(-1, -1, n))[on].flatten(0, 1), live[on].flatten()
        newest, which = ids[:, -1], which[on]
    return found


def nucleus(logp: Tensor, chance: Tensor, top_p: float, temperature: float = 1.0) -> Tensor:
    """Sample tokens from the smallest sets of most likely tokens whose probability reaches top_p.

    Args: logp [N, V], -inf for forbidden tokens, not necessarily normalised; chance [N]: random numbers in [0, 1).
    Returns: [N] int64. Source: arXiv:1904.09751, section 3.1.
    """
    likely, order = (logp / temperature).softmax(-1).sort(descending=True, stable=True)
    inside = (likely.double().cumsum(1) - likely < top_p) & (likely > 0)
    kept = (likely.double() * inside).cumsum(1)
    place = (kept <= chance[:, None] * kept[:, -1:]).sum(1)
    place = torch.minimum(place, inside.sum(1) - 1)  # if the product rounds up to the whole mass
    return order.gather(1, place[:, None])[:, 0]
