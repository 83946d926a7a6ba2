"""Ranks that share evaluation, embed, caption and mine: the numbers and files of one process, from any number."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from commands import torchrun
from folders import model_folder
from kiloword.api import Matcher
from kiloword.apps.mine.search import search
from kiloword.data.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed import collectives
from kiloword.distributed.sharing import sharing
from kiloword.evaluation import evaluate
from kiloword.evaluation.tasks import CaptionOptions, ProbeOptions
from kiloword.generation.captioner import Captioner
from kiloword.generation.command import write_captions
from kiloword.generation.options import GenerationOptions
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.stores.embed import embed
from kiloword.stores.features import FeatureStore
from kiloword.stores.teachers import KilowordTeacher as Teacher
from kiloword.types import BadSample, Record, Skipped
from kiloword.verify.suite import over_ranks
from sources import LOW, files_of, random_corpus
from threads import over_threads

SHORT = GenerationOptions(method="greedy", longest=6)
TASKS: dict[str, tuple[str, str, str, dict[str, Any]]] = {  # by name: method, task, data, options
    "retrieval": ("prolip", "retrieval", "scenes:test?n=22&captions=2", {}),
    "shortlist": ("llip", "retrieval", "scenes:test?n=22", {"shortlist": 4}),
    "zeroshot": ("clip", "zeroshot", "scenes:test?n=22&task=colour", {}),
    "filter": ("prolip", "zeroshot", "scenes:test?n=22&task=colour", {"prompts": "bprw"}),
    "hierarchy": ("prolip", "hierarchy", "scenes:test?n=22", {}),
    "uncertainty": ("prolip", "uncertainty", "scenes:test?n=22&levels=1,2,3", {}),
    "spectrum": ("clip", "spectrum", "scenes:test?n=22", {}),
    "reconstruction": ("sycoca", "reconstruction", "scenes:test?n=22", {}),
    "caption": ("sycoca", "caption", "scenes:test?n=22", {"generate": SHORT, "judge": CaptionOptions(meteor=False)}),
    "probe": (
        "clip",
        "probe",
        "scenes:test?n=22&task=colour",
        {"train": "scenes:train?n=40&task=colour", "probe": ProbeOptions(weight_decay=0.01)},
    ),
    "vqa": ("vqa", "vqa", "scenes:test?n=22&task=vqa", {"train": "scenes:train?n=40&task=vqa"}),
}
FIRST_ALONE = ("caption",)


@cache
def matcher(method: str) -> Matcher:
    tokenizer = Tokenizer.train(["a red circle above a blue square", "what colour is it"] * 3, 290)
    config = default_recipe(method, "debug").model
    config = replace(config, text=replace(config.text, vocab=tokenizer.vocab))
    slots = preset(method)
    return Matcher(build(config, slots, 0), tokenizer, slots)


def judged(name: str) -> tuple[dict[str, float], list[Skipped]]:
    """Batches of 5: the last is shorter, and of 2 or 3 ranks not all have one in the last round."""
    method, task, data, options = TASKS[name]
    skipped: list[Skipped] = []
    source: Any = open_source(data, 32)
    with patch("kiloword.evaluation.retrieval.CHUNK", 10):
        return evaluate(matcher(method), task, source, skipped=skipped, batch=5, **options), skipped


class Holes:
    """Scenes of which a whole batch cannot be read, one has no caption, and rows come again in other batches.

    Args: cut: a row at which reading is interrupted.
    """

    def __init__(self, rows: int = 13, cut: int | None = None) -> None:
        self.inner, self.cut = open_source(f"scenes:test?n={rows}", 32), cut
        self.name, self.fingerprint = "holes", "holes"

    def __len__(self) -> int:
        return len(self.inner)

    def record(self, row: int) -> Record:
        if row == self.cut:
            raise KeyboardInterrupt
        if row in (0, 1, 2, 3, 4, 11):
            raise BadSample(f"row {row} is broken")
        found = self.inner.record({7: 5, 10: 9, 12: 5}.get(row, row))
        return replace(found, captions=[]) if row == 8 else found


def _all(folder: str) -> None:
    with sharing():
        found = {name: judged(name) for name in TASKS}
        Path(folder, f"{collectives.rank()}.pickle").write_bytes(pickle.dumps(found))
        write_files(Path(folder, "files"))


def write_files(folder: Path) -> None:
    """A feature store in parts of 6 rows and a table of captions, batches of 2."""
    model = matcher("coca")
    write_store(Holes(), folder)
    describer = Captioner(model.model, model.tokenizer)
    write_captions(describer, Holes(), folder / "captions.parquet", SHORT, batch=2, part=6)


def write_store(source: Any, folder: Path) -> None:
    teacher = Teacher(matcher("coca").model, matcher("coca").tokenizer, "t")
    embed(teacher, source, folder / "side", model="t", dtype="fp32", part=6, batch=2)


def some_truth(captions: Any, images: Any) -> torch.Tensor:
    return torch.from_numpy((captions[:, None] * 7 + images) % 5 == 0)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("rows", [13, 6])
def test_three_threads_find_what_one_process_does(lockstep: bool, rows: int) -> None:
    """Batches in turns, of which a whole one cannot be read; in lockstep all call the towers equally often."""

    def work() -> tuple[Any, list[str], int]:
        model, skipped, calls = matcher.__wrapped__("siglip"), list[Skipped](), list[object]()
        for tower in (model.model.image_tower, model.model.text_tower):
            tower.register_forward_hook(lambda *given: calls.append(given[0]))
        with sharing(lockstep):
            found = evaluate(model, "retrieval", Holes(rows), skipped=skipped, batch=5)
            return [judged(name) for name in ("shortlist", "spectrum")] + [found], list(map(str, skipped)), len(calls)

    alone, others = work(), over_threads(3, work)
    assert [found[:2] for found in others] == [alone[:2]] * 3
    assert not lockstep or {found[2] for found in others} == {others[0][2]}
    assert others[0][2] > 0


@pytest.mark.parametrize("known", [False, True])
def test_three_threads_mine_what_one_process_does(known: bool) -> None:
    def work() -> Any:
        with sharing():
            return search(random_corpus(0, n=23), LOW, most=4, chunk=3, truth=some_truth if known else None)

    alone = work()
    assert alone.counts[0, 0] > 0
    others = over_threads(3, work)
    assert all(np.array_equal(value, getattr(others[0], name)) for name, value in vars(alone).items())


@pytest.mark.slow
def test_every_task_and_file_over_three_ranks(tmp_path: Path) -> None:
    """Keys that repeat and rows that cannot be read fall to different ranks; a table is begun by one process."""
    write_files(tmp_path / "files")
    shutil.rmtree(tmp_path / "files" / "side")
    with pytest.raises(KeyboardInterrupt):
        write_store(Holes(cut=9), tmp_path / "files")
    over_ranks(3, _all, str(tmp_path))
    every = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(3)]
    for rank, found in enumerate(every):
        for name in TASKS:
            if rank == 0 or name not in FIRST_ALONE:
                assert found[name] == judged(name), name
    write_files(tmp_path / "one")
    assert len(FeatureStore(tmp_path / "one" / "side")) == 7
    assert files_of(tmp_path / "one") == files_of(tmp_path / "files")


@pytest.mark.slow
def test_commands_over_ranks(tmp_path: Path) -> None:
    """The first rank alone speaks, and one sentence ends all."""
    model, data = model_folder(tmp_path / "model", "coca"), "scenes:test?n=22"
    words = ["eval", "retrieval", model, "--data", data, "--batch", 4]
    one, two = torchrun(1, *words), torchrun(2, *words)
    assert one.returncode == two.returncode == 0, two.stderr[-3000:]
    assert one.stdout == two.stdout
    failed = torchrun(2, "eval", "retrieval", tmp_path / "none", "--data", data)
    assert failed.returncode != 0
    assert failed.stderr.count("kiloword: ") == 1
