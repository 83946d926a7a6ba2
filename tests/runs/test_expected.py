"""Expected curves: bands over seeds, runs on and off track, and the curves of recipes by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kiloword.cli.main import main
from kiloword.config import papers
from kiloword.runs import expected
from modules import module_at
from runs import row, write

SEEDS = {0: -0.02, 1: 0.0, 2: 0.02}  # seed -> what its losses add


def run(out: Path, seed: int = 0, off: float = 0.0, until: int = 80, lr: float = 0.1) -> Path:
    """A run of 80 steps whose loss falls exponentially. Args: off: added to its loss."""
    losses = [math.exp(-n / 30) + off + SEEDS.get(seed, 0.0) for n in range(1, until + 1)]
    rows = [row(n, loss=loss) for n, loss in enumerate(losses, 1)]
    if until == 80:
        rows.append({"step": 80, "val/text_retrieval_recall@1": 0.5 - off + SEEDS.get(seed, 0.0)})
    folder: Path = write(out, rows, steps=80, optim={"lr": lr}, seed=seed, data={"sources": [str(out.parent)]})
    return folder


@pytest.fixture
def seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three finished runs in the working folder: its short name is not wrapped."""
    monkeypatch.chdir(tmp_path)
    for seed in SEEDS:
        run(Path("seeds") / str(seed), seed)
    return Path("seeds")


def watched(capsys: pytest.CaptureFixture[str], out: Path, known: str | Path) -> str:
    main(["watch", str(out), "--once", "--expected", str(known)])
    return capsys.readouterr().out


def test_the_band_holds_a_further_seed(seeds: Path) -> None:
    """Its half-width is 3 sqrt(1 + 1/3) standard deviations, of the sample, at every step."""
    band = expected.read(str(seeds)).bands["loss"]
    assert band.ends == tuple(float(n) for n in range(2, 81, 2))  # 40 bins of two steps
    for end, low, high in zip(band.ends, band.low, band.high, strict=True):
        mean = (math.exp(-end / 30) + math.exp(-(end - 1) / 30)) / 2
        assert low == pytest.approx(mean - 3 * math.sqrt(4 / 3) * 0.02, rel=1e-3)
        assert high == pytest.approx(mean + 3 * math.sqrt(4 / 3) * 0.02, rel=1e-3)


@pytest.mark.parametrize("until", [3, 40, 80])
def test_a_further_seed_is_on_track(
    seeds: Path, tmp_path: Path, until: int, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = watched(capsys, run(Path("new"), 7, until=until), seeds)
    count = "2 metrics" if until == 80 else "1 metric"
    assert f"on track of {seeds}: {count} within the band of 3 runs" in " ".join(printed.split())
    assert "not the recipe" not in printed


def test_a_run_above_the_band_is_off_track(seeds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = " ".join(watched(capsys, run(Path("new"), off=0.2, lr=0.3), seeds).split())
    assert "! off track of" in printed
    assert "loss is 0.25 at step 80, above the expected 1.4e-3 to 0.14" in printed
    assert "text_retrieval_recall@1 is 0.28 at step 80, below the expected 0.43 to 0.57" in printed
    assert "optim.lr 0.3 (expected 0.1)" in printed


def test_one_bin_outside_is_noise(seeds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(Path("new"), 1, until=40)
    lines = folder.joinpath("metrics.jsonl").read_text().splitlines()
    lines[-1] = json.dumps(row(40, loss=9.0))
    folder.joinpath("metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert f"on track of {seeds}" in watched(capsys, folder, seeds)
    assert f"on track of {seeds}" in watched(capsys, run(Path("first"), off=9.0, until=2), seeds)  # and the only one


def test_before_the_first_bin_nothing_is_compared(
    seeds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{seeds}: nothing to compare yet" in watched(capsys, run(Path("new"), until=1), seeds)


def test_a_file_says_what_its_runs_say(seeds: Path, tmp_path: Path) -> None:
    measured = expected.read(str(seeds))
    path = tmp_path / "curves.json"
    path.write_text(expected.as_json(measured))
    assert expected.read(str(path)) == measured


def test_what_cannot_be_compared_is_refused(seeds: Path, tmp_path: Path) -> None:
    alone = run(tmp_path / "alone" / "0").parent
    with pytest.raises(ValueError, match="holds 1 run: expected two or more"):
        expected.read(str(alone))
    run(seeds / "other", 3, lr=0.5)
    with pytest.raises(ValueError, match=r"differ in more than their seed \(optim\.lr\)"):
        expected.read(str(seeds))
    run(alone / "1", 1, until=50)
    with pytest.raises(ValueError, match=r"1 of .*alone are not finished"):
        expected.read(str(alone))
    with pytest.raises(ValueError, match="--expected nowhere is no file, folder or recipe with expected curves"):
        expected.read("nowhere")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "kiloword-expected-1"}', "damaged band", "long band", "endless"]
)
def test_a_strangers_file_is_one_message(seeds: Path, tmp_path: Path, text: str) -> None:
    whole = json.loads(expected.as_json(expected.read(str(seeds))))
    if text == "damaged band":
        whole["bands"]["loss"]["low"][3] = float("nan")
    elif text == "long band":
        whole["bands"]["loss"]["ends"].append(81.0)
    elif text == "endless":
        whole["seconds"] = "1e400"
    path = tmp_path / "curves.json"
    path.write_text(text if text[:1] in ("", "[", "{") else json.dumps(whole))
    with pytest.raises(ValueError, match="holds no expected curves"):
        expected.read(str(path))


@pytest.mark.parametrize("name", expected.names())
def test_curves_of_a_name_are_of_that_recipe(name: str) -> None:
    known, recipe = expected.read(name), papers.load(name)
    assert known.name == name
    assert known.runs >= 3
    assert "loss" in known.bands
    assert {path: known.settings[path] for path in recipe.entries} == {
        path: entry.value for path, entry in recipe.entries.items()
    }


@pytest.mark.parametrize("name", expected.names())
def test_the_plot_of_a_name_shows_its_curves(name: str) -> None:
    curves = module_at(Path(__file__).parents[2] / "tools" / "curves.py", "curves")
    assert (curves.PLOTS / f"expected-{name}.svg").read_text() == curves.svg(expected.read(name))
