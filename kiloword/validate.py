"""The validation of a run while it trains."""

from __future__ import annotations

from typing import Any

from kiloword import parallel
from kiloword.log import read_metrics
from kiloword.prepare import Run, open_val


def validate(run: Run) -> dict[str, float]:
    """Retrieval on the recipe's validation data, or answers where the method wants questions; "val/" before names.

    All ranks share the work and know the result.
    """
    from kiloword.api import Matcher
    from kiloword.evaluation import evaluate
    from kiloword.sharing import sharing

    source = open_val(run.recipe)
    assert source is not None
    asks = "questions" in run.learner.method.needs
    names = ("accuracy",) if asks else ("text_retrieval_recall@1", "image_retrieval_recall@1")
    options: dict[str, Any] = {"train": run.loader.source} if asks and not hasattr(source, "answers") else {}
    run.learner.eval()
    sharded = any(parallel.sharded(p) for p in run.learner.parameters())
    with run.average.in_place(run.learner), sharing(lockstep=sharded):
        matcher = Matcher(run.learner.model, run.tokenizer)
        found = evaluate(matcher, "vqa" if asks else "retrieval", source, **options)
    run.learner.train()
    run.log.say(f"val at step {run.step}: " + ", ".join(f"{k} {found[k]:.3f}" for k in names))
    return {f"val/{k}": v for k, v in found.items() if isinstance(v, float)}


def validated(run: Run) -> bool:
    """Its metrics hold the last step's validation: a run that was killed before may have ended without."""
    rows = read_metrics(run.out / "metrics.jsonl") if parallel.rank() == 0 else []
    found = any(row["step"] == run.step and any(name.startswith("val/") for name in row) for row in rows)
    return parallel.any_rank(found)[0]
