"""Whether a folder holds this run; what weights that do not fit are said to be; rows that stand in a batch together."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kiloword.config.settings import differing
from kiloword.data.sampler import Order
from kiloword.distributed import collectives
from kiloword.distributed.device import precision_of
from kiloword.files import write_json
from kiloword.methods import siglip
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.model_folder import check_finite, check_fit, not_finite
from kiloword.training.resolve import _order, _stores, micro_batches
from kiloword.training.run_folder import RunFile, check_same_run, error_kept, forget_error, holds_run
from kiloword.training.signals import Stopped

RECIPE = replace(default_recipe("siglip", "debug", ("scenes?n=70",)), batch=16, steps=20)
FILE = RunFile(recipe=RECIPE, data_fingerprint="f", data_sampled="s", features=("a",))


def changed(**recipe: Any) -> RunFile:
    return replace(FILE, recipe=replace(RECIPE, **recipe))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run of FILE that has done 10 steps."""
    write_json(tmp_path / "config.json", asdict(FILE))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "step-000000010.json").touch()
    return tmp_path


DATA = "the data is not what the run began with"


@pytest.mark.parametrize(
    ("file", "extend", "says"),
    [
        (FILE, False, None),
        (changed(micro=4, chunk=7), False, None),  # what changes no weight
        (replace(FILE, data_sampled="", features=()), False, None),  # known of one of them alone
        (changed(steps=30), True, None),
        (changed(steps=10), True, None),
        (changed(steps=9), True, "has done 10 steps already: it cannot end after 9"),
        (changed(steps=30), False, "steps is 20 there, 30 here.*its settings. Use --extend to run it for another"),
        (changed(steps=9), False, "steps is 20 there, 9 here.*repeat its settings.$"),
        (changed(steps=30, seed=1), False, "steps is 20 there, 30 here; seed is 0 there, 1 here.*its settings.$"),
        (changed(batch=32), True, r"holds another run: batch is 16 there, 32 here\. Choose"),
        (replace(FILE, data_fingerprint="g", data_sampled="t"), False, rf"{DATA} \(a file .* is 'f' there, 'g' here\."),
        (replace(FILE, data_sampled="t"), False, rf"{DATA} \(images or .*\); data_sampled is 's' there, 't' here"),
        (replace(FILE, features=("b",)), False, "a feature store was replaced .*; features is"),
        (
            replace(changed(data=replace(RECIPE.data, sources=("scenes?n=71",))), data_fingerprint="g"),
            False,
            r"holds another run: data\.sources is",
        ),
    ],
)  # fmt: skip
def test_whether_a_folder_holds_this_run(out: Path, file: RunFile, extend: bool, says: str | None) -> None:
    if says is None:
        check_same_run(out, file, extend)
        return
    with pytest.raises(ValueError, match=says):
        check_same_run(out, file, extend)


def test_a_run_from_before_a_setting_existed_has_its_default(out: Path) -> None:
    settings = asdict(siglip.Settings())
    older = changed(settings={name: value for name, value in settings.items() if name != "bias"})
    write_json(out / "config.json", asdict(older))
    check_same_run(out, changed(settings=settings), False)
    with pytest.raises(ValueError, match=r"settings\.bias is -10\.0 there, 3\.0 here"):
        check_same_run(out, changed(settings=settings | {"bias": 3.0}), False)


def test_a_folder_in_which_nothing_was_trained_is_free(out: Path) -> None:
    other = changed(seed=5)
    (out / "state" / "step-000000010.json").unlink()
    assert not holds_run(out)
    check_same_run(out, other, False)
    (out / "model").mkdir()
    (out / "model" / "model.safetensors").touch()
    assert holds_run(out)
    with pytest.raises(ValueError, match="holds another run"):
        check_same_run(out, other, False)
    (out / "config.json").unlink()
    with pytest.raises(ValueError, match=r"lacks its config\.json"):
        check_same_run(out, FILE, False)


def test_differences_of_plain_values() -> None:
    a = {"x": 1, "y": {"z": [1, 2], "only": None}, "same": 4, "w": 0}
    b = {"x": 2, "y": {"z": [1, 2]}, "same": 4.0, "more": 7}
    assert differing(a, b) == {"x": (1, 2), "w": (0, None), "more": (None, 7)}
    assert differing({"y": {"z": 1}}, {"y": {"z": 2}}) == {"y.z": (1, 2)}
    assert differing({"y": {"z": 1}}, {"y": 3}) == {"y": ({"z": 1}, 3)}


@pytest.mark.parametrize(("rank", "error", "kept"), [
    (0, ValueError("no room at http://me:secret@host/a"), "no room at http://"), (0, KeyError("k"), "KeyError: 'k'"),
    (1, ValueError("x"), None), (0, Stopped("stopped"), None), (0, KeyboardInterrupt(), None),
])  # fmt: skip
def test_an_error_is_kept_for_those_who_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, error: BaseException, kept: str | None
) -> None:
    monkeypatch.setattr(collectives, "rank", lambda: rank)
    with pytest.raises(type(error)), error_kept(tmp_path):
        raise error
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert len(texts) == (kept is not None)
    assert all(kept in text and "secret" not in text for text in texts if kept)
    forget_error(tmp_path)
    assert list(tmp_path.iterdir()) == []
    forget_error(tmp_path)


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({"a": (2, 3), "b": (4,)}, None),
        ({"a": (2, 3)}, "W do not fit F: missing b."),
        ({"a": (2, 3), "b": (4,), "c" * 300: ()}, f"W do not fit F: unknown {'c' * 200}."),
        ({"a": (3, 2), "b": (4,)}, "W do not fit F: a is [3, 2] instead of [2, 3]."),
        ({"c": (1,), "a": (1,), "d": (1,)}, "W do not fit F: missing b; unknown c; unknown d and 1 more."),
        ({"c": (1,), "a": (2, 3), "d": (1,)}, "W do not fit F: missing b; unknown c; unknown d."),
    ],
)
def test_weights_that_do_not_fit_are_named(there: dict[str, Any], says: str | None) -> None:
    own = {"a": (2, 3), "b": (4,)}
    if says is None:
        check_fit(own, there, "W", "F")
        return
    with pytest.raises(ValueError) as error:
        check_fit(own, there, "W", "F")
    assert str(error.value) == says


def test_tensors_of_another_type_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"a is torch\.float32 \[2\] instead of torch\.float64 \[2\]"):
        check_fit({"a": (torch.float64, (2,))}, {"a": (torch.float32, (2,))}, "W", "F")


def test_values_that_are_not_finite() -> None:
    tensors = {"a": torch.ones(2), "b": torch.tensor([1.0, float("inf")]), "c": torch.tensor([float("nan")])}
    tensors |= {"large": torch.full((4,), 3e38), "n": torch.tensor([1])}  # whose sum overflows
    assert not_finite(tensors | {"empty": torch.empty(0), "yes": torch.tensor([True])}) == ["b", "c"]
    with pytest.raises(ValueError, match=r"weights in F cannot be used: b is NaN or infinite \(2 of 5 tensors\)"):
        check_finite(tensors, "F")


class Rows:
    name, fingerprint = "rows", "r"

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows


def test_groups_stand_in_a_batch_together() -> None:
    """Each group whole in one batch; groups are shuffled, and their rows too."""
    recipe = replace(RECIPE, data=replace(RECIPE.data, together=4), batch=8)
    order = _order(recipe, Rows(40))  # type: ignore[arg-type]
    steps = [order.batch_rows(step)[1].tolist() for step in range(5)]
    assert sorted(row for rows in steps for row in rows) == list(range(40))
    for rows in steps:
        assert {sum(row // 4 == group for row in rows) for group in {row // 4 for row in rows}} == {4}
    rows = [row for step in steps for row in step]
    assert [row // 4 for row in rows] != sorted(row // 4 for row in rows)
    with pytest.raises(ValueError, match="groups of 4 rows do not fill a batch of 10"):
        _order(replace(recipe, batch=10), Rows(40))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows: 41 rows are not a multiple of the group size 4"):
        _order(recipe, Rows(41))  # type: ignore[arg-type]
    alone = replace(recipe, data=replace(recipe.data, together=1))
    assert _order(alone, Rows(41)).steps_per_epoch == 5  # type: ignore[arg-type]


def test_rows_of_a_subset() -> None:
    def order(**data: object) -> Order:
        recipe = replace(RECIPE, data=replace(RECIPE.data, **data), batch=8)  # type: ignore[arg-type]
        return _order(recipe, Rows(40))  # type: ignore[arg-type]

    assert order() == order(rows=40) == Order(40, 8, RECIPE.seed)
    assert order(rows=16) == Order(16, 8, RECIPE.seed, of=40)
    with pytest.raises(ValueError, match="--rows is 41, but rows has 40 rows: expected at most 40, or 0 for all"):
        order(rows=41)
    with pytest.raises(ValueError, match="--rows 16 and --together 4 exclude each other"):
        order(rows=16, together=4)


@pytest.mark.parametrize(("ranks", "micro", "parts"), [(1, 0, 1), (1, 4, 4), (2, 4, 2), (2, 0, 1)])
def test_micro_batches_of_a_batch(monkeypatch: pytest.MonkeyPatch, ranks: int, micro: int, parts: int) -> None:
    monkeypatch.setattr(collectives, "ranks", lambda: ranks)
    assert micro_batches(replace(RECIPE, micro=micro)) == parts
    with pytest.raises(ValueError, match=f"micro 3 does not divide a rank's share of {16 // ranks} "):
        micro_batches(replace(RECIPE, micro=3))
    monkeypatch.setattr(collectives, "ranks", lambda: 3)
    with pytest.raises(ValueError, match="batch 16 does not divide over 3 ranks"):
        micro_batches(RECIPE)


def test_what_features_a_method_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Table:
        def __init__(self, path: str) -> None:
            self.name, self.file = Path(path).name, SimpleNamespace(augmented=False)

    monkeypatch.setattr("kiloword.training.resolve.FeatureStore", Table)
    method = replace(preset("siglip"), needs=("teacher", "other", "truth", "questions"))

    def stores(*paths: str) -> list[str]:
        return [store.name for store in _stores(replace(RECIPE, data=replace(RECIPE.data, features=paths)), method)]

    assert stores("a/teacher", "b/other") == ["teacher", "other"]
    with pytest.raises(ValueError, match="siglip needs precomputed features named 'teacher'"):
        stores("b/other")
    with pytest.raises(ValueError, match="two feature stores are named 'teacher'"):
        stores("a/teacher", "b/other", "c/teacher")


def test_precisions() -> None:
    with precision_of("bf16", "cpu")():
        assert torch.is_autocast_enabled("cpu")
        assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype == torch.bfloat16
    with precision_of("fp32", "cpu")():
        assert not torch.is_autocast_enabled("cpu")
