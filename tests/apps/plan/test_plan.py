"""`kiloword plan` against real steps, what it says, and what the page in docs/ says."""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

import plan_measure
import plan_papers
from cases import mostly_slow
from kiloword.apps.plan import gpu
from kiloword.apps.plan.advice import Planner, newton_schulz
from kiloword.apps.plan.gpu import Layout, traffic
from kiloword.apps.plan.request import Plan, card
from kiloword.apps.plan.simulation import Simulation, _rows
from kiloword.apps.plan.tables import sentences, show
from kiloword.cli.main import main
from kiloword.cli.plan import planner_of
from kiloword.config import recipes
from kiloword.config.recipes import ModelConfig, OptimConfig, sizes
from kiloword.distributed import collectives
from kiloword.methods.method import Method, Part, Term
from kiloword.methods.registry import names, preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.randomness import Draw
from kiloword.training import engine
from kiloword.training.muon import orthogonal
from kiloword.training.step import Learner, backward, learner_of
from kiloword.types import Batch, Encoded, Example, Fetch, PairBlocks, Positives, Total
from kiloword.verify import batch as on_trunk
from kiloword.verify.suite import over_ranks
from plan_measure import CASES, Case, Measured, batch_of, compare, method_of, share_of, without_content
from plan_peak import compare_peak

BYTES = 0.15  # relative difference of the peak
ACTIVATIONS = 0.06  # of a step's activations; FLOP, weights, gradients and optimizer are exact
PAGE = Path(__file__).parents[2] / "docs" / "plan.md"

# Small ones of every method's own parts.
SMALL = (
    Case("siglip", "debug", 8, micro_batches=2),
    Case("llip", "debug", 8, checkpointing="whole"),
    Case("prolip", "debug", 8, captions=2),
    Case("sycoca", "debug", 4, captions=2),
)
MORE = (
    Case("siglip", "tiny", 8, micro_batches=2),
    Case("llip", "tiny", 8, checkpointing="whole"),
    Case("prolip", "tiny", 16, captions=2),
    Case("sycoca", "tiny", 4, captions=2),
    Case("clip", "tiny", 8, precision="bf16"),
    Case("coca", "tiny", 8, checkpointing="selective"),
    Case("fff", "tiny", 8, captions=3, micro_batches=2),
    Case("pcme++", "tiny", 8),
    Case("prolip-released", "tiny", 16),
    Case("vqa", "tiny", 8),
    Case("sycoca", "tiny", 8, captions=2, precision="bf16", checkpointing="whole"),
    Case("llip", "s16", 4),
    *CASES,
)
PEAKS = (
    Case("siglip", "l14", 128),
    Case("siglip", "l14", 128, checkpointing="selective"),
    Case("siglip", "h14", 256, checkpointing="whole", precision="bf16"),
    Case("sycoca", "b16", 16),
)


def check(case: Case) -> None:
    for name, (planned, measured) in compare(case).items():
        allowed = ACTIVATIONS if name == "activations" else 0.0
        assert abs(planned - measured) <= allowed * measured, (case.label, name, planned, measured)


@pytest.mark.parametrize("case", mostly_slow(SMALL, 0, 1), ids=lambda case: case.label)
def test_plan_agrees_with_a_real_step(case: Case) -> None:
    check(case)


@pytest.mark.slow
def test_measuring_keeps_no_graph() -> None:
    measured = Measured(Case("siglip", "debug", 4))
    before = len(objects())
    assert measured.activations() > 0
    assert len(objects()) == before


def objects() -> list[torch.Tensor]:
    gc.collect()
    return [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.label)
def test_plan_agrees_with_a_real_step_of(case: Case) -> None:
    check(case)


QUERIES = {"image_pool": "attentional", "pool_queries": 5, "pool_width": 16, "pool_heads": 2}
PARTS = (  # preset, its settings, those of the head, captions, micro-batches
    ("coca", {"caption_mask": "random"}, QUERIES, 2, 1),
    ("coca", {"caption_mask": "attentive", "caption_op": "token"}, {}, 2, 1),
    ("sycoca", {"mim_op": "drop", "guide": "none", "mim_mask": "random"}, {}, 1, 3),
    ("prolip", {"masked_every": 1, "hide_words": "drop", "mask_words": 1.0}, {}, 2, 1),
    ("siglip", {}, {"image_pool": "map"}, 2, 1),
    ("vqa", {}, {}, 2, 1),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "own", "head", "captions", "micro_batches"), PARTS)
def test_plan_agrees_with_a_real_step_of_every_kind_of_term_and_pool(
    name: str, own: dict[str, Any], head: dict[str, Any], captions: int, micro_batches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    debug = sizes()["debug"]
    debug = replace(debug, head=replace(debug.head, **head))
    monkeypatch.setattr(recipes, "sizes", lambda: {"debug": debug})
    monkeypatch.setattr(plan_measure, "method_of", lambda name: preset(name, own))
    found = compare(Case(name, "debug", 6, captions, micro_batches))
    assert found["flops"][0] == found["flops"][1]
    assert found["activations"][0] == pytest.approx(found["activations"][1], rel=0.005)


def check_peak(case: Case) -> None:
    planned, counted = compare_peak(case)
    assert abs(planned - counted) <= BYTES * counted, (case.label, planned, counted)


@pytest.mark.slow
def test_peak_agrees_with_tensors_without_content() -> None:
    check_peak(Case("siglip", "b32", 512, checkpointing="whole"))


@pytest.mark.slow
@pytest.mark.parametrize("case", PEAKS, ids=lambda case: case.label)
def test_peak_agrees_with_tensors_without_content_of(case: Case) -> None:
    check_peak(case)


def planner(words: str) -> Planner:
    return planner_of([*words.split(), "--samples", "1e9"])


@pytest.mark.parametrize("method", names())
def test_parameters_are_those_of_a_real_model(method: str) -> None:
    shapes = learner_of(sizes()["debug"], preset(method))
    real = build(sizes()["debug"], preset(method))
    losses = sum(p.numel() for part in (shapes.terms, shapes.contrasts) for p in part.parameters())
    assert gpu.total(shapes) == losses + sum(p.numel() for p in real.parameters())
    assert sum(gpu.parts(shapes).values()) == gpu.total(shapes)


@pytest.mark.slow
@pytest.mark.parametrize("method", names())
def test_every_preset_is_measured_whole(method: str) -> None:
    wanted = planner(f"{method} --size debug --batch 8")
    assert wanted.options()
    assert not wanted.simulation.uncounted


@pytest.mark.slow
def test_of_equally_fast_ways_the_smaller_is_advised() -> None:
    """Selective checkpointing repeats no product, so by the plan's arithmetic it costs no time."""
    options = planner("siglip --size tiny --batch 64").options()
    speeds = {option.layout.checkpointing: round(option.seconds, 9) for option in options}
    assert speeds["selective"] == speeds["none"]
    first, second = [option for option in options if option.layout.checkpointing != "whole"]
    assert first.bytes < second.bytes
    assert first.layout.checkpointing == "selective"


@pytest.mark.parametrize("method", mostly_slow(["siglip", "llip+caption", "pcme++"], 0))
def test_double_precision_takes_twice_as_much(method: str) -> None:
    single, double = (Simulation(sizes()["debug"], preset(method), "cpu", precision) for precision in ("fp32", "fp64"))
    bits = Counter(x.dtype for x in (*double.learner.parameters(), *double.learner.buffers()) if x.is_floating_point())
    assert set(bits) == {torch.float64}
    assert torch.get_default_dtype() == torch.float32
    words = f"{method} --size debug --batch 4 --checkpointing none --gpu cpu --precision"
    one, two = (planner(f"{words} {precision}").options()[0] for precision in ("fp32", "fp64"))
    assert two.memory["weights"] == 2 * one.memory["weights"]
    assert two.memory["activations"] == pytest.approx(2 * one.memory["activations"], rel=0.1)
    assert two.step.total == one.step.total
    assert gpu.total(single.learner) == gpu.total(double.learner)


def test_indices_among_the_features_of_pairs_are_valid() -> None:
    """Positives by ground truth index the texts by the positions of images, whose values are real."""
    garbage = [torch.full((2048,), 1 << 62) for _ in range(64)]
    del garbage  # what memory without content would hold
    assert planner("siglip --positives exact --size debug --batch 8").options()
    for x in _rows(
        {"position": torch.zeros(1, dtype=torch.int64), "truth": torch.ones(1, 8, dtype=torch.bool)}, 2048
    ).values():
        assert not x.any()


class Brightness(Term):
    """A term that kiloword does not know: predicts the mean of each patch from its token."""

    def __init__(self, config: ModelConfig, reads_values: bool) -> None:
        super().__init__()
        width = config.image.width
        self.hidden, self.out = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, 1)
        self.reads_values = reads_values

    def count(self, batch: Batch) -> Tensor:
        return batch.position.new_full((), len(batch))

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        predicted = self.out(self.hidden(encoded.image_tokens).relu())
        scale = float(predicted.sum()) if self.reads_values else 1.0
        return predicted.square().sum() * scale


def half_squares(pairs: PairBlocks, positives: Positives) -> Total:
    """A pair loss that kiloword does not know."""
    total = pairs.total(lambda block, *_: (0.5 * block.logits.square().sum(1), block.logits))
    return Total(total, total.new_tensor(float(pairs.shape[0])))


def strange(reads_values: bool = False) -> Method:
    terms = {"brightness": (1.0, Part(Brightness, reads_values))}
    return replace(preset("siglip"), name="strange", pair_loss=half_squares, terms=terms)


@pytest.mark.slow
def test_a_method_that_kiloword_does_not_know_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_measure, "method_of", lambda name: strange())
    for name, (planned, measured) in compare(Case("strange", "debug", 6, captions=2)).items():
        assert planned == pytest.approx(measured, rel=0.01 if name == "activations" else 0), name
    asked = planner("siglip --size debug --batch 6")
    parts = {w.name: w for w in Planner(asked.plan, strange(), asked.card).options()[0].step.parts}
    config = sizes()["debug"].image
    tokens = 6 * (1 + (config.size // config.patch) ** 2)
    assert parts["brightness"].forward == 2 * tokens * (2 * config.width**2 + 2 * config.width)
    assert parts["brightness"].group == "terms"


def test_a_term_that_reads_values_is_named_not_forgotten() -> None:
    asked = planner("siglip --size debug --batch 8")
    found = Planner(asked.plan, strange(reads_values=True), asked.card)
    text = " ".join(sentences(found, found.options()))
    assert "Not counted, because they read values of tensors: brightness." in text


@pytest.mark.parametrize(("size", "gflop"), mostly_slow([("b32", 44.3), ("b16", 123.3), ("l14", 526.0)], 0))
def test_padded_pairs_cost_what_is_published(size: str, gflop: float) -> None:
    found = planner(f"clip --size {size} --tokens 77 --batch 1")
    assert found.option("ddp", "none", 1).step.needed / 1e9 == pytest.approx(gflop, rel=0.005)


def test_newton_schulz_is_counted_as_torch_counts_it() -> None:
    learner = learner_of(sizes()["debug"], preset("siglip"))
    optim = OptimConfig(name="muon")
    shapes: list[tuple[int, int]] = []
    for block in [*learner.model.image_tower.blocks, *learner.model.text_tower.blocks]:
        width, hidden = block.mlp.fc.in_features, block.mlp.fc.out_features
        shapes += [(width, width)] * 4 + [(hidden, width), (width, hidden)]
    with FlopCounterMode(display=False) as counter:
        for shape in shapes:
            orthogonal(torch.randn(1, *shape))
    assert newton_schulz(learner, optim) == counter.get_total_flops()


@pytest.mark.slow
def test_memory_falls_with_checkpointing_micro_batches_and_shards() -> None:
    found = planner("siglip --size b16 --gpus 8 --batch 4096")
    waiting = [found.option("ddp", kind, 1).memory["activations"] for kind in ("none", "selective", "whole")]
    assert waiting == sorted(waiting, reverse=True)
    by_number = [found.option("ddp", "none", n).bytes for n in (1, 2, 4, 8)]
    assert by_number == sorted(by_number, reverse=True)
    whole, sharded = (found.option(way, "none", 1).memory for way in ("ddp", "fsdp"))
    kept = 4 * gpu.shards(found.learner).replicated
    assert sharded["weights"] == pytest.approx((whole["weights"] - kept) / 8 + kept)
    assert sharded["activations"] == whole["activations"]


@pytest.mark.parametrize(
    ("size", "images", "captions", "expected"),
    mostly_slow(
        [
            ("b32", 1024, 1, 4 * 1024 * 128 * 768),  # 50 tokens in blocks of 128; texts: 4 (1024 20 + 128 1024) 512
            ("l14", 256, 1, 4 * 256 * 384 * 1024),  # 257 tokens
            ("h14", 8, 1, 4 * 8 * 384 * 16 * 96),  # heads of 80 dimensions take 96
            ("b32", 8, 8, 4 * (64 * 20 + 128 * 64) * 512),  # more texts
        ],
        2,
        3,
    ),
)
def test_attention_takes_scratch_of_its_queries(size: str, images: int, captions: int, expected: int) -> None:
    """Of texts or images, whichever are more, of one layer, on CUDA in half precision."""
    words = f"clip --size {size} --batch {images} --captions {captions} --model.image.depth 1 --model.text.depth 1"
    micro = planner(words).micro_batch(images)
    assert micro.scratch == expected
    assert gpu.passing(replace(micro, passing=0.0), "none") == expected
    block = micro.block["none"]
    assert gpu.passing(replace(micro, passing=0.0, half=Counter()), "whole") == 1.375 * block + expected


@pytest.mark.slow
def test_attention_takes_no_scratch_elsewhere() -> None:
    assert planner("clip --size debug --batch 8 --precision fp32").micro_batch(8).scratch == 0
    assert planner("clip --size debug --batch 8 --gpu cpu").micro_batch(8).scratch == 0


@pytest.mark.slow
def test_images_that_look_at_texts_are_packed() -> None:
    micro = planner("sycoca --size debug --batch 8").micro_batch(8)
    assert micro.scratch == 4 * (8 * 21 + 128 * 8) * 2 * 32  # heads of 16 dimensions take 32


@pytest.mark.slow
def test_traffic_is_that_of_rings() -> None:
    found = planner("siglip --size b32 --gpus 4 --batch 64")
    n, weights = 4, 4 * gpu.total(found.learner)
    ddp = found.option("ddp", "none", 1).traffic
    assert ddp["gradients"] == pytest.approx(2 * (n - 1) / n * weights)
    row = 4 * found.learner.model.config.head.dim
    assert ddp["features"] == pytest.approx((n - 1) / n * 64 * (2 * row + 16))
    fsdp = found.option("fsdp", "none", 1).traffic
    cut = gpu.shards(found.learner)
    assert fsdp["weights"] == pytest.approx((n - 1) / n * (2 * 2 * cut.sharded + 4 * cut.root))
    micro_batches = found.option("fsdp", "none", 4).traffic
    assert micro_batches["weights"] == pytest.approx((n - 1) / n * 4 * (3 * 2 * cut.sharded + 4 * cut.root))
    assert planner("siglip --size b32 --batch 64").option("ddp", "none", 1).traffic == {}


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the whole buffers of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d.") and "barrier" not in name:
            found = [x.nbytes for x in tree_iter(args) if isinstance(x, torch.Tensor)]
            self.bytes += max(found) * (2 if "allreduce" in name else 1)
        return func(*args, **(kwargs or {}))


WAYS = [
    ("ddp", 1, "siglip", "fp32"),
    ("fsdp", 1, "siglip", "fp32"),
    ("fsdp", 2, "siglip", "fp32"),
    ("fsdp", 2, "siglip", "bf16"),
    ("fsdp", 1, "sycoca", "fp32"),
    ("fsdp", 1, "prolip", "bf16"),
]


def send(folder: str) -> None:
    """Steps on two ranks; the first writes what was planned and what was sent, in whole buffers."""
    found, rank = [], collectives.rank()
    for way, micro_batches, name, precision in WAYS:
        method, config = method_of(name), sizes()["debug"]
        learner = Learner(build(config, method), method)
        if way == "fsdp":
            engine.shard(learner, half=precision == "bf16")
        batch = batch_of(learner.model.config, 8, 1, method)
        batch.position = torch.arange(8) + 8 * rank
        reducer = engine.replicated(learner)
        with Sent() as sent:
            backward(
                learner,
                batch.split(micro_batches),
                partial(torch.autocast, "cpu", enabled=precision == "bf16"),
                reducer,
            )
        simulation = Simulation(config, method, "cpu", precision)
        micro = without_content(simulation, batch.split(micro_batches)[0])
        share = replace(share_of(simulation, micro, batch, OptimConfig()), all_texts=16)
        planned = traffic(share, Layout(2, way, "none", micro_batches))
        found.append((way, micro_batches, name, precision, 2 * sum(planned.values()), sent.bytes))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_traffic_is_what_two_ranks_send(tmp_path: Path) -> None:
    over_ranks(2, send, str(tmp_path))
    for *label, planned, sent in json.loads((tmp_path / "found.json").read_text()):
        assert planned == pytest.approx(sent, rel=0.01), label


def test_advice_is_the_fastest_that_fits_with_the_most_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = "--gpu custom --flops 300 --memory 5 --bandwidth 5"
    wanted = planner(f"siglip --size b32 --gpus 2 --batch 1024 {card} --json {tmp_path / 'plan.json'}")
    show(wanted)
    output, found = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    options: list[dict[str, Any]] = found["options"]
    assert len(options) == 6
    best, room = options[0], 5 * 2**30
    assert best["fits"]
    assert best["pairs_per_second"] == max(o["pairs_per_second"] for o in options if o["fits"])
    for option in options:
        assert option["bytes"] == pytest.approx(sum(option["memory"].values()))
        assert option["fits"] == (option["bytes"] <= room)
        assert option["days"] == pytest.approx(1e9 / option["pairs_per_second"] / 86400)
    micro = found["largest_micro"]
    assert 512 % micro == 0
    assert not wanted.option(best["parallel"], best["checkpointing"], 512 // micro // 2).fits
    assert f"The largest micro-batch is {micro} of a share of 512." in output
    assert found["flop_a_pair"] < found["flop_a_pair_padded"]


@pytest.mark.slow
def test_what_does_not_fit_is_an_error_after_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = "--gpu custom --flops 300 --memory 0.5 --bandwidth 5"
    words = f"plan siglip --size debug --batch 4 --samples 1e9 {card} --json {tmp_path / 'plan.json'}"
    with pytest.raises(SystemExit) as end:
        main(words.split())
    shown = capsys.readouterr()
    assert end.value.code == 2
    options = json.loads((tmp_path / "plan.json").read_text())["options"]
    least = min(option["bytes"] for option in options) / 2**30
    assert f"kiloword: nothing fits: ddp, checkpointing {options[0]['checkpointing']}" in shown.err
    assert f"takes {least:.1f} GiB of 0.5" in shown.err
    assert "alternatives: 0.5 GiB a GPU" in shown.out
    assert "Take ddp" not in shown.out
    assert not any(option["fits"] for option in options)


@pytest.mark.slow
def test_composed_captions_are_longer_and_some_methods_take_six() -> None:
    assert planner("clip-c --size b16 --settings.rho 0.5").tokens == pytest.approx(20 + 0.5 * 19)
    assert planner("fff --size b16").captions == 6
    assert planner("prolip --size b16").tokens == 22  # [UNC] and [CLS] behind the end


@dataclass(frozen=True)
class Lowercase:
    """A transform of one's own, whose settings are none of ours."""

    settings: object

    def __call__(self, example: Example, fetch: Fetch, draw: Draw) -> Example:
        return replace(example, captions=[caption.lower() for caption in example.captions])


@pytest.mark.parametrize("settings", [{"rho": 0.5}, SimpleNamespace(words=3), SimpleNamespace(rho=0.5, parts="both")])
def test_a_transform_of_ones_own_may_keep_settings(settings: object) -> None:
    """Captions are taken to stay as long as they are, whatever the names of its settings."""
    found = planner("siglip --size debug --batch 8")
    method = replace(found.method, transforms=(Lowercase(settings),))
    assert Planner(found.plan, method, found.card).tokens == found.tokens


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("siglip", "--samples"),
        ("siglip --samples 1e9 --batch 10 --gpus 3", "multiple of 3"),
        ("siglip --samples 1e9 --batch 12 --gpus 3 --micro 3", "choose a divisor"),
        ("siglip --samples 1e9 --gpu b200", "custom with --flops"),
        ("siglip --samples 1e9 --gpu custom --flops 100", "--memory"),
        ("siglip --samples 1e9 --utilisation 1.5", "above 0, at most 1"),
        ("siglip --samples 1e9 --flops nan", "--flops is nan: expected above 0"),
        ("siglip --samples 1e9 --memory inf", "--memory is inf: expected above 0"),
        ("siglip --samples 1e9 --bandwidth 0", "--bandwidth is 0.0: expected above 0"),
        ("siglip --samples 1e9 --model.text.extra-tokens odd", "odd"),
        ("siglip --samples 1e9 --size huge", "unknown size"),
        ("siglip --samples 1e9 --parallel fsdp", "--gpus is 1"),
        ("--samples 1e9", "needs a method"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *words.split()])
    assert end.value.code == 2
    assert output in capsys.readouterr().err


def test_page_has_the_scripts_prose_and_every_command() -> None:
    text = PAGE.read_text()
    assert text.startswith(plan_papers.INTRO)
    assert text.endswith(plan_papers.CHECKS)
    for setting in plan_papers.SETTINGS:
        assert f"kiloword plan {setting.command}\n" in text


@pytest.mark.slow
def test_page_is_what_its_command_prints() -> None:
    assert PAGE.read_text() == plan_papers.page()


def printed(text: str) -> dict[str, list[list[str]]]:
    """What `plan` prints: a table's title -> its rows, cut where two spaces are."""
    found: dict[str, list[list[str]]] = {}
    for part in text.split("\n\n"):
        title, *lines = part.splitlines()
        found[title.partition(":")[0]] = [re.split(r"\s{2,}", line.strip()) for line in lines[1:]]
    return found


@pytest.mark.slow
def test_tables_say_what_the_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Muon, micro-batches and checkpointing, so that every row is there; figures of the file from the step itself."""
    words = "siglip --size tiny --gpus 2 --batch 64 --micro 8 --gpu 4090 --checkpointing whole --precision fp32"
    asked = planner(f"{words} --json {tmp_path / 'plan.json'}")
    show(asked)
    shown, output = printed(capsys.readouterr().out), json.loads((tmp_path / "plan.json").read_text())
    planned = asked.options()[0]
    best, again = output["options"][0], output["options"][0]["done_again"]
    step, images, total = planned.step, 32 * 1e9, planned.step.total
    assert sum(w["forward"] + w["backward"] for w in best["work"]) + sum(again.values()) == pytest.approx(total)
    assert again == step.twice
    assert len(again) == 3
    parts = [(n, m / 1e6) for n, m in output["parameters"].items() if m]
    assert shown["parameters"] == [[n, f"{m:.2f}"] for n, m in [*parts, ("total", sum(m for _, m in parts))]]
    rows = [[w["name"], w["group"], f"{w['forward'] / images:.3g}", f"{w['backward'] / images:.3g}",
             f"{100 * (w['forward'] + w['backward']) / total:.1f}"] for w in best["work"]]  # fmt: skip
    rows += [[n, f"{v / images:.3g}", f"{100 * v / total:.1f}"] for n, v in again.items()]
    assert shown["arithmetic of a pair"] == [*rows, ["total", f"{total / images:.4g}", "100.0"]]
    held = [*best["memory"].items()]
    assert shown["memory of a GPU"][:-1] == [[n, f"{v / 2**30:.3f}"] for n, v in held]
    assert shown["memory of a GPU"][-1] == ["total", f"{sum(v for _, v in held) / 2**30:.2f}"]
    assert shown["traffic of a GPU and step"] == [[n, f"{v / 1e6:.1f}"] for n, v in best["traffic"].items()]
    rates = [f"{64 / o['seconds']:,.0f}" for o in output["options"]]
    days = [1e9 / (64 / o["seconds"]) / 86400 for o in output["options"]]
    assert [row[-3:] for row in shown["alternatives"]] == [
        [rate, f"{d:.2f}", f"{48 * d:,.0f}"] for rate, d in zip(rates, days, strict=True)
    ]


@pytest.mark.slow
def test_a_frozen_trunk_has_no_gradients_and_no_backward_pass() -> None:
    plan = Plan(model=on_trunk.config("frozen"), batch=32, samples=1e4, gpu="cpu", precision="fp32")
    planner = Planner(plan, preset("siglip"), card("cpu"))
    model = planner.learner.model
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert frozen > 40_000
    held = gpu.states(planner.learner, plan.optim, 4)
    assert held["weights"] - held["gradients"] == 4 * frozen
    (own,) = [w for w in planner.option("ddp", "none", 1).step.parts if w.name == "image tower"]
    assert 0 < own.backward < 1.5 * own.forward, "two products of each but those of the trunk"
