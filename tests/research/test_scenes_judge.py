"""Recall within groups of scenes that differ by shape alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kiloword.apps.quickstart.scenes import draw_all
from research.scenes_judge import within_groups


def test_hard_set_ranks_inside_groups_alone() -> None:
    scores = torch.rand(24, 24, generator=torch.Generator().manual_seed(0))
    index = {"vec": torch.arange(24)}

    def told(scores: torch.Tensor) -> dict[str, float]:
        return within_groups(lambda images, texts: scores[images["vec"]][:, texts["vec"]], index, index)

    right = [scores[:, t][t // 8 * 8 : t // 8 * 8 + 8].argmax().item() == t % 8 for t in range(24)]
    assert told(scores)["image_retrieval_recall@1"] == pytest.approx(sum(right) / 24)
    right = [scores[i][i // 8 * 8 : i // 8 * 8 + 8].argmax().item() == i % 8 for i in range(24)]
    assert told(scores)["text_retrieval_recall@1"] == pytest.approx(sum(right) / 24)
    assert list(told(torch.zeros(24, 24)).values()) == [1 / 8, 1 / 8]  # ties get their expected value
    blocks = torch.block_diag(*[2 * torch.eye(8) for _ in range(3)])
    blocks[:, 0] += 9.0  # another group's caption that fits everything does no harm
    assert told(blocks)["image_retrieval_recall@1"] == 1
    scenes = draw_all("scenes:test?hard=shape&n=24", 32)  # which differ by shape alone, and captions tell
    truth = scenes.source.relevance(scenes.captions, range(24))
    for start in (0, 8, 16):
        assert (truth[start : start + 8, start : start + 8] == np.eye(8, dtype=bool)).all()
