"""A closed list of texts as a tree, so that a decoder can say nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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
