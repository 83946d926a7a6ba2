"""State of a search: unfinished texts, constraints on their next tokens, and finished texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Trie:
    """A prefix tree of the allowed texts; the state of a row of a search is a node, the root is 0.

    Args: sequences: token ids of each text, without a start token and with the end token.
    Raises: ValueError for an empty list, or an empty text.
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
        self._nowhere = nodes  # a node without children, reached by any other token

    def allowed(self, node: Tensor, vocab: int) -> Tensor:
        """Allowed next tokens: node [N] int64 -> bool [N, V]."""
        first, count = self._starts[node], self._starts[node + 1] - self._starts[node]
        rows = torch.repeat_interleave(count)  # row of each allowed token
        before = count.cumsum(0) - count
        place = torch.arange(len(rows), device=node.device) - before[rows] + first[rows]
        mask = torch.zeros(len(node), vocab, dtype=torch.bool, device=node.device)
        mask[rows, self._tokens[place]] = True
        return mask

    def follow(self, node: Tensor, token: Tensor) -> Tensor:
        """Nodes after one more token: node [N], token [N] -> [N]."""
        key = node * self._base + token
        place = torch.searchsorted(self._keys, key).clamp(max=len(self._keys) - 1)
        valid = (self._keys[place] == key) & (token < self._base)
        return torch.where(valid, self._children[place], self._nowhere)


def _edges(sequences: Sequence[Sequence[int]]) -> dict[tuple[int, int], int]:
    """(node, token) -> child."""
    edges: dict[tuple[int, int], int] = {}
    for sequence in sequences:
        node = 0
        for token in sequence:
            node = edges.setdefault((node, token), len(edges) + 1)
    return edges


NEVER = float("-inf")  # log probability of forbidden tokens


class Decoding(Protocol):
    """Decoder state of N unfinished texts."""

    def step(self, ids: Tensor) -> Tensor:
        """Newest tokens [N] int64 (first the start tokens) -> logits of the next ones [N, V], at least fp32."""

    def reorder(self, rows: Tensor) -> None:
        """Row n continues from row rows[n]; rows [M] int64, M can differ from N. Allowed before the first step."""


@dataclass
class OpenTexts:
    """Tokens of N unfinished texts, without the start token."""

    ids: Tensor  # [N, n] int64
    logprob: Tensor  # [N]
    node: Tensor  # [N] int64, nodes of the trie

    @staticmethod
    def first(n: int, device: torch.device) -> OpenTexts:
        zeros = torch.zeros(n, dtype=torch.int64, device=device)
        return OpenTexts(zeros.new_zeros(n, 0), zeros.float(), zeros)

    def take(self, rows: Tensor) -> OpenTexts:
        """Select rows by index."""
        return OpenTexts(self.ids[rows], self.logprob[rows], self.node[rows])

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Rules:
    """Constraints on generated tokens."""

    start: int
    end: int
    never: Tensor  # [V] bool, forbidden tokens: start, pads, masks
    longest: int  # largest number of tokens, end included
    shortest: int = 0  # smallest number of tokens before the end
    no_repeat: int = 0  # n-grams of this size occur only once; 0: no limit
    trie: Trie | None = None  # the closed list of texts; shortest and no_repeat are ignored then

    def next(self, logits: Tensor, rows: OpenTexts) -> Tensor:
        """Log probabilities of the next token, fp32 [N, V], -inf for forbidden tokens.

        The probabilities are those of the model, not renormalised over the allowed tokens.
        """
        logp = logits.float().log_softmax(-1)
        if self.trie is not None:
            return logp.masked_fill(~self.trie.allowed(rows.node, logp.shape[1]), NEVER)
        early = rows.ids.shape[1] < self.shortest
        banned = self.never.expand_as(logp)
        if early or self.no_repeat:
            banned = banned.clone()
        if self.no_repeat:
            _ban_repeats(banned, rows.ids, self.no_repeat)
        if early:
            banned[:, self.end] = True
            banned[:, self.end] = ~banned.all(1)  # a text without another allowed token may end
        return logp.masked_fill(banned, NEVER)

    def say(self, rows: OpenTexts, ids: Tensor, logprob: Tensor) -> OpenTexts:
        """Append one token to each row: ids [N]; logprob [N], of the whole texts."""
        node = rows.node if self.trie is None else self.trie.follow(rows.node, ids)
        return OpenTexts(torch.cat([rows.ids, ids[:, None]], 1), logprob, node)


def _ban_repeats(banned: Tensor, ids: Tensor, size: int) -> None:
    """Ban tokens that would repeat an n-gram of `size` tokens: banned [N, V], ids [N, n]."""
    n = ids.shape[1]
    if n < size:
        return
    runs = ids.unfold(1, size, 1)  # [N, n - size + 1, size]
    again = (runs[..., :-1] == ids[:, None, n - size + 1 :]).all(-1)
    rows, place = torch.nonzero(again, as_tuple=True)
    banned[rows, runs[rows, place, -1]] = True


@dataclass
class FinishedTexts:
    """The best finished texts of B images, at most P each, best first.

    A score is the log probability of the text, end included, divided by tokens^penalty. A text cut at the length limit
    has no end token.
    """

    ids: Tensor  # [B, P, L] int64, without the start token; the first `lengths` are valid
    lengths: Tensor  # [B, P] int64, end included; 0: no text
    logprob: Tensor  # [B, P]
    score: Tensor  # [B, P]

    @staticmethod
    def none(images: int, size: int, longest: int, device: torch.device) -> FinishedTexts:
        lengths = torch.zeros(images, size, dtype=torch.int64, device=device)
        worst = torch.full((images, size), NEVER, device=device)
        return FinishedTexts(lengths.new_zeros(images, size, longest), lengths, worst, worst.clone())

    def add(self, images: Tensor, new_ids: Tensor, logprob: Tensor, penalty: float) -> None:
        """Add texts of the images [b]: new_ids [b, C, n], logprob [b, C], -inf: no text."""
        n = new_ids.shape[2]
        lengths = torch.full_like(new_ids[..., 0], n).masked_fill(logprob == NEVER, 0)
        ids = torch.cat([self.ids[images], F.pad(new_ids, (0, self.ids.shape[2] - n))], 1)
        score = torch.cat([self.score[images], logprob / n**penalty], 1)
        self.score[images], best = score.topk(self.score.shape[1])
        self.logprob[images] = torch.cat([self.logprob[images], logprob], 1).gather(1, best)
        self.lengths[images] = torch.cat([self.lengths[images], lengths], 1).gather(1, best)
        self.ids[images] = ids.gather(1, best[..., None].expand(-1, -1, ids.shape[2]))

    def together(self, several: int) -> FinishedTexts:
        """Merge `several` consecutive rows of one image, with one text each, into one row, best first."""
        score, best = self.score.view(-1, several).sort(dim=1, descending=True, stable=True)
        ids = self.ids.view(-1, several, self.ids.shape[2])
        return FinishedTexts(
            ids.gather(1, best[..., None].expand_as(ids)),
            self.lengths.view(-1, several).gather(1, best),
            self.logprob.view(-1, several).gather(1, best),
            score,
        )
