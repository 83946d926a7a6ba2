"""A model of ours in MTEB and MIEB: the vectors of batches, and their accuracy, which is ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import kiloword
from folders import model_folder
from kiloword.cli.mteb import embeddings, encoder
from kiloword.data.open import open_source
from kiloword.evaluation import evaluate
from kiloword.model.trunks.libraries import torchvision_ready

SOURCE: Any = open_source("scenes:test?task=colour&n=40", 40)
RECORDS = [SOURCE.record(row) for row in range(40)]
ROWS = [{"image": Image.fromarray(r.image), "text": f"{n} {r.captions[0]}", "id": n} for n, r in enumerate(RECORDS)]


def lists(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("kinds", [["image"], ["text"], ["image", "text"]])
def test_vectors_of_batches(kinds: list[str], tmp_path: Path) -> None:
    """Where a batch has both, their sums."""
    matcher = kiloword.load(model_folder(tmp_path / "model"))
    images, texts = ([row[name] for row in ROWS] for name in ("image", "text"))
    vectors = {"image": matcher.encode_image(images)["vec"], "text": matcher.encode_text(texts)["vec"]}
    rows = [{name: row[name] for name in ("id", *kinds)} for row in ROWS]
    found = embeddings(matcher, DataLoader(rows, batch_size=16, collate_fn=lists))  # type: ignore[arg-type]
    torch.testing.assert_close(found, torch.stack([vectors[kind] for kind in kinds]).sum(0), atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore")  # theirs
def test_their_accuracy_is_ours(tmp_path: Path) -> None:
    """It was run with mteb 2.26.24 in an environment of its own: no lock of ours has mteb."""
    torchvision_ready()
    mteb = pytest.importorskip("mteb", reason="mteb is not installed")
    from datasets import Dataset, DatasetDict
    from mteb.mocks.mock_tasks.zeroshot_classification import MockZeroShotClassificationTask

    class Colours(MockZeroShotClassificationTask):  # type: ignore[misc]
        def load_data(self, *_: Any, **__: Any) -> None:
            labels = [record.label for record in RECORDS]
            images = [row["image"] for row in ROWS]
            self.dataset = DatasetDict({"test": Dataset.from_dict({"image": images, "label": labels})})
            self.data_loaded = True

        def get_candidate_labels(self) -> list[str]:
            return [f"a {name} thing" for name in SOURCE.classnames]

    folder = model_folder(tmp_path / "model")
    (found,) = mteb.evaluate(encoder(str(folder)), Colours(), cache=None).task_results
    ours = evaluate(kiloword.load(folder), "zeroshot", SOURCE, templates=["a {c} thing"])
    assert found.get_score() == pytest.approx(ours["acc1"])
    assert 0 < ours["acc1"] < 1
