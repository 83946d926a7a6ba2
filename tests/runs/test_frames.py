"""Frames of `watch`, character by character: which curves, in which order and place, and what is said above them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiloword.runs.page import View, page
from kiloword.runs.plot import MARKS, STYLES, Series, plot, short
from kiloword.runs.runs import Watched
from runs import row, write


def rows(count: int, **more: Any) -> list[dict[str, Any]]:
    """Rows whose metrics are flat but for the losses, which fall."""
    flat = {"val/image_retrieval_recall@1": 0.5, "val/other": 0.1, "lr": 1e-4, "skipped_steps": 0, "memory": 1500.0}
    return [row(n, **flat, mim=1.0 / n, save_s=0.0, **more) for n in range(1, count + 1)]


def frame(*folders: Path, width: int = 100, **view: Any) -> list[str]:
    runs = [Watched(folder, folder.name) for folder in folders]
    for run in runs:
        run.update()
    return page(runs, View(width=width, **view)).plain.split("\n")


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return write(tmp_path / "a", rows(8))


def test_curves_side_by_side(one: Path) -> None:
    """Loss, its other terms, accuracy of validation, then gradient, speed and the rest; no count, no flat zero."""
    titles = [line for line in frame(one)[3:] if line and not line.startswith(" ") and "|" not in line]
    assert [title.split() for title in titles] == [
        ["loss", "1.25", "mim", "0.12"],
        ["val/image_retrieval_recall@1", "0.50", "gradient_norm", "1.00"],
        ["pairs_per_s", "100", "data_wait", "0.01"],
        ["lr", "1.0e-4", "memory", "1500"],
    ]
    lines = frame(one)
    place = lines.index(next(line for line in lines if line.startswith("loss ")))
    assert lines[place - 1] == ""
    assert [line.rstrip() for line in lines[place : place + 9]] == [
        "loss  1.25                                         mim  0.12",
        "   10.0|*                                             1.00|*",
        "       | **                                               | **",
        "       |   **                                             |   **",
        "       |     **                                           |     **",
        "       |       ****                                       |       ****",
        "       |           *************                          |           *************",
        "   1.25|                        *****************     0.12|                        *****************",
        "        1                                       8          1                                       8",
    ]


@pytest.mark.parametrize(("width", "across"), [(49, 1), (99, 1), (100, 2), (149, 2), (150, 3), (200, 4), (400, 4)])
def test_as_many_plots_side_by_side_as_there_is_width_for(one: Path, width: int, across: int) -> None:
    tops = next(line for line in frame(one, width=width) if "10.0|" in line)
    assert tops.count("|") == across


def test_a_low_window_shows_fewer_and_lower_plots(one: Path) -> None:
    lines = frame(one, height=24)
    assert len(lines) == 22
    assert lines[-1] == "2 more curves: a larger window shows them, or choose by --curves"
    assert sum("|" in line for line in lines) == 3 * 4  # three of four rows of plots, four lines each
    high = frame(one, height=100)
    assert sum("|" in line for line in high) == 4 * 10  # at most ten lines
    assert not any("more curves" in line for line in high)
    lowest = frame(one, height=8)
    assert len(lowest) <= 8
    assert any(line.startswith("loss") for line in lowest)


def test_curves_that_are_asked_for(one: Path) -> None:
    lines = frame(one, width=60, curves=("val/", "step", "pair"))
    titles = [line.split()[0] for line in lines[lines.index("") + 1 :] if line[:1].isalpha()]
    assert titles == ["pair", "pairs_per_s", "val/image_retrieval_recall@1", "val/other"]


def test_several_runs_have_marks_and_one_plot_each_metric(one: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "b", rows(4), steps=8)
    lines = frame(one, other)
    assert lines[0].startswith("* a  siglip b32  running  step 8/100 (8%)")
    assert lines[2].startswith("+ b  siglip b32  running  step 4/8 (50%)")
    assert lines[1].startswith("  data wait 1%  memory 1.5 GB")
    loss = lines.index(next(line for line in lines if line.startswith("loss")))
    assert lines[loss].split() == ["loss", "mim"]  # whose newest value it would be is not said
    assert lines[loss + 1][8:].startswith("+")  # the later run is drawn over the first
    assert lines[loss + 7].split("|")[1].startswith(" " * 20)
    assert "*****" in lines[loss + 7]


def test_smoothing_is_of_training_alone(tmp_path: Path) -> None:
    jagged = [row(n, **{"val/accuracy": float(n % 2)}) | {"loss": float(n % 2)} for n in range(1, 41)]
    run = write(tmp_path / "a", jagged)

    def newest(**view: Any) -> dict[str, str]:
        lines = frame(run, width=49, **view)
        return {line.split()[0]: line.split()[1] for line in lines if line.startswith(("loss ", "val/"))}

    assert newest() == {"loss": "0", "val/accuracy": "0"}
    smooth = newest(smooth=0.9)
    assert smooth["val/accuracy"] == "0"
    assert 0.3 < float(smooth["loss"]) < 0.7


def test_counts_are_in_words(tmp_path: Path) -> None:
    run = write(tmp_path / "a", [*rows(5), row(6, skipped=1234, truncated=7, restarts=2)])
    said = " ".join(" ".join(frame(run)).split())
    for words in ("data wait 1%", "1,234 bad samples", "7 captions cut", "2 restarts", "step 6/100 (6%)", "epoch 0.06"):
        assert words in said
    slow = write(tmp_path / "b", [row(1, data_wait=0.1, slowest_data_wait=0.25)])
    assert "data wait 25%" in " ".join(frame(slow))


def test_a_plot_of_two_runs() -> None:
    at = np.arange(1.0, 9.0)
    lines = plot("t", [Series(at, 9 - at, 0), Series(at[[0, 7]], np.full(2, 8.0), 9)], (1.0, 8.0), 16, 4, "marks")
    mark = MARKS[9 % len(MARKS)]
    assert [line.rstrip() for line in lines.plain.split("\n")] == [
        "t",
        f"   8.00|{mark * 8}",
        "       |  **",
        "       |    **",
        "   1.00|      **",
        "        1      8",
    ]
    styles = {str(span.style) for span in lines.spans}
    assert {STYLES[0], STYLES[9 % len(STYLES)]} <= styles


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([5.0, 5.0], ("5.50", "4.50")),
        ([0.0, 0.0], ("1.00", "-1.00")),
        ([1000.0, 1000.5], ("1101", "900")),  # as good as constant
        ([1000.0, 1002.0], ("1002", "1000")),
        ([10001.0, 10021.0], ("10021", "10001")),  # which would look equal
    ],
)
def test_the_range_beside_a_plot(values: list[float], ends: tuple[str, str]) -> None:
    lines = plot("t", [Series(np.array([0.0, 1.0]), np.array(values), 0)], (0.0, 1.0), 20, 3, "marks").plain.split("\n")
    assert (lines[1].split("|")[0].strip(), lines[3].split("|")[0].strip()) == ends


def test_rare_spikes_are_cut_where_there_are_enough_values() -> None:
    """Twenty values at least, and the spike five times as far from the lowest as the usual ones."""
    for count, spike, cut in ((60, 1e6, True), (60, 4.0, False), (19, 1e6, False)):
        values = np.linspace(1, 2, count)
        values[count // 2] = spike
        series = Series(np.arange(float(count)), values, 0)
        top = plot("t", [series], (0.0, count - 1.0), count + 8, 8, "marks").plain.split("\n")[1]
        assert (">" in top) == cut
    assert short(999.4e3) == "999k"
    assert short(999.6e3) == "1000k"


@pytest.mark.parametrize("runs", [1, 2, 6])
def test_alerts_lose_no_word(runs: int, tmp_path: Path) -> None:
    """Of one run, of a few and of many, each of which has a line for its figures; what is cut is marked."""
    error = f"the data are gone: {'words about it ' * 20}and the last one"
    folders = [write(tmp_path / f"{'r' * 60}{n}", [*rows(2), {"step": 2, "error": error}]) for n in range(runs)]
    watched = [Watched(folder, folder.name) for folder in folders]
    for run in watched:
        run.update()
        run.error = error
    lines = page(watched, View(width=60)).plain.split("\n")
    assert " ".join(" ".join(lines).split()).count("and the last one") == runs
    assert max(map(len, lines)) <= 60
    assert all(line.endswith("...") for line in lines if len(line) == 60 and line.startswith("*"))
