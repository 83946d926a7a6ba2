"""The loader: a batch depends on its step alone, whatever workers, ranks, resuming or bad samples; and its workers."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch

from cases import worker_dies
from kiloword.config.recipes import AugmentConfig, DataConfig, TextConfig
from kiloword.data.edits import MixtureSource, every_row
from kiloword.data.loader import ATTEMPTS, Loader
from kiloword.data.open import open_source
from kiloword.data.reading import BadRows, advice, captions_of as all_captions, eval_batches
from kiloword.data.sample import question_in
from kiloword.data.sampler import Order
from kiloword.data.steps import in_order
from kiloword.data.stored import WithTokens
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.randomness import Draw
from kiloword.types import Batch, Example, Fetch, Skipped
from sources import Images, decoded, tensors

SIZE, ROWS, BATCH = 8, 40, 8
TEXT = TextConfig(context=24, vocab=400)
AUGMENT = AugmentConfig(crop=0.5, flip=0.5, jitter=0.5)
TOKENIZER = Tokenizer.train([f"image {i} caption {j}" for i in range(ROWS) for j in range(4)], 320)


def make(source: Images | None = None, augment: AugmentConfig = AUGMENT, **changes: object) -> Loader:
    source = source or Images()
    captions = changes.pop("captions", "one")
    data = DataConfig(captions=captions, augment=augment)  # type: ignore[arg-type]
    order = changes.pop("order", None) or Order(len(source), BATCH, seed=3)
    return Loader(source, order, data, TEXT, SIZE, TOKENIZER, seed=5, **changes)  # type: ignore[arg-type]


def same(a: Batch, b: Batch) -> bool:
    return a.skipped == b.skipped and all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def captions_of(batch: Batch) -> list[str]:
    return decoded(TOKENIZER, batch.texts)


def mixed(example: Example, fetch: Fetch, draw: Draw) -> Example:
    """A transform with everything a transform may do: another row, precomputed features, the composed flag."""
    other = fetch.example(int(draw.rng("mix").integers(len(fetch))), draw)
    image = torch.cat([example.image[:, :, : SIZE // 2], other.image[:, :, SIZE // 2 :]], 2)
    sides = {"other": torch.tensor([other.row])}
    captions = [f"{example.captions[0]} and {other.captions[0]}", *example.captions[1:]]
    per_text = {"length": torch.tensor([len(c) for c in captions])}
    return replace(example, image=image, captions=captions, composed=True, image_features=sides, text_features=per_text)


def test_workers_change_nothing() -> None:
    bad = Images({3: "sample", 7: "bytes", 11: "silent", 20: "crash"})
    alone = make(bad, captions=2, transforms=(mixed,))
    state = torch.random.get_rng_state()
    first = list(alone.batches(0, 12))
    second = list(replace(alone, workers=2).batches(0, 12))
    assert len(first) == len(second) == 12
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state), "the loader drew from the global generator"


def test_resume_at_any_step() -> None:
    full = list(make().batches(0, 16))
    for step in (0, 1, 4, 5, 13):
        assert all(same(a, b) for a, b in zip(full[step:], make().batches(step, 16), strict=True))
    assert same(next(islice(make().batches(5), 1)), full[5])


def test_ranks_share_what_one_rank_sees() -> None:
    bad = Images({3: "sample", 20: "crash"})
    for step in range(6):
        whole = make(bad, captions="all").batch(step)
        parts = [make(bad, captions="all", rank=r, ranks=4).batch(step) for r in range(4)]
        assert torch.equal(torch.cat([p.images for p in parts]), whole.images)
        assert torch.equal(torch.cat([p.seeds for p in parts]), whole.seeds)
        assert torch.cat([p.position for p in parts]).tolist() == whole.position.tolist() == list(range(BATCH))
        assert [text for p in parts for text in captions_of(p)] == captions_of(whole)
        assert [bad for p in parts for bad in p.skipped] == whole.skipped


def test_bad_samples_are_named_and_replaced_the_same_way_each_time() -> None:
    bad = {3: "sample", 7: "bytes", 11: "silent", 20: "crash"}
    epoch = list(make(Images(bad)).batches(0, ROWS // BATCH))
    assert {bad.row: (bad.key, bad.reason) for batch in epoch for bad in batch.skipped} == {
        3: ("k003", "truncated image"),
        7: ("k007", "not an image in a known format"),
        11: ("k011", "no caption"),
        20: ("k020", "KeyError: 'column'"),
    }
    for batch in epoch:
        assert len({text.split()[1] for text in captions_of(batch)}) == BATCH, "a replacement was in the batch already"
        assert len(batch.seeds.unique()) == len(batch) == BATCH


def test_a_replacement_is_what_its_own_turn_would_give() -> None:
    broken, whole = make(Images({3: "sample"})), make()
    turns = {row: (step, n) for step in range(5) for n, row in enumerate(whole.order.batch_rows(step)[1].tolist())}
    step, place = turns[3]
    batch = broken.batch(step)
    turn, at = turns[int(captions_of(batch)[place].split()[1])]
    own = whole.batch(turn)
    assert torch.equal(batch.images[place], own.images[at])
    assert batch.seeds[place] == own.seeds[at]


def test_a_replacement_in_a_subset_is_of_the_subset() -> None:
    order = Order(2 * BATCH, BATCH, 3, of=ROWS)
    rows = {row for step in range(2) for row in order.batch_rows(step)[1].tolist()}
    broken = replace(make(Images(dict.fromkeys(sorted(rows)[:BATCH:2], "sample"))), order=order)
    texts = [text for step in range(10) for text in captions_of(broken.batch(step))]
    assert {int(text.split()[1]) for text in texts} == rows - set(sorted(rows)[:BATCH:2])


def test_transforms_get_replacements_too_and_report_them() -> None:
    def fetch_bad(example: Example, fetch: Fetch, draw: Draw) -> Example:
        return replace(example, captions=[f"beside {fetch.example(3, draw).row}"])

    batch = make(Images({3: "sample"}), transforms=(fetch_bad,)).batch(0)
    assert "beside 3" not in captions_of(batch)
    assert len([s for s in batch.skipped if s.row == 3]) >= BATCH


def test_all_rows_bad_ends_with_a_sentence_also_from_a_worker() -> None:
    bad = Images(dict.fromkeys(range(ROWS), "sample"))
    message = rf"images: {ATTEMPTS + 1} rows .* are bad: {ATTEMPTS + 1} samples skipped, truncated image: k0"
    for workers in (0, 1):
        with pytest.raises(ValueError, match=message) as caught:
            list(make(bad, workers=workers).batches(0, 1))
        assert "Traceback" not in str(caught.value)


def test_one_reason_that_the_name_of_the_data_can_change_brings_advice() -> None:
    rows = [Skipped(0, "a", "no caption"), Skipped(1, "b", "no caption")]
    assert "FILE?caption=COLUMN" in advice(rows)
    assert advice([*rows, Skipped(2, "c", "truncated image")]) == advice(rows[:0]) == ""


def test_bad_rows_are_counted_once_and_stop_a_run() -> None:
    bad = BadRows(200, 0.01)
    first = Skipped(4, "k4", "truncated image")
    assert bad.count([first, first]) == [first]
    assert bad.count([first]) == []
    bad.count([Skipped(5, "k5", "no caption")])
    resumed = BadRows(200, 0.01)
    resumed.load_state_dict(bad.state_dict())
    for one in (bad, resumed):
        assert len(one) == 2
        with pytest.raises(
            ValueError, match=r"3 of the data set's 200 samples are bad, more than the allowed 1.00%: .*trunc"
        ):
            one.count([Skipped(6, "k6", "truncated image")])


def test_part_weights_move_on_with_the_epoch() -> None:
    """A bad row is the same one in every epoch."""
    source = MixtureSource([Images(), Images({3: "bytes"}, rows=20)], [1.0, 0.5])
    loader = Loader(source, Order(50, 50), DataConfig(captions="all"), TEXT, SIZE, TOKENIZER)
    skipped = list[Skipped]()
    for epoch in range(12):
        batch = loader.batch(epoch)
        expected = [c for row in range(50) for c in source.at(epoch).record(row).captions]
        assert batch.skipped or sorted(captions_of(batch)) == sorted(expected)
        skipped += batch.skipped
    assert 3 < len(skipped) < 12
    assert {bad.row for bad in skipped} == {len(Images()) + 3}
    assert len(BadRows(len(every_row(source)), 0.05).count(skipped)) == 1


def test_evaluation_reads_every_row_once_in_order() -> None:
    source = Images({2: "sample", 9: "bytes", 5: "silent"}, rows=11, side=20)
    for workers in (0, 2):
        parts = list(eval_batches(source, SIZE, "squash", 4, workers))
        assert [r for p in parts for r in p.rows] == [0, 1, 3, 4, 5, 6, 7, 8, 10]
        assert [k for p in parts for k in p.keys][:2] == ["k000", "k001"]
        assert [s.row for p in parts for s in p.skipped] == [2, 9]
        assert parts[0].images.shape == (3, 3, SIZE, SIZE)
        assert parts[1].captions[1] == []
        assert [p.labels.tolist() for p in parts if p.labels is not None] == [[0, 1, 0], [1, 2, 0, 1], [2, 1]]
    empty = next(eval_batches(Images({0: "sample"}, rows=1), SIZE))
    assert empty.images.shape == (0, 3, SIZE, SIZE)
    some = eval_batches(Images({4: "sample"}), SIZE, batch=2, parts=[range(1, 4), range(5, 5), range(3, 7, 2)])
    assert [batch.rows for batch in some] == [[1, 2], [3], [3, 5]]
    with pytest.raises(ValueError, match="batch is 0"):
        eval_batches(source, SIZE, batch=0)
    texts = list(all_captions(Images({4: "sample", 6: "silent"}, rows=7)))
    assert texts == [text for row in (0, 1, 2, 3, 5) for text in Images().record(row).captions], "all but bad ones"


def test_stored_tokens_keep_the_question_of_a_row() -> None:
    """Training on them reads no image."""
    source = open_source("scenes:train?task=vqa&n=4")
    lean = WithTokens(source, lambda *_: object(), lean=True)  # type: ignore[arg-type, return-value]
    assert [question_in(lean.record(n).info) for n in range(4)] == [source.record(n).info["question"] for n in range(4)]
    assert question_in({"question": "which?"}) is None, "it has no answers"


class Truthful(Images):
    """Every text is true of every image."""

    def relevance(self, captions: list[str], rows: list[int]) -> np.ndarray:
        return np.ones((len(captions), len(rows)), bool)


def test_the_truth_of_a_row_in_place_of_another_is_not_made_up() -> None:
    assert make(Truthful(), truth=True).batch(0).text_features["truth"].shape[1] == BATCH
    with pytest.raises(ValueError, match="ground truth need every row"):
        list(make(Truthful({3: "sample"}), truth=True).batches(0, 5))
    assert len(list(make(Truthful({3: "sample"})).batches(0, 5))) == 5


def partly(example: Example, fetch: Fetch, draw: Draw) -> Example:
    return replace(example, image_features={"x": torch.zeros(1)} if example.row % 2 else {})


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"truth": True}, "ground truth"),
        ({"questions": True}, "no questions"),
        ({"transforms": (partly,)}, "must cover every row"),
        ({"transforms": (lambda example, fetch, draw: replace(example, captions=[]),)}, r"k0\d\d without a caption"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make(**settings).batch(0)


# Work in order, in this process or in workers


def test_workers_keep_the_order_of_steps_without_end() -> None:
    """The first steps take longest. The workers end with the items."""

    def make(step: int) -> torch.Tensor:
        time.sleep(0.05 * (step < 2))
        return torch.tensor([step, os.getpid()])

    items = in_order(make, count(), 2)
    steps, processes = torch.stack(list(islice(items, 6))).T.tolist()
    assert steps == [*range(6)]
    assert len({*processes, os.getpid()}) == 3
    items.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()


def failing(error: Exception) -> Callable[[int], int]:
    def make(step: int) -> int:
        if step == 2:
            raise error
        return step

    return make


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ValueError("as it is"), ValueError, "^as it is$"),
        (MemoryError(), ValueError, "^batch of step 3: out of memory"),
        (OSError(errno.ENOSPC, "No space left on device"), ValueError, "^batch of step 3: No space left on device"),
        (RuntimeError("a bug"), RuntimeError, "a bug"),
    ],
    ids=str,
)
def test_what_goes_wrong(workers: int, error: Exception, kind: type[Exception], said: str) -> None:
    items = in_order(failing(error), range(5), workers)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(kind, match=said):
        next(items)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        pytest.param(killed, "(Killed|exited unexpectedly)", marks=worker_dies),
        (lambda: time.sleep(600), "timed out after 1 seconds"),
    ],
    ids=["killed", "hangs"],
)
def test_a_worker_that_stops_ends_the_items(does: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=f"a loader worker stopped.*{said}.*fewer --workers"):
        list(in_order(lambda step: does() if step == 1 else None, range(3), 1, timeout=1 if "timed" in said else 60))
    assert not multiprocessing.active_children()
    gc.collect()  # here, not in a later test


def test_a_worker_goes_on_at_a_signal_to_all_processes() -> None:
    """The main process saves first, and ends its workers."""

    def make(step: int) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        return step

    assert list(in_order(make, range(2), 1)) == [0, 1]
