"""`kiloword eval`: the list of tasks, what is shown and written, what is refused; precision of the encoders."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import kiloword
from commands import refused, said
from kiloword.api import Matcher, load
from kiloword.cli.main import main
from kiloword.config.recipes import sizes
from kiloword.distributed import by_device
from kiloword.evaluation import TASKS, evaluate
from kiloword.evaluation.command import labels, number
from kiloword.evaluation.tasks import ProbeOptions
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.terminal.progress import showing
from kiloword.types import Texts
from tars import noise_batch
from tests.pretended import placed, pretended


def test_help_lists_the_tasks_with_a_line_each_without_torch() -> None:
    code = "import sys; from kiloword.cli.main import main; sys.argv = ['kiloword', 'eval', '--help']\ntry: main()\n"
    code += "finally: print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert all(re.search(rf"^  {name} +{re.escape(task.about)}$", output, re.MULTILINE) for name, task in TASKS.items())
    assert output.endswith("False\n")


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ("", "task"),
        ("--data d m retrieval", "task"),
        ("retreival m --data d", "Did you mean retrieval?"),
        ("runs/a/model retrieval --data d", "a task comes first"),
        ("retrieval --data d", "MODELS is missing"),
        ("retrieval m m --data d", "m, m"),
    ],
)
def test_refused_words(words: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["eval", *words.split()])
    error = capsys.readouterr().err
    assert (end.value.code, word in error, error.count("\n")) == (2, True, 1)


@pytest.mark.parametrize(
    ("task", "options", "word"),
    [("retreival", {}, "retrieval"), ("retrieval", {"shortlst": 5}, "shortlist"), ("retrieval", {}, "model")],
)
def test_refused_names_from_python(task: str, options: dict[str, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        evaluate(None, task, "scenes:test?n=4", **options)


def test_screen_json_and_page_say_the_same(
    folder: Path, matcher: Matcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "second")
    models, page, out = {"siglip": str(folder), "second": str(tmp_path / "second")}, tmp_path / "p.html", tmp_path / "r"
    words = ["--data", "scenes:test?n=8", "--html", str(page), "--json", str(out)]
    main(["eval", "retrieval", *models.values(), *words])
    written = json.loads(out.read_text())
    assert (written["models"], written["data"], written["version"]) == (models, words[1], kiloword.__version__)
    assert written["siglip"] == written["second"] == evaluate(matcher, "retrieval", "scenes:test?n=8")
    value = f"{written['siglip']['image_retrieval_recall@5']:.4f}"
    assert value in page.read_text()
    assert value in capsys.readouterr().out


@pytest.mark.parametrize("second", ["gone", "damaged"])
def test_a_wrong_model_beside_another(
    second: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All names are read before a model is evaluated; what was evaluated before damaged weights is kept."""
    other, out = tmp_path / second, tmp_path / "r.json"
    if second == "damaged":
        shutil.copytree(folder, other)
        (other / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(SystemExit) as end:
        main(["eval", "retrieval", str(folder), str(other), "--data", "scenes:test?n=8", "--json", str(out)])
    said = capsys.readouterr()
    assert (end.value.code, second in said.err) == (2, True)
    assert out.exists() == bool(said.out) == (second == "damaged")
    if said.out:
        assert f"{json.loads(out.read_text())['siglip']['text_retrieval_recall@1']:.4f}" in said.out


def test_share_and_time_left_are_shown_on_stderr(
    folder: Path, matcher: Matcher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["eval", "retrieval", str(folder), "--data", "scenes:test?n=8", "--batch", "2"]
    main(words)
    assert capsys.readouterr().err == ""  # short work shows nothing
    clock = itertools.count(0, 60)  # every look at it takes a minute
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    main(words)
    said = capsys.readouterr()
    assert re.findall(r"^images +(\d+)%.* ETA \d+:\d\d", said.err, re.MULTILINE) == ["25", "50", "75", "100"]
    assert "ETA" not in said.out
    evaluate(matcher, "retrieval", "scenes:test?n=8", batch=2)
    assert capsys.readouterr() == ("", "")  # Python prints nothing
    probe = ProbeOptions(recipe="sgd", epochs=2, lr=0.1, batch=8, weight_decay=0.0)
    with showing():
        matcher.encode_text(["a dog", "a cat"], batch=1)
        monkeypatch.setattr("kiloword.evaluation.retrieval.CHUNK", 4)
        evaluate(matcher, "retrieval", "scenes:test?n=8")
        evaluate(matcher, "probe", "scenes:test?n=8&task=colour", train="scenes:train?n=24&task=colour", probe=probe)
    errors = capsys.readouterr().err
    for what in ("texts", "ranks", "probe"):
        assert re.search(rf"^{what} 100% .* ETA 0:00", errors, re.MULTILINE), what


def test_small_values_keep_digits_that_count() -> None:
    shown = {0.0: "0.0000", 0.01: "0.0100", 0.00999: "0.00999", 12.34567: "12.3457", 1e-9: "1e-09"}
    assert {value: number(value) for value in shown} == shown


def test_labels_tell_models_apart() -> None:
    assert labels(["runs/a/model", "b/"]) == ["a", "b"]
    assert labels(["x/a/model", "y/a/model"]) == ["x/a/model", "y/a/model"]
    assert labels(["model"]) == ["model"]


# Precision of encoders


BF16, FP32 = torch.bfloat16, torch.float32
SCENES = "scenes:test?n=12"
FolderOf = Callable[[str], Path]
IMAGES = noise_batch(3, 32)
TEXTS = ["a red circle", "two blue squares and a star"]


@contextmanager
def kinds(*parts: nn.Module) -> Iterator[set[torch.dtype]]:
    """Types of what the linear layers of modules put out."""
    seen: set[torch.dtype] = set()
    layers = [layer for part in parts for layer in part.modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_hook(lambda _, given, out: seen.add(out.dtype)) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("method", ["clip", "llip", "prolip", "sycoca"])
def test_encoders_compute_in_bf16_and_features_and_scores_are_fp32(folder_of: FolderOf, method: str) -> None:
    plain, half = load(folder_of(method)), load(folder_of(method), precision="bf16")
    with kinds(half.model.image_tower) as seeing, kinds(half.model.text_tower) as reading:
        found = [half.encode_image(IMAGES), half.encode_text(TEXTS)]
    assert seeing == reading == {BF16}
    expected = [plain.encode_image(IMAGES), plain.encode_text(TEXTS)]
    for ours, theirs in zip(found, expected, strict=True):
        assert {name: value.dtype for name, value in ours.items()} == dict.fromkeys(theirs, FP32)
        assert float(1 - torch.cosine_similarity(ours["vec"], theirs["vec"]).min()) < 1e-2
        assert not torch.equal(ours["vec"], theirs["vec"])
    assert torch.equal(half.score(*found), plain.score(*found))
    assert torch.equal(half.classify(found[0], ["cat"]), plain.classify(found[0], ["cat"]))


def test_precision_on_a_pretended_device() -> None:
    model = build(sizes()["debug"], preset("llip"), bare=True)
    with pretended():
        placed(model)
        model.precision = "bf16"
        texts = Texts(*(torch.zeros(n, dtype=torch.int64, device="cuda") for n in (7, 3)), 4)
        pixels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8, device="cuda")
        with kinds(model.image_tower, model.text_tower) as computing, torch.no_grad():
            tokens, seen = model.encode_image(pixels)
            words, read = model.encode_text(texts)
            scores = model.score(seen, read)
    assert computing == {BF16}
    made = [tokens, words, scores, *seen.values(), *read.values()]
    assert {(x.device.type, x.dtype) for x in made} == {("cuda", FP32)}


def test_auto_is_bf16_for_large_models_on_cuda() -> None:
    def chosen(device: str) -> set[str]:
        return {name for name, c in sizes().items() if by_device.encoder_precision("auto", c, device) == "bf16"}

    assert chosen("cpu") == set()
    assert chosen("cuda:1") == set(sizes()) - {"debug", "tiny"}
    tiny = sizes()["tiny"]
    wide = replace(tiny, text=replace(tiny.text, width=512))
    assert by_device.encoder_precision("auto", wide, "cuda") == "bf16"
    assert by_device.encoder_precision("fp32", wide, "cuda") == "fp32"
    assert by_device.encoder_precision("bf16", tiny, "cpu") == "bf16"


def test_eval_takes_a_precision(folder_of: FolderOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, words = {}, ("eval", "retrieval", str(folder_of("llip")), "--data", SCENES, "--device", "cpu")
    for precision in ("fp32", "auto", "bf16"):
        said(capsys, *words, "--json", tmp_path / "r.json", "--precision", precision)
        found[precision] = json.loads((tmp_path / "r.json").read_text())
    assert found["auto"] == found["fp32"]
    assert found["bf16"] != found["fp32"]
    bounds = {name: 0.6 if name == "rsum" else 0.1 for name in found["fp32"]}  # rsum is a sum of six recalls
    assert all(found["bf16"][name] == pytest.approx(value, abs=bounds[name]) for name, value in found["fp32"].items())
    with pytest.raises(ValueError, match="fp16"):
        load(folder_of("clip"), precision="fp16")
    assert "fp16" in refused(capsys, *words, "--precision", "fp16")


def test_a_table_of_captions_has_one_precision(
    folder_of: FolderOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("caption", folder_of("sycoca"), "--data", SCENES, "--out", tmp_path / "c.parquet", "--device", "cpu")
    said(capsys, *words, "--precision", "bf16")
    assert json.loads(pq.read_schema(tmp_path / "c.parquet").metadata[b"kiloword"])["precision"] == "bf16"
    assert "precision" in refused(capsys, *words)
