"""The contract of methods: contrasts, inputs, weights by progress, after_step, components of users."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kiloword.config.recipes import DataConfig, ModelFile, sizes
from kiloword.data.loader import Loader
from kiloword.data.open import open_source
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.losses import inputs as loss_inputs
from kiloword.losses.inputs import PairInputs
from kiloword.losses.pairs import sigmoid_loss
from kiloword.methods.defaults import FIELD, default_recipe
from kiloword.methods.method import Method, Ramp, annotated
from kiloword.methods.registry import preset
from kiloword.methods.slip import VIEWS
from kiloword.model.heads import cosine_head
from kiloword.model.model import Model, initialise
from kiloword.models.build import build
from kiloword.models.trust import Trust, method_of
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.training.optimizer import Optimizer
from kiloword.types import Batch, Encoded, Example, Features, Fetch, Input, PairBlocks, TextGroup, Total
from kiloword.verify import suite as verify_suite
from kiloword.verify.batch import batch, config
from kiloword.verify.loading import made_otherwise
from kiloword.verify.suite import _alone, _without_gradient, learner, verify
from states import whole_and_cut
from threads import over_threads


class TextContrast(nn.Module):
    """Captions against captions of the same image, by their features."""

    def __init__(self) -> None:
        super().__init__()
        self.head = cosine_head(5.0, bias=-1.0)

    def features(self, model: Model, batch: Batch, encoded: Encoded) -> tuple[Features, Features]:
        return {"vec": encoded.texts["vec"]}, {"vec": encoded.texts["vec"]}

    def loss(self, pairs: PairBlocks) -> Total:
        return sigmoid_loss(pairs, annotated)


def with_contrast(weight: Any = 1.0, make: Callable[[Any], nn.Module] = lambda _: TextContrast()) -> Method:
    return replace(preset("siglip"), contrasts={"texts": (weight, make)})


def learner_of(method: Method) -> Learner:
    made = Learner(build(config(), method), method)
    initialise(made.terms, 0, "terms.")
    initialise(made.contrasts, 0, "contrasts.")
    return made.double()


def gradients(method: Method, micro: int, done: float = 0.0) -> dict[str, Tensor]:
    made = learner_of(method)
    made.done = done
    values = backward(made, batch().split(micro))
    measured = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    return measured | {f"loss:{name}": value for name, value in values.items()}


def test_a_contrast_is_the_dense_loss_of_all_captions_with_all() -> None:
    made, some = learner_of(with_contrast()), batch()
    encoded = made.encode(some)
    head, vec = made.contrasts["texts"].head, encoded.texts["vec"]
    of = some.image_of_text
    logits = vec @ vec.T * head.log_scale.exp() + head.bias  # type: ignore[operator, union-attr]
    target = (of[:, None] == of).double()
    expected = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="sum") / len(vec)
    torch.testing.assert_close(backward(made, [some])["texts"], expected.detach(), rtol=1e-12, atol=0)


def test_micro_batches_do_not_change_the_gradients_of_a_contrast() -> None:
    whole, parts = gradients(with_contrast(), 1), gradients(with_contrast(), 4)
    assert whole.keys() == parts.keys()
    assert "contrasts.texts.head.bias" in whole
    for name, expected in whole.items():
        torch.testing.assert_close(parts[name], expected, rtol=1e-9, atol=1e-12, msg=name)


def test_the_weight_of_a_loss_follows_the_run() -> None:
    ramp = with_contrast(Ramp(2.0, 0.25, 0.75))
    start, middle, end = (gradients(ramp, 4, done) for done in (0.1, 0.5, 0.9))
    for measured, weight in ((start, 0.0), (middle, 1.0), (end, 2.0)):
        expected = measured["loss:pair"] + weight * measured["loss:texts"]
        torch.testing.assert_close(measured["loss:loss"], expected, rtol=1e-12, atol=0)
    assert not start["contrasts.texts.head.bias"].any()
    torch.testing.assert_close(2 * middle["contrasts.texts.head.bias"], end["contrasts.texts.head.bias"])


@pytest.mark.parametrize(("first", "last"), [(0.5, 0.5), (-0.1, 0.5), (0.5, 1.1)])
def test_a_ramp_lies_within_the_run(first: float, last: float) -> None:
    with pytest.raises(ValueError, match=r"expected two ascending numbers in \[0, 1\]"):
        Ramp(1.0, first, last)


def test_losses_have_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="two losses named 'pair'"):
        replace(preset("siglip"), contrasts={"pair": (1.0, lambda _: TextContrast())})
    with pytest.raises(ValueError, match="two losses named 'caption'"):
        replace(preset("coca"), contrasts={"caption": (1.0, lambda _: TextContrast())})


def test_features_without_a_known_place_are_refused() -> None:
    class Odd(TextContrast):
        def features(self, model: Model, batch: Batch, encoded: Encoded) -> tuple[Features, Features]:
            return {"vec": encoded.texts["vec"][:3]}, {"vec": encoded.texts["vec"]}

    with pytest.raises(ValueError, match="the contrast texts returned 3 features, neither one for each of 16 images"):
        gradients(with_contrast(make=lambda _: Odd()), 1)


def test_a_loss_that_reads_what_nobody_makes_says_so() -> None:
    def loss(pairs: PairBlocks, positives: Any) -> Total:
        pairs.column("image_features.teacher")
        return sigmoid_loss(pairs, positives)

    with pytest.raises(ValueError, match=r"reads 'image_features\.teacher', which nothing provides"):
        gradients(replace(preset("siglip"), pair_loss=loss), 1)


def test_an_input_that_nobody_makes_is_named() -> None:
    some = batch(method="slip").split(2)[1].to("cpu")
    assert isinstance(some.inputs[VIEWS], Tensor)
    with pytest.raises(
        ValueError, match=r"reads the input 'crops', which nothing makes: this batch has 'simclr_views'"
    ):
        some.inputs["crops"]


def test_rows_and_columns_are_read_without_scoring() -> None:
    made, some = learner("siglip+mined"), batch(method="siglip+mined")
    inputs = made.pair_inputs(made.encode(some), some)
    columns = inputs.gathered()
    assert "image_features.teacher" not in columns  # until it is read
    read = columns["image_features.teacher"]
    torch.testing.assert_close(read, some.image_features["teacher"][some.image_of_text], rtol=0, atol=0)
    torch.testing.assert_close(columns["text_features.teacher"], some.text_features["teacher"], rtol=0, atol=0)


def test_only_what_a_loss_reads_reaches_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[str] = []
    gather = loss_inputs.gather_features
    monkeypatch.setattr(loss_inputs, "gather_features", lambda f: (gathered.extend(f), gather(f))[1])

    def run(method: str) -> set[str]:
        gathered.clear()
        over_threads(2, lambda: backward(learner(method), [batch(method="siglip+mined")]))
        return {name for name in gathered if "_features." in name}

    assert run("siglip") == set()
    assert run("siglip+mined") == {"image_features.teacher", "text_features.teacher"}


def test_every_column_gets_the_features_of_its_own_image() -> None:
    """With uneven ranks: the columns of rank 1 point at rows behind those of rank 0."""

    def work() -> Tensor:
        from kiloword.distributed.collectives import rank

        images, texts = ((2, [0, 1, 1]), (3, [0, 2]))[rank()]
        rows = {"position": torch.arange(images), "image_features.x": 10.0 * rank() + torch.arange(images)[:, None]}
        columns = {"position": torch.tensor(texts)}
        return PairInputs(rows, columns, {}, torch.tensor(texts)).gathered()["image_features.x"][:, 0]

    for read in over_threads(2, work):
        assert read.tolist() == [0, 1, 1, 10, 12]


def loader(inputs: dict[str, Input], workers: int = 0, **more: Any) -> Loader:
    source, model = open_source("scenes:train?n=32", 32), sizes()["debug"]
    tokenizer = Tokenizer.train([c for row in range(32) for c in source.record(row).captions], 400)
    order = Order(32, 8, 0)
    return Loader(source, order, DataConfig(), model.text, 32, tokenizer, inputs=inputs, workers=workers, **more)


def halves(example: Example, fetch: Fetch, draw: Any) -> list[str]:
    words = example.captions[0].split()
    return [" ".join(words[:2]), " ".join(words[2:])] if example.row % 2 else []


def test_inputs_are_made_of_examples_and_split_with_them() -> None:
    views = preset("slip").inputs[VIEWS]
    whole = next(loader({"halves": Input(halves), VIEWS: views}).batches())
    group, pixels = whole.inputs["halves"], whole.inputs[VIEWS]
    assert isinstance(group, TextGroup)
    assert isinstance(pixels, Tensor)
    assert pixels.shape == (8, 2, 3, 32, 32)
    assert pixels.dtype == torch.uint8
    assert (pixels[:, 0] != pixels[:, 1]).any()
    assert len(group.texts) == len(group.image_of_text)
    assert (group.image_of_text.bincount(minlength=8) % 2 == 0).all()
    parts = whole.split(4)
    lengths = [len(part.inputs["halves"].texts) for part in parts]  # type: ignore[union-attr]
    assert sum(lengths) == len(group.texts)
    ids = torch.cat([part.inputs["halves"].texts.ids for part in parts])  # type: ignore[union-attr]
    assert torch.equal(ids, group.texts.ids)
    rows = [part.inputs["halves"].image_of_text + 2 * n for n, part in enumerate(parts)]  # type: ignore[union-attr]
    assert torch.equal(torch.cat(rows), group.image_of_text)


def test_an_input_of_two_kinds_is_refused() -> None:
    def either(example: Example, fetch: Fetch, draw: Any) -> Tensor | list[str]:
        return torch.zeros(3) if example.row % 2 else ["half"]

    with pytest.raises(ValueError, match="'mixed' is a tensor for some images and texts for others"):
        next(loader({"mixed": Input(either)}).batches())


def test_inputs_do_not_depend_on_workers_and_ranks() -> None:
    views = {VIEWS: preset("slip").inputs[VIEWS]}
    whole = next(loader(views).batches())
    parts = [next(loader(views, workers=1, rank=rank, ranks=2).batches()) for rank in (0, 1)]
    assert torch.equal(whole.inputs[VIEWS], torch.cat([part.inputs[VIEWS] for part in parts]))  # type: ignore[arg-type]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


FOLLOWING = """

class Remembering(Texts):
    def __init__(self, config):
        super().__init__()
        self.register_buffer("mean", torch.zeros(config.image.width, 3, config.image.patch, config.image.patch))

def follow(learner, step):
    weight, mean = learner.model.image_tower.patches.weight.detach(), learner.contrasts["texts"].mean
    mean.copy_(weight.view_as(mean)) if step == 0 else mean.lerp_(weight.view_as(mean), 0.5)

def preset():
    from kiloword.methods.registry import preset as built_in
    return replace(built_in("siglip"), contrasts={"texts": (1.0, Remembering)}, after_step=(follow,))
"""


def test_state_of_after_step_is_saved_and_resumed(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (module / "outside_e.py").write_text(f"import torch\n{OUTSIDE}{FOLLOWING}")
    base = default_recipe("", "debug", ("scenes?n=64",))
    run = replace(base, method="outside_e:preset", batch=8, steps=4, data=replace(base.data, tokenizer_vocab=300))
    whole, cut = whole_and_cut(run, module, monkeypatch)
    assert whole["learner/contrasts.texts.mean"].any()
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


OUTSIDE = """
from dataclasses import dataclass, replace
from kiloword.config.settings import BaseSettings, setting
from kiloword.methods.method import Component
from kiloword.losses.pairs import sigmoid_loss
from kiloword.methods.method import annotated
from kiloword.model.heads import cosine_head
from torch import nn

@dataclass(frozen=True, kw_only=True)
class Settings(BaseSettings):
    weight: float = setting(1.0, "weight of the contrast", 0)

class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = cosine_head(5.0, bias=-1.0)

    def features(self, model, batch, encoded):
        return {"vec": encoded.texts["vec"]}, {"vec": encoded.texts["vec"]}

    def loss(self, pairs):
        return sigmoid_loss(pairs, annotated)

def apply(method, settings):
    return replace(method, contrasts={**method.contrasts, "texts": (settings.weight, lambda config: Texts())})

texts = Component("contrasts", "texts of an image are alike", Settings, apply)
number = 3
"""


def test_a_component_of_a_user_mixes_like_any(module: Path) -> None:
    (module / "outside_a.py").write_text(OUTSIDE)
    method = preset("llip+outside_a:texts", {"texts": {"weight": 0.5}})
    assert method.contrasts["texts"][0] == 0.5
    assert _without_gradient("llip+outside_a:texts") == []


@pytest.mark.slow
def test_a_component_of_a_user_is_verified(module: Path) -> None:
    (module / "outside_f.py").write_text(OUTSIDE)
    checks = {check.name: check for check in verify("siglip+outside_f:texts", ranks=(1,))}
    assert all(check.passed for check in checks.values())
    assert "texts alone: loss left after 20 steps" in checks


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("siglip+outside_b:number", "expected a kiloword.methods.method.Component"),
        ("siglip+outside_b:none", "cannot load component outside_b:none"),
        ("siglip+outside_b:texts+outside_b:texts", "two components named 'texts'"),
        ("siglip+nothing", "or your own module:name"),
    ],
)
def test_what_is_no_component_is_refused(module: Path, name: str, message: str) -> None:
    (module / "outside_b.py").write_text(OUTSIDE)
    with pytest.raises(ValueError, match=message):
        preset(name)


def test_a_built_in_method_does_not_vouch_for_a_strangers_component(module: Path) -> None:
    (module / "outside_c.py").write_text("raise SystemExit('the code of a stranger ran')")
    file = ModelFile(method="llip+outside_c:texts", settings={}, model=sizes()["debug"], size="debug")
    for trust in (Trust(), Trust(named="llip")):
        with pytest.raises(ValueError, match=r"code that its config\.json names"):
            method_of(file, "folder", trust)


def test_a_loss_of_the_wrong_sign_fails(module: Path) -> None:
    wrong = textwrap.dedent("""
        from kiloword.types import Total

        class Wrong(Texts):
            def loss(self, pairs):
                total = sigmoid_loss(pairs, annotated)
                return Total(-total.sum, total.count)

        def preset():
            from kiloword.methods.registry import preset as built_in
            return replace(built_in("siglip"), contrasts={"texts": (1.0, lambda config: Wrong())})
    """)
    (module / "outside_d.py").write_text(OUTSIDE + wrong)
    check = _alone("outside_d:preset", "texts")
    assert not check.passed
    assert "is negative: is its sign wrong?" in check.cause
    (module / "outside_flat.py").write_text((OUTSIDE + wrong).replace("-total.sum", "0 * total.sum + 5"))
    assert not _alone("outside_flat:preset", "texts").passed  # it does not fall


def test_inputs_by_global_randomness_fail(module: Path) -> None:
    odd = textwrap.dedent("""
        import random
        from kiloword.types import Input

        def halves(example, fetch, draw):
            return random.sample(example.captions[0].split(), 2)

        def preset():
            from kiloword.methods.registry import preset as built_in
            return replace(built_in("siglip"), inputs={"halves": Input(halves)})
    """)
    (module / "outside_g.py").write_text(OUTSIDE + odd)
    assert made_otherwise("outside_g:preset") > 0
    assert made_otherwise("slip") == 0


TEACHER = """
import torch
from kiloword.methods.method import follow
from kiloword.model.image import ImageTower

class Distilled(Texts):
    def __init__(self, config):
        super().__init__()
        self.teacher = ImageTower(config.image).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

def after(learner, step):
    contrast = learner.contrasts["texts"]
    follow(contrast.teacher, learner.model.image_tower, 0.9 if step else 0.0)
    contrast.seen += step

def preset():
    from kiloword.methods.registry import preset as built_in
    return replace(built_in("siglip"), contrasts={"texts": (1.0, Distilled)}, after_step=(after,))
"""


def test_a_teacher_follows_and_is_compared(module: Path) -> None:
    (module / "outside_h.py").write_text(OUTSIDE + TEACHER)
    made = learner("outside_h:preset")
    student, teacher = made.model.image_tower, made.contrasts["texts"].teacher
    assert isinstance(teacher, nn.Module)
    for name, weight in student.named_parameters():
        assert torch.equal(weight, teacher.get_parameter(name))
        weight.data += 1
    made.method.after_step[0](made, 1)
    for name, weight in student.named_parameters():
        torch.testing.assert_close(weight - teacher.get_parameter(name), torch.full_like(weight, 0.9))
    measured = verify_suite.gradients("outside_h:preset")
    assert float(measured["state:contrasts.texts.seen"]) == 1
    assert "state:contrasts.texts.teacher.patches.weight" in measured


@pytest.mark.slow
def test_a_teacher_follows_sharded_weights(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (module / "outside_i.py").write_text(OUTSIDE + TEACHER)
    monkeypatch.setenv("PYTHONPATH", f"{module}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert all(check.passed for check in verify("outside_i:preset", ranks=(1, 2)))


def test_a_parameter_that_only_a_contrast_has_learns() -> None:
    assert _without_gradient("slip") == []


def test_a_loss_that_rises_is_verified_where_it_has_a_weight() -> None:
    made = verify_suite.learner("siglip+self-distill")
    assert made.weights()["self_distill"] == 1
    rising = replace(made.method, terms={n: (Ramp(3.0, 0.0, 0.4), make) for n, (_, make) in made.method.terms.items()})
    made.method = rising
    assert made.weights()["self_distill"] == 3


def test_modules_state_the_rates_of_their_parameters() -> None:
    class Slow(TextContrast):
        def lr_factors(self) -> dict[str, float]:
            return {"head.bias": 0.1}

    made = learner_of(with_contrast(make=lambda _: Slow()))
    optimizer = Optimizer(made, FIELD, 10)
    rates = {
        optimizer.names[p]: g["base_lr"] for part in optimizer.parts for g in part.param_groups for p in g["params"]
    }
    assert rates["contrasts.texts.head.bias"] == pytest.approx(0.1 * rates["contrasts.texts.head.log_scale"])
