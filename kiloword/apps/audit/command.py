"""The verb audit. No torch at import: help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kiloword.apps.audit import Kind
from kiloword.config.execution import Flat, Some
from kiloword.config.settings import ABOVE_0, check, setting
from kiloword.evaluation.command import Execution

EXECUTION = Execution()


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Find pairs that do not match, duplicates and wrong labels.

    Give a model, best one that was trained on other data, or precomputed features (`kiloword embed`).

    Examples:
      kiloword audit photos/train --model runs/first/model
      kiloword train siglip --data photos/train --keep audit/keep.parquet --out runs/second
    """

    data: Some[str]  # tars, a table, a folder of images or scenes, as for `kiloword train`
    model: str = ""  # model folder, open_clip:NAME:WEIGHTS or hf:FOLDER
    out: Path = Path("audit")  # folder for report.html, findings.parquet, keep.parquet and audit.json
    extra_captions: tuple[str, ...] = ()  # parquet tables (key, captions); their captions are audited too
    features: Path | None = None  # feature store of the data, in place of the model; labels are not judged
    target_precision: float = setting(
        0.8, "share of true mismatches, by estimate, among the pairs that are reported as mismatches", ABOVE_0, 1
    )
    drop: tuple[Kind, ...] = ("mismatch", "unreadable")  # findings that the keep-list omits
    execution: Flat[Execution] = EXECUTION

    def run(self) -> None:
        """Encode the data, judge it, print, and write the files. Raises: ValueError for what cannot be used."""
        from kiloword.apps.audit.judge import audit

        check(self)
        if not (self.model or self.features):
            raise ValueError("name --model, or --features that a model computed.")
        of_model = (self.model, self.execution.image_features, self.execution.text_features, self.execution.dim)
        if self.features and any(of_model):
            raise ValueError("--features replaces the model: omit --model, --image-features, --text-features, --dim.")
        audit(self)
