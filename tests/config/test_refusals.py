"""What evaluation, scoring, mining and imports refuse, each with a message that names what came."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kiloword
from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import sizes
from kiloword.data.reading import captions_at
from kiloword.data.sources.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.errors import sentence_of
from kiloword.evaluation import baseline, evaluate
from kiloword.evaluation.caption import CaptionTaskOptions
from kiloword.evaluation.caption.task import existing
from kiloword.evaluation.features import per_batch
from kiloword.evaluation.retrieval.relevance import check_pairs
from kiloword.evaluation.retrieval.shortlist import shortlisted
from kiloword.evaluation.task import Inputs
from kiloword.evaluation.zeroshot import PromptOptions
from kiloword.generation.captioner import Captioner
from kiloword.generation.captioners import KilowordCaptioner, open_captioner
from kiloword.generation.command import write_captions
from kiloword.generation.options import GenerationOptions
from kiloword.generation.rules import Trie
from kiloword.interop.open_clip import check_translated
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
}  # fmt: skip


def describer(method: str) -> KilowordCaptioner:
    return KilowordCaptioner(Captioner(matcher(method).model, matcher(method).tokenizer), "d")


@pytest.mark.parametrize("output", REFUSED)
def test_what_cannot_be_is_refused_with_a_message(output: str) -> None:
    with pytest.raises(ValueError, match=output):
        REFUSED[output]()


def test_the_numbers_of_a_card() -> None:
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


def test_names_that_come_when_they_are_asked_for() -> None:
    for name in kiloword.__all__:
        assert getattr(kiloword, name) is not None
        assert getattr(getattr(kiloword, name), "__name__", name) == name
    assert not hasattr(kiloword, "nothing")
