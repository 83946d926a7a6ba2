"""Greedy, nucleus and beam search over next tokens, for a batch of images."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kiloword.generation.options import GenerationOptions
from kiloword.randomness import uniform

NEVER = float("-inf")  # log probability of forbidden tokens


class Decoding(Protocol):
    """Decoder state of N unfinished texts."""

    def step(self, ids: Tensor) -> Tensor:
        """Newest tokens [N] int64 (first the start tokens) -> logits of the next ones [N, V], at least fp32."""

    def reorder(self, rows: Tensor) -> None:
        """Row n continues from row rows[n]; rows [M] int64, M can differ from N. Allowed before the first step."""


class Found(NamedTuple):
    """A finished text. One that was cut at the length limit has no end token."""

    ids: tuple[int, ...]  # without the start token, with the end
    logprob: float
    score: float  # logprob / tokens^penalty


def beginnings(texts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
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
    decoding: Decoding, images: int, rules: Rules, options: GenerationOptions, seeds: Sequence[Sequence[int]] = ()
) -> list[list[Found]]:
    """Finished texts of B images, best first; none where the decoder outputs NaN.

    Args: decoding: of B rows, before the first step; seeds [B, num]: of the samples of nucleus.
    """
    found: list[list[Found]] = [[] for _ in range(images)]
    if options.method == "nucleus":
        _sample(decoding, found, rules, options, seeds)
    else:
        _beams(decoding, found, rules, options, 1 if options.method == "greedy" else options.beams)
    return found


def _keep(found: list[list[Found]], images: Tensor, ids: Tensor, logprob: Tensor, penalty: float) -> None:
    """Add finished texts of the images [n]: ids [n, L], logprob [n]."""
    columns = (images, ids, logprob, logprob / ids.shape[1] ** penalty)
    for image, text, *values in zip(*(x.tolist() for x in columns), strict=True):
        insort(found[image], Found(tuple(text), *values), key=lambda one: -one.score)


def _sample(
    decoding: Decoding,
    found: list[list[Found]],
    rules: Rules,
    options: GenerationOptions,
    seeds: Sequence[Sequence[int]],
) -> None:
    """Sample `num` texts of every image; rows are removed when their text ends."""
    drawn = torch.tensor(seeds, dtype=torch.int64, device=rules.never.device).flatten()
    which = torch.arange(len(drawn), device=drawn.device)
    decoding.reorder(which // options.num)
    ids, logprob, newest = drawn.new_empty(len(drawn), 0), drawn.float() * 0, torch.full_like(drawn, rules.start)
    for n in range(rules.longest):
        logp = rules.next(decoding.step(newest), ids)
        chance = uniform(drawn[which], f"token {n}", 1)[:, 0]
        newest = nucleus(logp, chance, options.top_p, options.temperature)
        ids, logprob = torch.cat([ids, newest[:, None]], 1), logprob + logp.gather(1, newest[:, None])[:, 0]
        ended = (newest == rules.end) | (n + 1 == rules.longest)
        if ended.any():
            _keep(found, which[ended] // options.num, ids[ended], logprob[ended], options.length_penalty)
            on = (~ended).nonzero()[:, 0]
            if not len(on):
                return
            decoding.reorder(on)
            which, ids, logprob, newest = which[on], ids[on], logprob[on], newest[on]


def nucleus(logp: Tensor, chance: Tensor, top_p: float, temperature: float = 1.0) -> Tensor:
    """Sample tokens from the smallest sets of most likely tokens whose probability reaches top_p.

    Args: logp [N, V], -inf for forbidden tokens, not necessarily normalised; chance [N]: random numbers in [0, 1).
    Returns: [N] int64. Source: arXiv:1904.09751, section 3.1.
    """
    likely, order = (logp / temperature).softmax(-1).sort(dim=1, descending=True, stable=True)
    inside = (likely.double().cumsum(1) - likely < top_p) & (likely > 0)
    kept = (likely.double() * inside).cumsum(1)
    place = (kept <= chance[:, None] * kept[:, -1:]).sum(1)
    place = torch.minimum(place, inside.sum(1) - 1)  # if the product rounds up to the whole mass
    return order.gather(1, place[:, None])[:, 0]


def _beams(decoding: Decoding, found: list[list[Found]], rules: Rules, options: GenerationOptions, beams: int) -> None:
    """Beam search: of the 2 * beams most likely extensions, those among the first `beams` that end are finished.

    An image is done when its best unfinished text scores no higher than as many finished ones as beams (as
    `early_stopping=False` of transformers), or where it cannot come before the last requested one at any length.
    """
    device, penalty = rules.never.device, options.length_penalty
    which = torch.arange(len(found), device=device)
    ids, logprob = which.new_empty(len(found), 0), torch.zeros(len(found), device=device)
    newest = torch.full_like(which, rules.start)
    for n in range(1, rules.longest + 1):
        total = logprob[:, None] + rules.next(decoding.step(newest), ids)  # [b * beams, V]
        vocab, old = total.shape[1], len(ids) // len(which)
        best, place = total.view(len(which), -1).topk(min(2 * beams, old * vocab))  # [b, C]
        token, beam = place % vocab, place // vocab + torch.arange(len(which), device=device)[:, None] * old
        ended = (token == rules.end) | (n == rules.longest)
        texts = torch.cat([ids[beam], token[..., None]], 2)
        row, column = (ended & (best > NEVER))[:, :beams].nonzero(as_tuple=True)
        _keep(found, which[row], texts[row, column], best[row, column], penalty)
        live, chosen = best.masked_fill(ended, NEVER).topk(min(beams, best.shape[1]))
        images, first = which.tolist(), live[:, 0]

        def reached(place: int, images: list[int] = images, live: Tensor = live) -> Tensor:
            scores = [found[image][place - 1].score if len(found[image]) >= place else NEVER for image in images]
            return live.new_tensor(scores)

        done = first == NEVER
        done |= reached(options.num) >= first / (rules.longest if penalty > 0 else n + 1) ** penalty
        if not options.exact:
            done |= reached(beams) >= first / n**penalty
        on = (~done).nonzero()[:, 0]
        if not len(on):
            return
        parents = beam.gather(1, chosen)[on].flatten()
        decoding.reorder(parents)
        ids, logprob = texts.gather(1, chosen[..., None].expand(-1, -1, n))[on].flatten(0, 1), live[on].flatten()
        newest, which = ids[:, -1], which[on]
