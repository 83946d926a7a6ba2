"""`plan --recipe`: the paper's run on the paper's cards, and flags that override it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiloword.cli.main import main
from kiloword.cli.plan import planner_of
from kiloword.config import papers


def test_plan_of_a_recipe() -> None:
    planner = planner_of(["--recipe", "fff-cc3m-b16", "--gpus", "2"])
    plan = planner.plan
    assert (plan.gpus, plan.gpu, plan.captions, plan.batch, plan.precision) == (2, "a100-40", 6, 8096, "bf16")
    assert plan.samples == 32 * 2_876_999
    assert (plan.model.image.patch, plan.model.text.context, plan.optim.weight_decay) == (16, 77, 0.5)


def test_settings_and_size_of_a_recipe() -> None:
    planner = planner_of(["--recipe", "llip-b16", "--size", "debug", "--batch", "64", "--gpus", "1"])
    assert planner.plan.model.image.size == 32
    assert planner.plan.samples == 12_800_000_000
    assert planner.method.shape(planner.plan.model).image.extra_tokens == 64


def test_own_file_without_a_length_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('method = "clip"\nepochs = 3\nbatch = 64\n')
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(path)])
    assert "plan needs the length of the run" in capsys.readouterr().err
    path.write_text('method = "clip"\nsize = "debug"\nsteps = 3\nbatch = 64\n')
    assert planner_of(["--config", str(path)]).plan.samples == 192
    path.write_text('method = "clip"\nsteps = 3\nmodel.text.special.end = 1\n')
    with pytest.raises(ValueError, match="special has no 'cls'"):
        planner_of(["--config", str(path)])


@pytest.mark.parametrize("name", [name for name in papers.names() if papers.load(name).paper != "this project"])
def test_facts_of_each_paper(name: str) -> None:
    facts = papers.load(name).facts
    assert facts["images"].value > 1e6
    assert facts["gpus"].value >= 1
