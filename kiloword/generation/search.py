"""Greedy, nucleus and beam search over next tokens, for a batch of images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kiloword.generation.options import GenerationOptions
from kiloword.generation.rules import NEVER, Decoding, FinishedTexts, OpenTexts, Rules
from kiloword.randomness import uniform

LIKELY = 256  # tokens searched for the nucleus before all are sorted

Choose = Callable[[Tensor, Tensor, int], Tensor]
"""Log probabilities [N, V], indices of the initial rows [N], number of tokens so far -> next tokens [N]."""


def search(
    decoding: Decoding, images: int, rules: Rules, options: GenerationOptions, seeds: Tensor | None = None
) -> FinishedTexts:
    """Generate texts of B images, best first: [B, P], with P at least `options.num`.

    Args: decoding: of B rows, before the first step; seeds [B, num] int64: of the samples of nucleus.
    """
    if options.method == "beam":
        return _beam(decoding, images, rules, options)
    if options.method == "greedy":
        return _follow(decoding, images, rules, options, lambda logp, which, place: logp.argmax(1))
    assert seeds is not None, "nucleus needs seeds"
    if options.num > 1:
        decoding.reorder(torch.arange(images, device=seeds.device).repeat_interleave(options.num))
    drawn = seeds.flatten()

    def choose(logp: Tensor, which: Tensor, place: int) -> Tensor:
        chance = uniform(drawn[which], f"token {place}", 1)[:, 0]
        return nucleus(logp, chance, options.top_p, options.temperature)

    return _follow(decoding, len(drawn), rules, options, choose).together(options.num)


def _follow(decoding: Decoding, n: int, rules: Rules, options: GenerationOptions, choose: Choose) -> FinishedTexts:
    """Generate one text for each of N rows; rows are removed when their text ends."""
    device = rules.never.device
    finished, rows = FinishedTexts.none(n, 1, rules.longest, device), OpenTexts.first(n, device)
    which, ids = torch.arange(n, device=device), torch.full((n,), rules.start, device=device)
    for n_tokens in range(rules.longest):
        logp = rules.next(decoding.step(ids), rows)
        ids = choose(logp, which, n_tokens)
        rows = rules.say(rows, ids, rows.logprob + logp.gather(1, ids[:, None])[:, 0])
        ended = (ids == rules.end) | (n_tokens + 1 == rules.longest)
        if not ended.any():
            continue
        done, on = ended.nonzero()[:, 0], (~ended).nonzero()[:, 0]
        finished.add(which[done], rows.ids[done, None], rows.logprob[done, None], options.length_penalty)
        if not len(on):
            break
        decoding.reorder(on)
        rows, which, ids = rows.take(on), which[on], ids[on]
    return finished


def nucleus(logp: Tensor, chance: Tensor, top_p: float, temperature: float = 1.0) -> Tensor:
    """Sample tokens from the smallest sets of most likely tokens whose probability reaches top_p.

    Args: logp [N, V], -inf for forbidden tokens, not necessarily normalised; chance [N]: random numbers in [0, 1).
    Returns: [N] int64. Source: arXiv:1904.09751, section 3.1.
    """
    p = (logp / temperature).softmax(-1)
    likely, order = p.topk(min(LIKELY, p.shape[1]))
    if bool((likely.double().sum(1) < top_p).any()):
        likely, order = p.sort(dim=1, descending=True, stable=True)
    mass = likely.double().cumsum(1)
    inside = (mass - likely < top_p) & (likely > 0)
    kept = (likely.double() * inside).cumsum(1)
    place = (kept <= chance[:, None] * kept[:, -1:]).sum(1)
    place = torch.minimum(place, inside.sum(1) - 1)  # if the product rounds up to the whole mass
    return order.gather(1, place[:, None])[:, 0]


def _beam(decoding: Decoding, n: int, rules: Rules, options: GenerationOptions) -> FinishedTexts:
    """Beam search: of the 2 * beams most likely extensions, those among the first `beams` that end are finished.

    Keeps twice as many finished texts as beams, as some can be equal.
    """
    device, penalty = rules.never.device, options.length_penalty
    finished_texts, rows = FinishedTexts.none(n, 2 * options.beams, rules.longest, device), OpenTexts.first(n, device)
    which, ids = torch.arange(n, device=device), torch.full((n,), rules.start, device=device)
    for n_tokens in range(1, rules.longest + 1):
        total = rows.logprob[:, None] + rules.next(decoding.step(ids), rows)  # [b * beams, V]
        vocab, old = total.shape[1], len(rows) // len(which)
        best, place = total.view(len(which), -1).topk(min(2 * options.beams, old * vocab))  # [b, C]
        token, beam = place % vocab, place // vocab + torch.arange(len(which), device=device)[:, None] * old
        ended = (token == rules.end) | (n_tokens == rules.longest)
        within = torch.arange(best.shape[1], device=device) < options.beams
        finished = best.masked_fill(~(ended & within), NEVER)
        if bool((finished > NEVER).any()):
            finished_texts.add(which, torch.cat([rows.ids[beam], token[..., None]], 2), finished, penalty)
        live, chosen = best.masked_fill(ended, NEVER).topk(min(options.beams, best.shape[1]))
        on = (~_settled(finished_texts, which, live[:, 0], n_tokens, rules.longest, options)).nonzero()[:, 0]
        if not len(on):
            break
        parents, ids = (x.gather(1, chosen)[on].flatten() for x in (beam, token))
        decoding.reorder(parents)
        rows, which = rules.say(rows.take(parents), ids, live[on].flatten()), which[on]
    return finished_texts


def _settled(
    finished: FinishedTexts, which: Tensor, live: Tensor, n_tokens: int, longest: int, options: GenerationOptions
) -> Tensor:
    """Whether the search of each image is complete, [b] bool.

    exact: the best score that the best unfinished text, of log probability live [b], can reach is not above that of the
    last requested text. Otherwise (as `early_stopping=False` of transformers): its current score is not above those of
    as many finished texts as beams.
    """
    penalty = options.length_penalty
    hope = live / (longest if penalty > 0 else n_tokens + 1) ** penalty
    settled = (finished.score[which, options.num - 1] >= hope) | (live == NEVER)
    if not options.exact:
        settled |= finished.score[which, options.beams - 1] >= live / n_tokens**penalty
    return torch.as_tensor(settled)
