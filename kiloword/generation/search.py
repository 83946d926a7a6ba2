"""From the next token's probabilities to whole texts: greedy, nucleus and beam search, many images at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kiloword.generation.options import GenerationOptions
from kiloword.generation.rules import NEVER, Decoding, FinishedTexts, OpenTexts, Rules
from kiloword.randomness import uniform

LIKELY = 256  # tokens among which the nucleus is looked for before all are sorted

Choose = Callable[[Tensor, Tensor, int], Tensor]
"""Log probabilities [N, V], which rows of the first ones they are [N], tokens said so far -> next tokens [N]."""


def search(
    decoding: Decoding, images: int, rules: Rules, options: GenerationOptions, seeds: Tensor | None = None
) -> FinishedTexts:
    """The texts of B images that a method finds, best first: [B, P], where P is at least `options.num`.

    Args: decoding: of B rows, none of which was stepped; seeds [B, num] int64: of the draws, for nucleus.
    """
    if options.method == "beam":
        return _beam(decoding, images, rules, options)
    if options.method == "greedy":
        return _follow(decoding, images, rules, options, lambda logp, which, said: logp.argmax(1))
    assert seeds is not None, "what is drawn needs seeds"
    if options.num > 1:
        decoding.reorder(torch.arange(images, device=seeds.device).repeat_interleave(options.num))
    drawn = seeds.flatten()

    def choose(logp: Tensor, which: Tensor, said: int) -> Tensor:
        chance = uniform(drawn[which], f"token {said}", 1)[:, 0]
        return nucleus(logp, chance, options.top_p, options.temperature)

    return _follow(decoding, len(drawn), rules, options, choose).together(options.num)


def _follow(decoding: Decoding, n: int, rules: Rules, options: GenerationOptions, choose: Choose) -> FinishedTexts:
    """One text for each of N rows, token by token; a row leaves when its text ends."""
    device = rules.never.device
    found, rows = FinishedTexts.none(n, 1, rules.longest, device), OpenTexts.first(n, device)
    which, ids = torch.arange(n, device=device), torch.full((n,), rules.start, device=device)
    for said in range(rules.longest):
        logp = rules.next(decoding.step(ids), rows)
        ids = choose(logp, which, said)
        rows = rules.say(rows, ids, rows.logprob + logp.gather(1, ids[:, None])[:, 0])
        ended = (ids == rules.end) | (said + 1 == rules.longest)
        if not ended.any():
            continue
        done, on = ended.nonzero()[:, 0], (~ended).nonzero()[:, 0]
        found.add(which[done], rows.said[done, None], rows.logprob[done, None], options.length_penalty)
        if not len(on):
            break
        decoding.reorder(on)
        rows, which, ids = rows.take(on), which[on], ids[on]
    return found


def nucleus(logp: Tensor, chance: Tensor, top_p: float, temperature: float = 1.0) -> Tensor:
    """Tokens drawn from the smallest sets of likeliest ones whose probability reaches top_p.

    Args: logp [N, V], -inf where a token may not be said, the rest need not add up to 1; chance [N] in [0, 1).
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
    place = torch.minimum(place, inside.sum(1) - 1)  # should rounding carry the product to the whole mass
    return order.gather(1, place[:, None])[:, 0]


def _beam(decoding: Decoding, n: int, rules: Rules, options: GenerationOptions) -> FinishedTexts:
    """Beam search: of the likeliest 2 * beams next texts those that end within the first `beams` are finished.

    Twice as many finished texts as beams are kept, since two may read the same.
    """
    device, penalty = rules.never.device, options.length_penalty
    found, rows = FinishedTexts.none(n, 2 * options.beams, rules.longest, device), OpenTexts.first(n, device)
    which, ids = torch.arange(n, device=device), torch.full((n,), rules.start, device=device)
    for said in range(1, rules.longest + 1):
        total = rows.logprob[:, None] + rules.next(decoding.step(ids), rows)  # [b * beams, V]
        vocab, old = total.shape[1], len(rows) // len(which)
        best, place = total.view(len(which), -1).topk(min(2 * options.beams, old * vocab))  # [b, C]
        token, beam = place % vocab, place // vocab + torch.arange(len(which), device=device)[:, None] * old
        ended = (token == rules.end) | (said == rules.longest)
        within = torch.arange(best.shape[1], device=device) < options.beams
        finished = best.masked_fill(~(ended & within), NEVER)
        if bool((finished > NEVER).any()):
            found.add(which, torch.cat([rows.said[beam], token[..., None]], 2), finished, penalty)
        live, chosen = best.masked_fill(ended, NEVER).topk(min(options.beams, best.shape[1]))
        on = (~_settled(found, which, live[:, 0], said, rules.longest, options)).nonzero()[:, 0]
        if not len(on):
            break
        parents, ids = (x.gather(1, chosen)[on].flatten() for x in (beam, token))
        decoding.reorder(parents)
        rows, which = rules.say(rows.take(parents), ids, live[on].flatten()), which[on]
    return found


def _settled(
    found: FinishedTexts, which: Tensor, live: Tensor, said: int, longest: int, options: GenerationOptions
) -> Tensor:
    """Whether an image's search is over, [b] bool.

    For certain: the best unfinished text's log probability live [b], over the tokens^penalty that suit it best, is not
    above the score of the last text that is wanted. As usual (transformers' `early_stopping=False`): its score as it
    stands is not above that of as many finished texts as there are beams.
    """
    penalty = options.length_penalty
    hope = live / (longest if penalty > 0 else said + 1) ** penalty
    settled = (found.score[which, options.num - 1] >= hope) | (live == NEVER)
    if not options.exact:
        settled |= found.score[which, options.beams - 1] >= live / said**penalty
    return torch.as_tensor(settled)
