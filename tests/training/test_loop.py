"""The loop alone: what is called after which step, by stand-ins for all that it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kiloword.training.loop as loop
from kiloword.config.options import RunOptions
from kiloword.errors import LeftOut
from kiloword.training.signals import Stop, Stopped

GOES_ON = "The same command goes on from there."


class Some:
    """A batch of three."""

    skipped: tuple[str, ...] = ()
    texts = SimpleNamespace(truncated=2)

    def __init__(self, step: int) -> None:
        self.step = step

    def __len__(self) -> int:
        return 3

    def split(self, parts: int) -> list[str]:
        return [f"{self.step}.{n}" for n in range(parts)]


class World:
    """A run of 6 steps and all that the loop calls: `calls` by name, each with the number of steps done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, options: RunOptions, step: int = 0, val: bool = False) -> None:
        self.calls: list[tuple[str, int]] = []
        self.output: list[str] = []
        self.inside: list[str] = []
        self.given: list[Any] = []
        self.paused: list[int] = []
        self.now, self.busy = 0.0, False
        self.batch: Callable[[int], None] = lambda step: None
        self.stop, self.options, self.is_validated = Stop(), options, False
        note, world = self.note, self
        self.run: Any = SimpleNamespace(
            recipe=SimpleNamespace(
                steps=6,
                batch=2,
                micro=1,
                precision="fp32",
                model=SimpleNamespace(image=SimpleNamespace(tower="vit")),
                data=SimpleNamespace(val=("x",) if val else ()),
            ),
            learner=SimpleNamespace(
                method=SimpleNamespace(after_step=()),
                model=SimpleNamespace(text_tower=SimpleNamespace(trunk=None)),
                clamp_=lambda: note("clamp"),
                modules=lambda: (),
            ),
            unfreezing=SimpleNamespace(before=lambda step, optimizer: None),
            optimizer=SimpleNamespace(step=self.moved),
            average=SimpleNamespace(update=lambda *given: self.given.append(given[1:]) or note("average")),
            loader=SimpleNamespace(batches=self.batches, workers=3),
            log=SimpleNamespace(
                say=self.output.append, row=lambda row: note("row"), progress=lambda row: note("progress")
            ),
            bad=SimpleNamespace(count=lambda new: [], left_out=LeftOut("sample")),
            reducer="reducer",
            finished=False,
            best=SimpleNamespace(resume=lambda step: False, take=lambda metrics, step: False, stalled=False),
            step=step,
            truncated=0,
            device=torch.device("cpu"),
            out=Path("run"),
        )

        class Saver:
            writing = property(lambda self: world.busy)
            advance, save, finish = (lambda self, name=name: note(name) for name in ("advance", "save", "finish"))

        class Meter:
            def __init__(self, run: Any, most: int) -> None:
                assert most == options.max_skipped_steps

            def look(self) -> None:
                note("look")

            def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
                return batches

            def add(self, report: dict[str, Any], pairs: int) -> None:
                assert (report["loss"], report["skipped_step"], pairs) == ("loss", "skipped", 3)
                note("add")

            def row(self) -> dict[str, Any]:
                return {}

            saving, paused = (lambda self, name=name: world.within(name) for name in ("saving", "paused"))

        self.saver: Any = Saver()
        for name, value in {
            "Meter": Meter,
            "backward": self.backward,
            "on_device": lambda batches, device, parts: ((some, some.split(parts)) for some in batches),
            "validate": lambda run: note("validate") or {"val/a": 1.0},
            "validated": lambda run: self.is_validated,
            "time": SimpleNamespace(perf_counter=lambda: self.now),
        }.items():
            monkeypatch.setattr(loop, name, value)

    def note(self, name: str) -> None:
        if name in ("save", "finish"):
            assert self.inside == ["saving"]  # so that rates know it
        self.calls.append((name, self.run.step))

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        self.inside.append(name)
        if name == "paused":
            self.paused.append(self.run.step)
        yield
        self.inside.remove(name)

    def batches(self, first: int, end: int, pin: bool) -> Iterator[Some]:
        assert not pin  # on a CPU
        for step in range(first, end):
            self.batch(step)
            yield Some(step)

    def backward(self, learner: Any, micro: list[str], precision: Any, reducer: str) -> dict[str, Any]:
        assert (learner, reducer) == (self.run.learner, "reducer")
        self.given.append(micro)
        return {"loss": "loss"}

    def moved(self, step: int, loss: str) -> dict[str, Any]:
        self.given.append((step, loss))
        return {"skipped_step": "skipped"}

    def go(self) -> dict[str, list[int]]:
        """After which steps each thing was done."""
        loop._loop(self.run, loop.Cadence(self.run, self.saver, self.options, self.stop))
        return self.done()

    def done(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, step in self.calls:
            found.setdefault(name, []).append(step)
        return found


def options(**changes: Any) -> RunOptions:
    return RunOptions(**{"log_every": 4, "save_every": 4, "workers": 3, **changes})


def test_what_a_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer and the average get the number of the step from 0; the rest counts steps done."""
    world = World(monkeypatch, options(), step=4)
    done = world.go()
    for step, at in ((4, 0), (5, 3)):
        assert world.given[at : at + 3] == [[f"{step}.0", f"{step}.1"], (step, "loss"), (step,)]
    assert [name for name, _ in world.calls[:3]] == ["clamp", "average", "add"]
    assert (done["clamp"], done["average"], done["add"]) == ([4, 5], [4, 5], [5, 6])
    assert world.run.truncated == 4
    assert world.output == ["run goes on from step 4 of 6."]


def test_rows_and_states_come_every_so_many_steps_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    done = World(monkeypatch, options(log_every=4, save_every=5)).go()
    assert done["row"] == done["progress"] == [4, 6]
    assert done["save"] == done["look"] == [5, 6]
    assert done["finish"] == [6]
    assert done["advance"] == [1, 2, 3, 4, 5, 6]
    assert "validate" not in done


def test_without_a_number_of_steps_states_come_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, options(save_every=0))

    def pass_time(step: int) -> None:
        world.now += {1: 120.0, 2: 1.0, 3: 119.0, 4: 1.5}.get(step, 0.0)

    world.batch = pass_time
    assert world.go()["save"] == [3, 5, 6]  # more than two minutes after the last


def test_a_save_in_flight_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, options(save_every=3))
    world.batch = lambda step: setattr(world, "busy", 1 <= step <= 3)
    assert world.go()["advance"] == [1, 5, 6]


def test_validation_comes_behind_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, options(eval_every=4, save_every=5), val=True)
    done = world.go()
    assert done["validate"] == done["finish"] == [4, 6]
    assert done["save"] == [4, 5, 6]
    names = [name for name, step in world.calls if step == 4 and name not in ("clamp", "average")]
    assert world.paused == [0, 4, 6]  # also where a resumed run begins with a validation
    assert names == ["add", "row", "progress", "advance", "look", "save", "finish", "validate", "row"]
    assert World(monkeypatch, options(eval_every=0), val=True).go()["validate"] == [6]
    assert "validate" not in World(monkeypatch, options(eval_every=4)).go()


@pytest.mark.parametrize(
    ("epochs", "at"), [(0.2, [1, 2, 3, 4, 5, 6]), (0.5, [2, 3, 5, 6]), (1.0, [3, 6]), (1.5, [5, 6]), (9.0, [6])]
)
def test_validation_by_epochs(epochs: float, at: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three steps each; and at the end."""
    world = World(monkeypatch, options(eval_epochs=epochs), val=True)
    world.run.loader.order = SimpleNamespace(steps_per_epoch=3)
    assert world.go()["validate"] == at


@pytest.mark.parametrize(("step", "validates"), [(0, False), (3, False), (4, True), (6, True)])
@pytest.mark.parametrize("known", [False, True])
def test_a_validation_that_was_cut_is_made_again(
    monkeypatch: pytest.MonkeyPatch, step: int, validates: bool, known: bool
) -> None:
    world = World(monkeypatch, options(eval_every=4), step=step, val=True)
    world.is_validated = known
    done = world.go().get("validate", [])
    again = [step] if validates and not known else []
    assert done == again + [n for n in (4, 6) if n > step]
    known_words = {0: [], 6: ["run was finished at step 6: nothing to do."]}
    assert world.output == ([] if again else known_words.get(step, [f"run goes on from step {step} of 6."]))


def test_a_state_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, options(save_every=50))
    world.batch = lambda step: world.stop.handle(10, None) if step == 2 else None
    assert world.go()["save"] == [3, 6]


@pytest.mark.parametrize("at", [2, 5])
def test_a_signal_ends_the_run_after_its_step(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """With its state saved; after the last step the run has ended well."""
    world = World(monkeypatch, options(save_every=50))
    clamp = world.run.learner.clamp_
    world.run.learner.clamp_ = lambda: (clamp(), world.stop.handle(15, None) if world.run.step == at else 0)
    if at == 5:
        world.go()
    else:
        with pytest.raises(Stopped, match=rf"^stopped after step 3; the state is saved\. {GOES_ON}$") as end:
            world.go()
        assert end.value.code == 143
    assert world.done()["save"] == world.done()["finish"] == [at + 1]


def test_a_signal_ends_a_validation_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, options(save_every=50), val=True)
    monkeypatch.setattr(loop, "validate", lambda run: world.stop.handle(15, None))
    with pytest.raises(Stopped, match=r"stopped in the validation after step 6; the state is saved\. The same"):
        world.go()


def test_a_stop_ends_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the exception is still known: its workers ignore signals, and Python waits for them when it exits."""
    world, closed = World(monkeypatch, options()), list[bool]()

    def batches(*given: Any, **named: Any) -> Iterator[Some]:
        try:
            yield from world.batches(*given, **named)
        finally:
            closed.append(True)

    world.run.loader.batches = batches
    world.run.learner.clamp_ = lambda: world.stop.handle(15, None) if world.run.step == 2 else None
    with pytest.raises(Stopped, match="stopped after step 3") as end:
        world.go()
    assert end.tb is not None  # and with it all names of the loop
    assert closed == [True]
