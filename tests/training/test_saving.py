"""What a save in the background does to the run: its order on disk, and what its failures say."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kiloword.files import SaveError
from kiloword.models.states import steps_done
from kiloword.training.loop import RunOptions, train
from states import recipe

EVERY = RunOptions(log_every=1, save_every=2, quiet=True)


def on_names(patch: pytest.MonkeyPatch, work: Callable[[Path], object]) -> None:
    """`work` gets each file that has received its name."""
    real = Path.replace
    patch.setattr(Path, "replace", lambda self, to: (real(self, to), work(Path(to)))[0])


def test_a_state_exists_once_all_of_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors, rows before it, then the model, then the numbers."""
    events, fsync = list[str](), os.fsync

    def synced(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith("metrics.jsonl"):
            events.append("rows")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    on_names(monkeypatch, lambda path: events.append(re.sub(r"\d{3,}", "", path.relative_to(tmp_path).as_posix())))
    train(recipe(2), tmp_path, options=EVERY)
    saved = events[events.index("state/step-/shard--of-.safetensors") :]
    wanted = ("state/step-/shard--of-.safetensors", "rows", "model/model.safetensors", "state/step-.json")
    assert [event for event in saved if event in wanted][:4] == list(wanted)


def test_a_part_that_rank_0_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_names(monkeypatch, lambda path: path.unlink() if path.name.startswith("shard-") else None)
    with pytest.raises(SaveError, match="must be a folder that all ranks share"):
        train(recipe(2), tmp_path, options=EVERY)
    assert steps_done(tmp_path / "state") == 0
    assert not (tmp_path / "model" / "model.safetensors").exists()
