"""research/papers.md: all tables and figures of the papers have a row, and all its commands run at debug size."""

from __future__ import annotations

import math
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kiloword.cli.main import main
from tars import pairs, photo, write_tar

PAGE = (Path(__file__).parents[1] / "research" / "papers.md").read_text()
ITEMS = {  # of the papers' texts
    "Llip": "Fig. 1a, Fig. 1b, Fig. 2, Fig. 3, Fig. 4, Fig. 5, Fig. 6a, Fig. 6b, Fig. 7, Fig. 8a, Fig. 8b, Tab. 1, "
    "Tab. 2, Tab. 3, Tab. 4, Tab. 5, Tab. 6, Tab. 7",
    "CLIP-C": "fig:main-method, fig:per-epoch-losses, fig:per-epoch-cs, tab:zero-shot-results-main, "
    "tab:retrieval-results-main, tab:linear-probe-results-main, tab:means-standard-deviation, "
    "tab:zero-shot-batch-size-ablation, fig:per-epoch-zero-shot-acc, fig:sampling-probability, "
    "tab:zero-shot-stylistic, tab:zero-shot-stochasticity, tab:zero-shot-image-mixup, "
    "tab:linear-probe-hyper-parameters-sup, tab:pre-training, tab:downstream-datasets-sup, "
    "tab:zero-shot-modality-ablation, tab:zero-shot-other-pairings-sup, tab:text-composition-method, "
    "fig:example-captions",
    "SyCoCa": "Fig. 1, Fig. 2, Fig. 3, Tab. 1, Tab. 2, Tab. 2, VQA, Tab. 3, Tab. 4, Tab. 5, Tab. 6, Tab. 7, Tab. 8, "
    "Tab. 9, Tab. 10",
    "ProLIP": "Fig. 1, Fig. 2, Fig. 3, Fig. 4, Fig. 5, Fig. 6, Fig. 7, Fig. 8, Fig. 9, Tab. 1, Tab. 2, Tab. 3, "
    "Fig. B.1, Fig. C.1, Fig. C.2, Fig. C.3, Fig. C.4, Fig. C.5, Tab. C.1, Tab. C.2, Tab. C.3, Tab. C.4, Tab. C.5, "
    "Alg. 1",
    "FFF": "Fig. 1, Fig. 2, Fig. 3, Fig. 4, Fig. 5, Fig. 6, Tab. 1, Tab. 2, Tab. 3, Tab. 4, Tab. 5, Tab. 6, Tab. 7, "
    "Tab. 8, Tab. 9, Tab. 10, Tab. 11, Tab. 12, Tab. 13, Tab. 14",
}
COMMAND = r"`((?:kiloword|python -m research\.|python tools/).*)`"
NOTHING = re.compile(r"none|not available: .{10,}")


def rows(columns: int) -> Iterator[tuple[str, list[str]]]:
    """The rows of the page's tables with this number of columns, and the paper of each."""
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if line.startswith("| ") and len(cells) == columns and cells[0] not in ("item", "run"):
                yield section.split(" (")[0], cells


TABLES = list(rows(5))
RUNS = {cells[0].strip("`"): cells[1].strip("`") for _, cells in rows(2)}


def commands(column: int) -> list[str]:
    """The distinct commands of a column."""
    found = (re.fullmatch(COMMAND, cells[column]) for _, cells in TABLES)
    return list(dict.fromkeys(match[1] for match in found if match))


@pytest.mark.parametrize("paper", ITEMS)
def test_every_table_and_figure_has_a_row(paper: str) -> None:
    assert ", ".join(cells[0] for section, cells in TABLES if section == paper) == ITEMS[paper]


def test_every_row_has_commands_or_says_why_not() -> None:
    for paper, (item, shows, command, small, here) in TABLES:
        for cell in (command, small):
            assert re.fullmatch(COMMAND, cell) or NOTHING.fullmatch(cell), (paper, item, cell)
        assert shows
        assert here
        assert (command == "none") <= (small == "none"), (paper, item)


def test_every_model_is_trained_on_the_page() -> None:
    used = {name for _, cells in TABLES for name in re.findall(r"(runs/[\w.-]+)", cells[2])}
    assert used <= RUNS.keys()
    made = set(re.findall(r"--out (debug/[\w-]+)", PAGE))
    assert {name for _, cells in TABLES for name in re.findall(r"(debug/[\w-]+)", cells[3])} <= made
    assert all(command.endswith(f" --out {name}") for name, command in RUNS.items())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of the page, trained as it says, and what its commands read."""
    folder = tmp_path_factory.mktemp("papers")
    (folder / "dog.jpg").write_bytes(photo())
    write_tar(folder / "photos" / "0.tar", pairs(12))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("KILOWORD_CACHE", str(folder / "cache"))
        for line in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)[0].splitlines():
            main(shlex.split(line)[1:])
        main(shlex.split("embed debug/clip/model --data photos --out features"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(3))
def test_debug_command(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    if command.startswith("python -m research."):
        module = shlex.split(command)[2]
        monkeypatch.setattr("sys.argv", shlex.split(command)[2:])
        monkeypatch.delitem(sys.modules, module, raising=False)  # another test may have imported it
        runpy.run_module(module, run_name="__main__")
    else:
        main(shlex.split(command)[1:])
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in commands(2) if c.startswith("kiloword eval ")])
def test_command_at_paper_scale(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its flags, task, suite and data sets of the suite exist; refused is a model or a set that is not there."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    with pytest.raises(SystemExit):
        main(words)
    said = "".join(capsys.readouterr().err.split())
    assert any(word.replace(" ", "") in said for word in words[2:] if re.match("runs/|sets|data/", word)), said


@pytest.mark.parametrize("command", [c for c in commands(2) if c.startswith("kiloword sweep ")])
def test_sweep_at_paper_scale(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its recipe and settings exist and take the values."""
    main([*shlex.split(command)[1:], "--dry-run"])
    values = [len(varied.split(",")) for varied in re.findall(r"settings\.\w+=(\S+)", command)]
    assert capsys.readouterr().out.startswith(f"{math.prod(values)} arms:")
