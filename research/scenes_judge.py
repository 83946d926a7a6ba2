"""Metrics of held-out scenes, by which arms are compared."""

from __future__ import annotations

import torch

from kiloword import evaluation
from kiloword.api import Matcher
from kiloword.apps.quickstart.scenes import draw_all
from kiloword.data.scenes.world import GROUP, TASKS
from kiloword.evaluation.metrics import recall_at
from kiloword.evaluation.retrieval import Score
from kiloword.model.encoding import chunks, rows
from kiloword.types import Features

RECALL = {  # columns of a table: heading -> metric
    "R@1 text": "text_retrieval_recall@1",
    "R@1 image": "image_retrieval_recall@1",
    "R@5 text": "text_retrieval_recall@5",
    "R@5 image": "image_retrieval_recall@5",
    "R@10 text": "text_retrieval_recall@10",
    "R@10 image": "image_retrieval_recall@10",
}
SCENES = {
    "R@1 text": "text_retrieval_recall@1",
    "R@1 image": "image_retrieval_recall@1",
    "mAP": "image_retrieval_true_map",
    "mAP level 1": "level1_image_retrieval_true_map",
    "mAP level 2": "level2_image_retrieval_true_map",
    **{task: f"zeroshot_{task}_acc1" for task in TASKS},
    "hard text": "hard_text_retrieval_recall@1",
    "hard image": "hard_image_retrieval_recall@1",
}


def judge_scenes(matcher: Matcher, n: int = 500, inner: bool = False) -> dict[str, float]:
    """Retrieval of n held-out scenes by full captions (`text_retrieval_recall@1`, ..., and against the truth), by
    general ones (`level1_`, `level2_`), zero-shot accuracy (`zeroshot_TASK_acc1`), and in groups that share all but
    shape (`hard_`; chance 1/8). With `inner` of scenes whose halves stay describable, which have no such groups.
    """
    more = "&inner=1" if inner else ""
    metrics = _numbers(matcher, "retrieval", f"scenes:test?n={n}{more}")
    for level in (1, 2):
        general = _numbers(matcher, "retrieval", f"scenes:test?n={n}&levels={level}{more}")
        metrics |= {f"level{level}_{name}": v for name, v in general.items() if "true" in name}
    for task in TASKS:
        judged = _numbers(matcher, "zeroshot", f"scenes:test?task={task}&n={2 * n}{more}")
        metrics[f"zeroshot_{task}_acc1"] = judged["acc1"]
    return metrics if inner else metrics | _hard(matcher, n)


def _numbers(matcher: Matcher, task: str, src: str) -> dict[str, float]:
    return {name: value for name, value in evaluation.evaluate(matcher, task, src).items() if name != "skipped"}


def _hard(matcher: Matcher, n: int) -> dict[str, float]:
    size = matcher.model.config.image.size
    scenes = draw_all(f"scenes:test?hard=shape&n={n // GROUP * GROUP}", size)
    images, texts = matcher.encode_image(scenes.pixels), matcher.encode_text(scenes.captions)
    judged = within_groups(matcher.score, images, texts)
    return {f"hard_{name}": value for name, value in judged.items()}


def within_groups(score: Score, images: Features, texts: Features) -> dict[str, float]:
    """Recall@1 both ways among the eight images and the eight captions of each group; rows i belong together."""
    groups = chunks(len(images["vec"]), GROUP)
    scores = torch.stack([score(rows(images, group), rows(texts, group)) for group in groups])  # [groups, 8, 8]
    matches = torch.eye(GROUP, dtype=torch.bool).repeat(len(scores), 1)
    ways = {"text": scores, "image": scores.transpose(1, 2)}
    return {f"{n}_retrieval_recall@1": recall_at(x.flatten(0, 1), matches, 1).mean().item() for n, x in ways.items()}
