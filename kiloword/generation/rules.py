"""What a search works on: texts that are being written, which tokens may follow, and those that are finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Trie:
    """The texts that may be said; a row of a search stands at one node, the root is 0.

    Args: sequences: token ids of each text, without a start token and with the end token.
    Raises: ValueError when there is none, or an empty one.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> None:
        if not sequences or not all(len(s) for s in sequences):
            raise ValueError(f"{len(sequences)} texts to choose from. Expected at least one, and none empty.")
        self.longest = max(len(s) for s in sequences)
        self._base = 1 + max(max(s) for s in sequences)
        edges = _edges(sequences)
        order = sorted(edges)
        nodes = len(edges) + 1
        counts = torch.bincount(torch.tensor([node for node, _ in order]), minlength=nodes + 1)
        self._starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(device)  # [nodes + 2]
        self._tokens = torch.tensor([token for _, token in order], device=device)  # [edges], by node, then by token
        self._children = torch.tensor([edges[edge] for edge in order], device=device)
        self._keys = torch.tensor([node * self._base + token for node, token in order], device=device)
        self._nowhere = nodes  # a node without children, where whoever says something else ends

    def allowed(self, node: Tensor, vocab: int) -> Tensor:
        """Which tokens may come next: node [N] int64 -> bool [N, V]."""
        first, count = self._starts[node], self._starts[node + 1] - self._starts[node]
        rows = torch.repeat_interleave(count)  # row of each allowed token
        before = count.cumsum(0) - count
        place = torch.arange(len(rows), device=node.device) - before[rows] + first[rows]
        mask = torch.zeros(len(node), vocab, dtype=torch.bool, device=node.device)
        mask[rows, self._tokens[place]] = True
        return mask

    def follow(self, node: Tensor, token: Tensor) -> Tensor:
        """Where N rows stand after one more token each: [N], [N] -> [N]."""
        key = node * self._base + token
        place = torch.searchsorted(self._keys, key).clamp(max=len(self._keys) - 1)
        known = (self._keys[place] == key) & (token < self._base)
        return torch.where(known, self._children[place], self._nowhere)


def _edges(sequences: Sequence[Sequence[int]]) -> dict[tuple[int, int], int]:
    """(node, token) -> child."""
    edges: dict[tuple[int, int], int] = {}
    for sequence in sequences:
        node = 0
        for token in sequence:
            node = edges.setdefault((node, token), len(edges) + 1)
    return edges


NEVER = float("-inf")  # log probability of what may not be said


class Decoding(Protocol):
    """N texts that are being written, each by its newest token."""

    def step(self, ids: Tensor) -> Tensor:
        """Newest tokens [N] int64 (first the start tokens) -> logits of the next ones [N, V], at least fp32."""

    def reorder(self, rows: Tensor) -> None:
        """Row n goes on from what was row rows[n]: [M] int64, M rows from now on. Allowed before the first step too."""


@dataclass
class OpenTexts:
    """What N texts have said so far, the start token left out."""

    said: Tensor  # [N, n] int64
    logprob: Tensor  # [N]
    node: Tensor  # [N] int64, where they stand in a trie

    @staticmethod
    def first(n: int, device: torch.device) -> OpenTexts:
        zeros = torch.zeros(n, dtype=torch.int64, device=device)
        return OpenTexts(zeros.new_zeros(n, 0), zeros.float(), zeros)

    def take(self, rows: Tensor) -> OpenTexts:
        """Those rows, in that order."""
        return OpenTexts(self.said[rows], self.logprob[rows], self.node[rows])

    def __len__(self) -> int:
        return len(self.said)


@dataclass(frozen=True)
class Rules:
    """What may be said."""

    start: int
    end: int
    never: Tensor  # [V] bool, tokens that are not said: start, pads, masks
    longest: int  # tokens at most, end included
    shortest: int = 0  # tokens before the end, at least
    no_repeat: int = 0  # size of token runs that come once only; 0: any may come again
    trie: Trie | None = None  # the texts to choose from; shortest and no_repeat are not read then

    def next(self, logits: Tensor, rows: OpenTexts) -> Tensor:
        """Log probabilities of the next token, fp32 [N, V], -inf where it may not be said.

        What may not be said is left out, and the rest does not add up to 1: these are the model's own probabilities.
        """
        logp = logits.float().log_softmax(-1)
        if self.trie is not None:
            return logp.masked_fill(~self.trie.allowed(rows.node, logp.shape[1]), NEVER)
        early = rows.said.shape[1] < self.shortest
        banned = self.never.expand_as(logp)
        if early or self.no_repeat:
            banned = banned.clone()
        if self.no_repeat:
            _ban_repeats(banned, rows.said, self.no_repeat)
        if early:
            banned[:, self.end] = True
            banned[:, self.end] = ~banned.all(1)  # a text that can say nothing else may end
        return logp.masked_fill(banned, NEVER)

    def say(self, rows: OpenTexts, ids: Tensor, logprob: Tensor) -> OpenTexts:
        """The rows after one more token each: ids [N]; logprob [N], of the whole texts."""
        node = rows.node if self.trie is None else self.trie.follow(rows.node, ids)
        return OpenTexts(torch.cat([rows.said, ids[:, None]], 1), logprob, node)


def _ban_repeats(banned: Tensor, said: Tensor, size: int) -> None:
    """Mark what would make the last `size` tokens come a second time: banned [N, V], said [N, n]."""
    n = said.shape[1]
    if n < size:
        return
    runs = said.unfold(1, size, 1)  # [N, n - size + 1, size]
    again = (runs[..., :-1] == said[:, None, n - size + 1 :]).all(-1)
    rows, place = torch.nonzero(again, as_tuple=True)
    banned[rows, runs[rows, place, -1]] = True


@dataclass
class FinishedTexts:
    """The best finished texts of B images, at most P of each, best first.

    A score is the log probability of the text, its end included, over tokens^penalty. A text that was cut at the
    length limit has no end.
    """

    ids: Tensor  # [B, P, L] int64, without the start token; the first `lengths` of them count
    lengths: Tensor  # [B, P] int64, end included; 0: there is no such text
    logprob: Tensor  # [B, P]
    score: Tensor  # [B, P]

    @staticmethod
    def none(images: int, size: int, longest: int, device: torch.device) -> FinishedTexts:
        lengths = torch.zeros(images, size, dtype=torch.int64, device=device)
        worst = torch.full((images, size), NEVER, device=device)
        return FinishedTexts(lengths.new_zeros(images, size, longest), lengths, worst, worst.clone())

    def add(self, images: Tensor, said: Tensor, logprob: Tensor, penalty: float) -> None:
        """More texts of some images: images [b], said [b, C, n], logprob [b, C], -inf for what is no text."""
        n = said.shape[2]
        lengths = torch.full_like(said[..., 0], n).masked_fill(logprob == NEVER, 0)
        ids = torch.cat([self.ids[images], F.pad(said, (0, self.ids.shape[2] - n))], 1)
        score = torch.cat([self.score[images], logprob / n**penalty], 1)
        self.score[images], best = score.topk(self.score.shape[1])
        self.logprob[images] = torch.cat([self.logprob[images], logprob], 1).gather(1, best)
        self.lengths[images] = torch.cat([self.lengths[images], lengths], 1).gather(1, best)
        self.ids[images] = ids.gather(1, best[..., None].expand(-1, -1, ids.shape[2]))

    def together(self, several: int) -> FinishedTexts:
        """Of images that stand there `several` times with one text each: each once with all of them, best first."""
        score, best = self.score.view(-1, several).sort(dim=1, descending=True, stable=True)
        ids = self.ids.view(-1, several, self.ids.shape[2])
        return FinishedTexts(
            ids.gather(1, best[..., None].expand_as(ids)),
            self.lengths.view(-1, several).gather(1, best),
            self.logprob.view(-1, several).gather(1, best),
            score,
        )
