"""The command line hands each word on: every flag of a verb arrives where it is used, under its own name."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kiloword.apps.mine.options import MineOptions
from kiloword.cli.main import main
from kiloword.config.recipes import DataConfig
from kiloword.evaluation import TASKS
from kiloword.evaluation.caption import CaptionOptions, CaptionTaskOptions
from kiloword.evaluation.command import Execution
from kiloword.evaluation.hierarchy import HierarchyTaskOptions
from kiloword.evaluation.probe import ProbeOptions, ProbeTaskOptions
from kiloword.evaluation.retrieval import RetrievalTaskOptions
from kiloword.evaluation.spectrum import SpectrumTaskOptions
from kiloword.evaluation.vqa import VqaOptions, VqaTaskOptions
from kiloword.evaluation.zeroshot import PromptOptions, ZeroshotTaskOptions
from kiloword.generation.options import GenerationOptions
from kiloword.methods import clip, siglip
from kiloword.models.trust import NONE, Trust
from kiloword.stores.embed import EmbedOptions
from kiloword.verify.batch import MethodChoice

OUT = Path("o")
Words = tuple[str, str, dict[str, Any]]
"""A command line, what it calls, and arguments that must arrive there."""

TRUST = Trust(method="clip", trust_code=True)


def evaluated(task: str, flags: str, options: object) -> Words:
    """A task with its own flags, and what they become."""
    arguments = {"task": TASKS[task], "models": ("m",), "options": options, "execution": Execution()}
    return f"eval {task} m --data d {flags}", "kiloword.evaluation.command:main", arguments


SHORTEST: list[Words] = [
    ("quickstart", "kiloword.apps.quickstart.run:run", {"out": Path("quickstart"), "steps": None, "seed": 0}),
    (
        "eval zeroshot m --data d",
        "kiloword.evaluation.command:main",
        {"task": TASKS["zeroshot"], "models": ("m",), "data": "d", "json": None, "html": None}
        | {"options": ZeroshotTaskOptions()}
        | {"execution": Execution(batch=256, workers="auto", device="auto", precision="auto", trust=NONE)},
    ),
    (
        "embed m --data d --out o",
        "kiloword.stores.embed:main",
        {"data": DataConfig(sources=("d",)), "out": OUT, "options": EmbedOptions(model="m")}
        | {"workers": "auto", "device": "auto", "trust": NONE},
    ),
    (
        "caption m --data d --out o",
        "kiloword.generation.command:main",
        {"model": "m", "data": ("d",), "out": OUT, "options": GenerationOptions(), "batch": 16, "workers": "auto"}
        | {"device": "auto", "precision": "auto", "trust": Trust()},
    ),
    ("mine d --features s --out o", "kiloword.apps.mine:main", {"sources": ("d",), "options": MineOptions()}),
    ("data stats d", "kiloword.data.inspect:main", {"what": "stats", "src": "d", "png": None}),
    (
        "verify clip",
        "kiloword.verify.suite:main",
        {"method": MethodChoice("clip", asdict(clip.Settings())), "ranks": (1, 2, 4), "trunks": "none"},
    ),
    (
        "watch r",
        "kiloword.runs.command:main",
        {"paths": (Path("r"),), "once": False, "every": 2.0, "smooth": 0.0, "curves": (), "tensorboard": None},
    ),
    ("methods", "kiloword.cli.describe:methods_table", {}),
    ("sizes", "kiloword.cli.describe:sizes_table", {}),
    ("doctor", "kiloword.cli.describe:doctor_table", {}),
]
EVERY_FLAG: list[Words] = [
    (
        "quickstart --out o --steps 7 --seed 3",
        "kiloword.apps.quickstart.run:run",
        {"out": OUT, "steps": 7, "seed": 3},
    ),
    (
        "eval retrieval m a b --data d --shortlist 5 --json j --batch 3 --workers 2 --device cuda:1 --precision bf16 "
        "--method clip --trust-code",
        "kiloword.evaluation.command:main",
        {"task": TASKS["retrieval"], "models": ("m", "a", "b"), "data": "d", "json": Path("j"), "html": None}
        | {"options": RetrievalTaskOptions(shortlist=5)}
        | {"execution": Execution(batch=3, workers=2, device="cuda:1", precision="bf16", trust=TRUST)},
    ),
    evaluated("spectrum", "--of vec --samples 9", SpectrumTaskOptions(of="vec", samples=9)),
    evaluated("hierarchy", "--includes h --eps 2", HierarchyTaskOptions(includes="h", eps=2)),
    evaluated(
        "zeroshot",
        "--prompts filter --prompts.coeff 2",
        ZeroshotTaskOptions(prompts="filter", prompt_options=PromptOptions(coeff=2)),
    ),
    evaluated(
        "probe",
        "--train t --val v --cache c --probe.shots 4",
        ProbeTaskOptions(train="t", val="v", cache=Path("c"), probe=ProbeOptions(shots=4)),
    ),
    evaluated(
        "caption",
        "--generate.beams 7 --judge.limit 8",
        CaptionTaskOptions(generate=GenerationOptions(beams=7), judge=CaptionOptions(limit=8)),
    ),
    evaluated("vqa", "--train t --vqa.beams 2", VqaTaskOptions(train="t", vqa=VqaOptions(beams=2))),
    (
        "embed m --data d e --out o --name n --extra-captions x --batch 3 --workers 2 --device cpu --precision bf16 "
        "--dtype fp32 --method clip --trust-code",
        "kiloword.stores.embed:main",
        {"data": DataConfig(sources=("d", "e"), extra_captions=("x",)), "workers": 2, "device": "cpu"}
        | {"options": EmbedOptions(model="m", name="n", batch=3, precision="bf16", dtype="fp32")}
        | {"trust": Trust(method="clip", trust_code=True)},
    ),
    (
        "caption m --data d e --out o --num 2 --beams 4 --batch 3 --workers 2 --device cpu --precision bf16 "
        "--model-method coca --trust-code",
        "kiloword.generation.command:main",
        {"data": ("d", "e"), "options": GenerationOptions(num=2, beams=4), "batch": 3, "workers": 2, "device": "cpu"}
        | {"precision": "bf16", "trust": Trust(method="coca", trust_code=True)},
    ),
    (
        "mine d e --features s --out o --p1 0.5 --gallery 2",
        "kiloword.apps.mine:main",
        {"sources": ("d", "e"), "features": Path("s"), "out": OUT, "options": MineOptions(p1=0.5, gallery=2)},
    ),
    ("data stats d --png p", "kiloword.data.inspect:main", {"png": Path("p")}),
    (
        "verify siglip --ranks 1 3 --settings.bias -9",
        "kiloword.verify.suite:main",
        {"method": MethodChoice("siglip", asdict(siglip.Settings(bias=-9.0))), "ranks": (1, 3), "trunks": "none"},
    ),
    (
        "watch r s --once --every 5 --smooth 0.5 --curves loss val/ --tensorboard t",
        "kiloword.runs.command:main",
        {"paths": (Path("r"), Path("s")), "once": True, "every": 5.0, "smooth": 0.5, "curves": ("loss", "val/")}
        | {"tensorboard": Path("t")},
    ),
    (
        "import open_clip ViT w.pt --out o",
        "kiloword.interop.open_clip:main",
        {"name": "ViT", "path": Path("w.pt"), "out": OUT},
    ),
    ("import prolip w --out o", "kiloword.interop.prolip:main", {"path": Path("w"), "out": OUT}),
    ("train clip --data d", "kiloword.cli.train:main", {"argv": ["clip", "--data", "d"]}),
    ("plan clip --gpus 8", "kiloword.cli.plan:main", {"argv": ["clip", "--gpus", "8"]}),
]


@pytest.mark.parametrize(("words", "called", "arguments"), SHORTEST + EVERY_FLAG)
def test_words_arrive(words: str, called: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = called.partition(":")
    calls: list[dict[str, Any]] = []
    place = import_module(module)
    parameters = inspect.signature(getattr(place, name))

    def note(*args: Any, **named: Any) -> None:
        calls.append(dict(parameters.bind(*args, **named).arguments))

    monkeypatch.setattr(place, name, note)
    main(words.split())
    (found,) = calls
    assert {key: found.get(key) for key in arguments} == arguments


@pytest.mark.parametrize("words", ["import open_clip w.pt", "import prolip ViT w.pt", "import prolip"])
def test_import_wants_what_the_format_needs(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--out", "o"])
    assert end.value.code == 2
    expected = "NAME PATH" if "open_clip" in words else "PATH"
    if words != "import prolip":  # what the parser refuses itself
        assert f"expected import {words.split()[1]} {expected}." in capsys.readouterr().err


@pytest.mark.parametrize(("bad", "code"), [(0, None), (3, 1)])
def test_data_that_is_damaged_fails(bad: int, code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiloword.data.inspect.main", lambda *args: bad)
    if code is None:
        main(["data", "check", "d"])
        return
    with pytest.raises(SystemExit) as end:
        main(["data", "check", "d"])
    assert end.value.code == code


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (KeyboardInterrupt(), 130, "kiloword: interrupted.\n"),
        (ValueError("No such thing."), 2, "kiloword: No such thing.\n"),
    ],
)
def test_how_a_command_ends(
    error: BaseException, code: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr("kiloword.cli.describe.sizes_table", fail)
    with pytest.raises(SystemExit) as end:
        main(["sizes"])
    assert end.value.code == code
    assert capsys.readouterr().err == shown


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What no user can mend is no message with exit code 2: it goes through `main`, and Python prints it whole."""

    def buggy() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("kiloword.cli.describe.sizes_table", buggy)
    with pytest.raises(KeyError, match="a bug") as error:
        main(["sizes"])
    assert any(place.name == "buggy" for place in error.traceback)
    assert capsys.readouterr().err == ""


def test_an_argument_of_several_words_is_checked_for_empty_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the flag that got nothing; a text alone may be empty."""
    for words, flag in (
        (["embed", "m", "--data", ""], "--data"),
        (["embed", "m", "--out="], "--out"),
        ([""], "kiloword"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        assert f"kiloword: {flag} got an empty value" in capsys.readouterr().err
