"""What evaluation, scoring, mining and imports refuse, each with a message that names what came."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kiloword
from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.options import RunOptions
from kiloword.config.recipes import ModelConfig, OptimConfig, TextConfig, sizes
from kiloword.config.settings import check as check_ranges
from kiloword.data.reading import captions_at
from kiloword.data.sources.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.errors import sentence_of
from kiloword.evaluation import baseline, evaluate
from kiloword.evaluation.caption import CaptionTaskOptions
from kiloword.evaluation.caption.task import existing
from kiloword.evaluation.features import Seen, per_batch
from kiloword.evaluation.probe.data import encoded
from kiloword.evaluation.retrieval.relevance import check_pairs
from kiloword.evaluation.retrieval.shortlist import shortlisted
from kiloword.evaluation.task import Inputs
from kiloword.evaluation.vqa.task import _counted, _lines
from kiloword.evaluation.zeroshot import PromptOptions
from kiloword.features.teachers import _of_open_clip
from kiloword.generation.captioner import Captioner
from kiloword.generation.captioners import KilowordCaptioner, open_captioner
from kiloword.generation.command import write_captions
from kiloword.generation.options import GenerationOptions
from kiloword.generation.rules import Trie
from kiloword.interop.open_clip import check_translated
from kiloword.interop.open_clip_config import torchvision_ready
from kiloword.interop.prolip import _check_folded
from kiloword.methods.registry import preset
from kiloword.mining.calibrate import some
from kiloword.models.build import build
from kiloword.planning.request import card
from kiloword.report import bins
from kiloword.types import BadSample, Record, Skipped
from tars import noise


@cache
def matcher(method: str = "siglip") -> Matcher:
    return Matcher(
        build(sizes()["debug"], preset(method), seed=0), Tokenizer.train(["a b c d"] * 3, 270), preset(method)
    )


class Plain:
    """A source that can do no more than it must: no captions without their image."""

    name, fingerprint = "plain", "plain"

    def __init__(self, bad: tuple[int, ...] = (), captions: bool = True, label: Any = None) -> None:
        self.bad, self.captioned, self.label = bad, captions, label

    def __len__(self) -> int:
        return 3

    def key(self, row: int) -> str:
        return f"k{row}"

    def record(self, row: int) -> Record:
        if row in self.bad:
            raise BadSample(f"row {row} is broken")
        return Record(f"k{row}", noise(8, 8, row), [f"caption {row}"] if self.captioned else [], self.label)


ALL = (0, 1, 2)
FEATURES = {"vec": torch.eye(2)}
REFUSED: dict[str, Callable[[], object]] = {
    "expected one text per image": lambda: matcher().score_pairs(FEATURES, {"vec": torch.ones(1, 2)}),
    "plain has no captions for the colour baseline": lambda: [
        *baseline.retrieve(Plain(captions=False), open_source("scenes?n=2"))
    ],
    "none of the first 2 rows is a readable image": lambda: baseline.read(Plain(bad=ALL), 2),
    "--shortlist is 0: expected at least 1.": lambda: [
        *shortlisted(matcher().score_pairs, FEATURES, FEATURES, torch.arange(2), 0)
    ],
    "--samples is 1: expected at least 2 images": lambda: evaluate(matcher(), "spectrum", Plain(), samples=1),
    "none of its 3 rows is a usable image, the first": lambda: evaluate(matcher(), "spectrum", Plain(bad=ALL)),
    "plain has 1 usable vector: expected at least 2": lambda: evaluate(matcher(), "spectrum", Plain(bad=(0, 2))),
    "none of its 3 rows is a usable image, the first because: row 0 is broken": lambda: evaluate(
        matcher(), "retrieval", Plain(bad=ALL)
    ),
    "is a usable image, the first because: no caption. Photos without captions: `kiloword index`": lambda: list(
        per_batch(Inputs(matcher(), Plain(captions=False)), len, lambda part: [False] * len(part.rows), "no caption")
    ),
    "plain has no captions to retrieve with": lambda: evaluate(matcher(), "retrieval", Plain(captions=False)),
    "retrieval got 0 images and 2 texts": lambda: check_pairs({"vec": torch.zeros(0, 2)}, FEATURES, torch.arange(2)),
    "the row of one of the 2 images": lambda: check_pairs(FEATURES, FEATURES, torch.tensor([0, 2])),
    "for each of the 2 texts": lambda: check_pairs(FEATURES, FEATURES, torch.arange(1)),
    "--prompts.coeff is nan": lambda: PromptOptions(coeff=float("nan")).check("filter"),
    "plain has no questions": lambda: _counted(Plain(), 5),
    "precision is 'fp16': expected auto, fp32 or bf16": lambda: open_captioner("model", precision="fp16"),
    "--batch is 0: expected at least 1.": lambda: write_captions(
        describer("coca"), Plain(), "none", GenerationOptions(), batch=0
    ),
    "a text of 32 tokens to choose from, but the text tower reads 31": lambda: Captioner(
        matcher("coca").model, matcher("coca").tokenizer
    ).rules(GenerationOptions(), Trie([tuple(range(5, 36))], torch.device("cpu"))),
    "longest is 40 tokens, but the text tower reads 31": lambda: describer("coca").check(GenerationOptions(longest=40)),
    "this model answers questions": lambda: describer("vqa").check(GenerationOptions()),
    "num is 0. Expected at least 1": lambda: describer("coca").check(GenerationOptions(num=0)),
    "x holds torch.int64: expected floating-point weights": lambda: check_translated(
        "open_clip's B", {"a": torch.zeros(2)}, {"a": ("x", torch.zeros(2, dtype=torch.int64))}
    ),
    r"do not fit open_clip's B: a is \[3\] instead of \[2\]": lambda: check_translated(
        "open_clip's B", {"a": torch.zeros(2)}, {"a": ("x", torch.zeros(3))}
    ),
    "none of these weights is one of open_clip's B": lambda: check_translated("open_clip's B", {}, {}),
    "no values to put into bins": lambda: bins([]),
    "--flops is 0: expected a number above 0": lambda: card("h200", flops=0.0),
    "--bandwidth is inf: expected a number above 0": lambda: card("h200", bandwidth=float("inf")),
    "--lr is nan: expected 0 to 100; --beta1 is 1.0: expected 0 to below 1": lambda: check_ranges(
        OptimConfig(lr=float("nan"), beta1=1.0)
    ),
    "^width is 65537: expected 1 to 65536.$": lambda: check_ranges(TextConfig(width=65537), ""),
    "--batch is 8: expected at least 1": lambda: check_ranges(replace(recipe(), batch="8")),
    "--batch is None: expected at least 1": lambda: check_ranges(replace(recipe(), batch=None)),
    "--workers is some: expected at least 0": lambda: RunOptions(workers="some"),  # type: ignore[arg-type]
    "--steps is 0: expected at least 1": lambda: check_ranges(replace(recipe(), steps=0)),
}  # fmt: skip


def describer(method: str) -> KilowordCaptioner:
    return KilowordCaptioner(Captioner(matcher(method).model, matcher(method).tokenizer), "d")


def recipe() -> Any:
    from kiloword.methods.defaults import default_recipe

    return default_recipe("siglip", "debug")


@pytest.mark.parametrize("output", REFUSED)
def test_what_cannot_be_is_refused_with_a_message(output: str) -> None:
    with pytest.raises(ValueError, match=output):
        REFUSED[output]()


def test_limits_themselves_are_allowed() -> None:
    check_ranges(OptimConfig(lr=0.0, beta1=np.nextafter(1.0, 0.0), ema=1.0, scale_lr=1e4))
    check_ranges(TextConfig(width=65536, context=3))
    assert RunOptions(workers="auto", max_skipped_steps=1).workers == "auto"
    for name in ("flops", "memory", "bandwidth"):
        assert card("h200", **{name: 1e-9}).name == "h200"
    own = card("custom", flops=100, memory=2, bandwidth=3)
    assert (own.flops, own.flops_fp32, own.memory, own.link, own.network) == (1e14, 1e14, 2 * 2**30, 3e9, 3e9)
    assert card("a100-80", memory=1).flops == 312e12
    bf16, fp32 = (card("h100", flops=100, precision=precision) for precision in ("bf16", "fp32"))
    assert (bf16.flops, bf16.flops_fp32, fp32.flops, fp32.flops_fp32) == (1e14, 67e12, 989e12, 1e14)


ERRORS: list[tuple[BaseException, str | None]] = [
    (ValueError(" a sentence. "), "a sentence."),
    (FileNotFoundError(2, "No such file", "x.tar"), "No such file: x.tar."),
    (OSError("it broke"), "it broke."),
    (MemoryError(), "out of memory: take a smaller --batch, or --micro."),
    (MemoryError("9 GiB"), "out of memory (9 GiB): take a smaller --batch, or --micro."),
    (RuntimeError("DataLoader (pid 3) exited. \nmore"), "a loader worker stopped: DataLoader (pid 3) exited. "),
    (RuntimeError("another"), None),
    (KeyError("ours"), None),
    (type("OutOfMemoryError", (RuntimeError,), {})("CUDA is full.\nmore"), "CUDA is full. Take a smaller --micro"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "output"), ERRORS)
def test_errors_in_the_words_of_a_user(error: BaseException, output: str | None) -> None:
    found = sentence_of(error)
    assert found is None if output is None else (found or "").startswith(output) and "\n" not in (found or "")


def test_names_that_cannot_be_written_are_shown_around_the_letter() -> None:
    name = "a" * 300 + "\udc80" + "b" * 100
    with pytest.raises(UnicodeEncodeError) as caught:
        name.encode()
    output = sentence_of(caught.value) or ""
    assert output.startswith(repr("a" * 200 + "\udc80" + "b" * 20))
    assert "cannot be written as utf-8" in output


def test_files_that_are_no_lists_of_answers(tmp_path: Path) -> None:
    (tmp_path / "answers").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8: expected an answer a line"):
        _lines(tmp_path / "answers")
    (tmp_path / "answers").write_text("\n \n")
    with pytest.raises(ValueError, match="is empty: expected an answer a line"):
        _lines(tmp_path / "answers")
    (tmp_path / "answers").write_text("\ufeffyes\n\n no \n")
    assert _lines(tmp_path / "answers") == ["yes", "no"]


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["score", "model", "--texts", "a", "--images"], "holds no images"),
        (["data", "stats", "scenes?n=2", "--as", "siglip"], "expected data stats SRC --as METHOD --png FILE"),
        (["watch"], "watch needs the folder of a run"),
        (["eval", "retrieval", "model", "--data", "scenes?n=2", "--html", "x.html"], "has no page to write"),
    ],
)
def test_command_lines_that_lack_something(
    words: list[str], output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, str(tmp_path)] if words[-1] == "--images" else words)
    assert ended.value.code == 2
    assert output in capsys.readouterr().err


def test_a_source_that_reads_captions_with_their_images(tmp_path: Path) -> None:
    """Its bad rows, and those of which the table knows nothing, are named."""
    import pyarrow.parquet

    table = pyarrow.table({"key": ["k0", "k2"], "caption": ["said 0", "said 2"]})
    pyarrow.parquet.write_table(table, tmp_path / "said.parquet")
    skipped: list[Skipped] = []
    told = list(existing(Plain(bad=(2,)), tmp_path / "said.parquet", skipped, CaptionTaskOptions()))
    assert [(one.row, one.key, one.caption, one.references) for one in told] == [(0, "k0", "said 0", ["caption 0"])]
    assert [(one.row, one.reason) for one in skipped] == [(1, "not in the table of captions"), (2, "row 2 is broken")]


def test_weights_of_prolip_that_are_whole_numbers(tmp_path: Path) -> None:
    config: ModelConfig = sizes()["debug"]
    seen: dict[str, torch.Tensor] = {}
    for _ in range(20):  # each message names what is missing or of another shape
        try:
            _check_folded(config, seen)
            break
        except ValueError as error:
            if "have no" in str(error):
                names = str(error).removeprefix("these weights have no ").partition(": are")[0].split(" and no ")
                seen |= {name: torch.zeros(1) for name in names}
                continue
            name, _, rest = str(error).partition(" has shape ")
            seen[name] = torch.zeros(json.loads(rest.partition("says ")[2]))
    whole = {name: value.long() for name, value in seen.items()}
    with pytest.raises(ValueError, match=r"holds torch\.int64: expected floating-point weights"):
        _check_folded(config, whole)


def test_a_probe_needs_one_class_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Seen([0], ["k0"], {"vec": torch.ones(1, 2)}, [[]], torch.ones(1, 3))
    monkeypatch.setattr("kiloword.evaluation.features.seen", lambda *all_: iter([part]))
    with pytest.raises(ValueError, match="plain has many labels an image: a probe needs one class each"):
        encoded(Inputs(matcher(), Plain(), 2))


def test_some_of_many_items_are_drawn_by_a_number() -> None:
    items = np.arange(100) * 3
    drawn = some(items, 10, 7)
    assert len(set(drawn.tolist()) & set(items.tolist())) == 10
    assert drawn.tolist() == sorted(drawn.tolist()) == some(items, 10, 7).tolist() != some(items, 10, 8).tolist()
    assert some(items, 100, 7) is items


def test_captions_of_a_source_without_their_own_reader_come_with_its_images() -> None:
    assert captions_at(Plain(), 1) == ["caption 1"]
    own = Plain(bad=ALL)
    own.captions = lambda row: (f"own {row}",)  # type: ignore[attr-defined]
    assert captions_at(own, 2) == ["own 2"]
    with pytest.raises(BadSample):
        captions_at(Plain(bad=ALL), 0)


def test_open_clip_is_quiet_and_off_the_network_for_a_while() -> None:
    hub = pytest.importorskip("huggingface_hub.constants")
    before = logging.root.manager.disable, hub.HF_HUB_OFFLINE
    with _of_open_clip("a model"):
        assert not logging.getLogger("other").isEnabledFor(logging.WARNING)
        assert logging.getLogger("other").isEnabledFor(logging.ERROR)
        assert hub.HF_HUB_OFFLINE
    assert (logging.root.manager.disable, hub.HF_HUB_OFFLINE) == before
    with pytest.raises(ValueError, match=r"a model needs a file that is not on this machine: no tokenizer"):  # noqa: SIM117
        with _of_open_clip("a model"):
            raise OSError("no tokenizer")
    assert (logging.root.manager.disable, hub.HF_HUB_OFFLINE) == before


def test_names_that_come_when_they_are_asked_for() -> None:
    for name in kiloword.__all__:
        assert getattr(kiloword, name) is not None
        assert getattr(getattr(kiloword, name), "__name__", name) == name
    assert not hasattr(kiloword, "nothing")


@pytest.mark.parametrize(
    ("native", "error", "needed"),
    [(None, None, False), (True, None, False), (True, OSError, True), (False, None, True)],
)
def test_operators_are_declared_where_torchvision_cannot_load_its_own(
    native: bool | None, error: type[OSError] | None, needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared, loaded = list[str](), list[str]()

    def load(path: str) -> None:
        loaded.append(path)
        if error is not None:
            raise error

    library = SimpleNamespace(define=declared.append)
    spec = None if native is None else SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    if native:
        (tmp_path / "_C.so").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setattr(torch.ops, "load_library", load)
    monkeypatch.setattr(torch.library, "Library", lambda *which: library)
    found = torchvision_ready.__wrapped__()
    assert (found is library) == needed == bool(declared)
    assert found is None or needed
    assert loaded == ([str(tmp_path / "_C.so")] if native else [])
    assert [one.partition("(")[0] for one in declared] == (["nms", "qnms"] if needed else [])
