"""Answering questions: the term against a slow transcription, closed lists, fine-tuning, and `eval vqa`."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.api import Matcher, load
from kiloword.cli import main as cli
from kiloword.config.recipes import ModelConfig, Recipe, sizes
from kiloword.data.open import open_source
from kiloword.data.reading import captions_of
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.vqa import VqaOptions
from kiloword.generation.answerer import Answerer
from kiloword.generation.options import GenerationOptions
from kiloword.methods.coca.answering import fused
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.models.tensors import open_tensors
from kiloword.randomness import key
from kiloword.training.learner import Learner
from kiloword.training.log import read_metrics
from kiloword.training.loop import RunOptions, train
from kiloword.training.setup import resolve
from kiloword.types import BadSample, Batch, Record, Texts
from kiloword.verify import batch as verify_batch
from kiloword.verify import suite as verify

STEPS = 80
DATA = "scenes:train?task=vqa&objects=1"
QUIET = RunOptions(quiet=True)


def norm(x: Tensor, layer: torch.nn.LayerNorm) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, layer.eps)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of one text, head by head: [n, W], [m, W], [m, W]."""
    out = []
    for a, b, c in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
        scores = a @ b.T / math.sqrt(a.shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        out.append(scores.softmax(-1) @ c)
    return torch.cat(out, -1)


def own_block(x: Tensor, block: Any, causal: bool) -> Tensor:
    q, k, v = block.attention.qkv(norm(x, block.norm1)).chunk(3, -1)
    x = x + block.attention.out(attend(q, k, v, block.attention.heads, causal))
    return x + block.mlp(norm(x, block.norm2))


def cross_block(x: Tensor, block: Any, memory: Tensor) -> Tensor:
    k, v = block.attention.kv(norm(memory, block.norm_memory)).chunk(2, -1)
    q = block.attention.q(norm(x, block.norm1))
    x = x + block.attention.out(attend(q, k, v, block.attention.heads, False))
    return x + block.mlp(norm(x, block.norm2))


def literal_loss(model: Model, batch: Batch, sees_all: bool) -> Tensor:
    """Mean over all next tokens of all answers, one text at a time, without packing."""
    assert batch.questions is not None
    tower, decoder, fuser = model.text_tower, model.more["text_decoder"], model.more["fuser"]
    images = model.image_tower(model.normalise(batch.images))
    losses = []
    for t, of in enumerate(batch.image_of_text.tolist()):
        question = batch.questions.cut(of, of + 1).ids
        x = tower.tokens[question] + tower.positions[: len(question)]
        for block, cross in zip(tower.blocks, fuser.blocks, strict=True):
            x = cross_block(own_block(x, block, not sees_all), cross, images[of])
        memory = norm(x, tower.norm)
        memory = memory if fuser.bridge is None else fuser.bridge(memory)
        answer = batch.texts.cut(t, t + 1).ids
        answer = answer[: len(answer) - len(model.config.text.extra_tokens)]
        y = tower.tokens[answer] + tower.positions[: len(answer)]
        for block in tower.blocks:
            y = own_block(y, block, True)
        y = norm(y, tower.norm)
        for layer in decoder.layers:
            y = cross_block(own_block(y, layer.own, True), layer.cross, memory)
        logits = norm(y, decoder.norm) @ decoder.table(tower.tokens).T
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], answer[1:], reduction="none"))
    return torch.cat(losses).mean()


def learner_of(width: int = 32, **own: Any) -> Learner:
    config = verify_batch.config()
    config = replace(config, image=replace(config.image, width=width))
    method = preset("vqa", own)
    return Learner(build(config, method, seed=1), method).double()


@pytest.mark.parametrize(("width", "sees"), [(32, "before"), (48, "before"), (32, "all")])
def test_the_loss_is_the_transcription(width: int, sees: str) -> None:
    learner, batch = learner_of(width, question_sees=sees), verify_batch.batch(method="vqa")
    found = learner(batch, learner.counts([batch]))["answer"]
    assert (learner.model.more["fuser"].bridge is None) == (width == 32)
    torch.testing.assert_close(found, literal_loss(learner.model, batch, sees == "all"), rtol=0, atol=1e-10)


def test_images_and_questions_both_count() -> None:
    learner, batch = learner_of(), verify_batch.batch(method="vqa")
    assert batch.questions is not None
    ids = batch.questions.ids.clone()
    ids[0] = 7
    others = replace(batch, images=batch.images.flip(0)), replace(batch, questions=replace(batch.questions, ids=ids))
    losses = [learner(b, learner.counts([b]))["answer"].item() for b in (batch, *others)]
    assert min(abs(losses[0] - other) for other in losses[1:]) > 1e-6


def test_every_parameter_learns_and_the_head_stays() -> None:
    assert verify._without_gradient("vqa") == []
    learner = learner_of()
    assert not any(p.requires_grad for p in learner.model.head.parameters())


@pytest.mark.slow
def test_conformity() -> None:
    for check in verify.verify("vqa", ranks=(1, 2)):
        assert check.passed, check


@pytest.mark.parametrize(
    ("own", "reason"),
    [({"smoothing": 1.0}, "smoothing is 1.0"), ({"decoder_depth": -1}, "decoder_depth is -1"), ({"sees": 1}, "sees")],
)
def test_settings_out_of_range(own: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        preset("vqa", own)


def test_a_bidirectional_text_tower_is_refused() -> None:
    config = verify_batch.config()
    with pytest.raises(ValueError, match="predicted word by word"):
        build(replace(config, text=replace(config.text, causal=False)), preset("vqa"))


WORDS = ["yes", "no", "dark blue", "dark green", "dark", "a b c", "two"]
TOKENIZER = Tokenizer.train([*WORDS, "what colour is the star?", "how many are there?", "is it?"] * 3, 320)


def config_of(tokenizer: Tokenizer) -> ModelConfig:
    config = sizes()["debug"]
    text = replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    return replace(config, text=text, image=replace(config.image, init_std=0.3))


def answerer_of(seed: int) -> Answerer:
    """With a louder output, so that untrained models are of decided opinions."""
    model = build(config_of(TOKENIZER), preset("vqa"), seed)
    with torch.no_grad():
        model.more["text_decoder"].output.mul_(6)
    return Answerer(model, TOKENIZER)


def asked(n: int = 4) -> tuple[Tensor, list[str]]:
    images = torch.stack([verify_batch._noise(row, (3, 32, 32)) for row in range(n)])
    return images, (["what colour is the star?", "how many are there?", "is it?", "what?"] * n)[:n]


@given(
    chosen=st.lists(st.sampled_from(WORDS), min_size=1, max_size=5),
    seed=st.integers(0, 3),
    beams=st.integers(1, 6),
    penalty=st.sampled_from([0.0, 1.0, -1.0]),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_constrained_answers_are_of_the_list(chosen: list[str], seed: int, beams: int, penalty: float) -> None:
    answerer = answerer_of(seed)
    listed, how = answerer.close(chosen), GenerationOptions(beams=beams, length_penalty=penalty)
    memory = answerer.memory(*asked())
    assert set(answerer.answer(memory, how, listed)) <= set(chosen)
    assert set(answerer.rank(memory, listed, penalty)) <= set(chosen)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_many_beams_find_what_ranking_finds(penalty: float) -> None:
    for seed in range(3):
        answerer = answerer_of(seed)
        listed, memory = answerer.close(WORDS), answerer.memory(*asked())
        how = GenerationOptions(beams=12, length_penalty=penalty, exact=True)
        assert answerer.answer(memory, how, listed) == answerer.rank(memory, listed, penalty)


def test_likelihoods_are_those_of_single_questions_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answerer = answerer_of(1)
    images, questions = asked()
    listed = answerer.close(WORDS)
    memory = answerer.memory(images, questions)
    with torch.no_grad():
        together = answerer.log_likelihoods(memory, listed.texts)
        monkeypatch.setattr("kiloword.generation.answerer.ANSWERS", 2)
        monkeypatch.setattr("kiloword.generation.answerer.TOKENS", 1)  # fewer than two answers have
        apart = answerer.log_likelihoods(memory, listed.texts)
    torch.testing.assert_close(apart, together)
    every = together.tolist()
    config = answerer.model.config.text
    for i, question in enumerate(questions):
        for a, answer in enumerate(WORDS):
            batch = Batch(
                images=images[i : i + 1],
                texts=TOKENIZER.encode([answer], config),
                image_of_text=torch.zeros(1, dtype=torch.int64),
                seeds=torch.zeros(1, dtype=torch.int64),
                position=torch.zeros(1, dtype=torch.int64),
                composed=torch.zeros(1, dtype=torch.bool),
                questions=TOKENIZER.encode([question], config),
            )
            one = literal_loss(answerer.model, batch, False) * (len(batch.texts.ids) - 2)  # start, class token
            assert -one.item() == pytest.approx(every[i][a], abs=1e-4)


def test_answers_do_not_depend_on_what_stands_beside_them() -> None:
    answerer = answerer_of(2)
    images, questions = asked()
    listed, how = answerer.close(WORDS), GenerationOptions(beams=3)
    together = answerer.answer(answerer.memory(images, questions), how, listed)
    alone = [answerer.answer(answerer.memory(images[i : i + 1], questions[i : i + 1]), how, listed) for i in range(4)]
    assert together == [answers[0] for answers in alone]


@pytest.mark.parametrize("way", ["rank", "list"])
def test_close_answers_are_distinguished_under_autocast(way: str) -> None:
    """As in a validation on CUDA: logits that differ by a thousandth are equal in bf16, and one answer always wins."""
    answerer = answerer_of(1)
    listed, (images, questions) = answerer.close(["yes", "no"]), asked()
    table = answerer.model.more["text_decoder"].output
    for (best, _), right in listed.by_ids.items():
        with torch.no_grad():
            for ids in listed.by_ids:
                answerer.model.text_tower.tokens[ids[0]] = 0.1  # what follows is alike
                table[ids[0]] = table[205].bfloat16()  # the likeliest of most questions
            table[best] *= 1.001
        with torch.autocast("cpu", torch.bfloat16):
            memory = answerer.memory(images, questions)
            how = GenerationOptions()
            found = answerer.rank(memory, listed) if way == "rank" else answerer.answer(memory, how, listed)
        assert found == [right] * 4


def test_lists_that_cannot_be() -> None:
    answerer = answerer_of(0)
    for answers, reason in (([], "no answers to choose from"), ([" "], "no word"), (["a b " * 40], "too many words")):
        with pytest.raises(ValueError, match=reason):
            answerer.close(answers)
    assert list(answerer.close(["Yes", "yes", "no"]).by_ids.values()) == ["Yes", "no"]  # the same tokens


def test_a_model_that_answers_nothing_is_refused() -> None:
    model = build(config_of(TOKENIZER), preset("coca"))
    with pytest.raises(ValueError, match="cannot answer questions: train vqa"):
        Answerer(model, TOKENIZER)
    with pytest.raises(ValueError, match="cannot answer questions: train vqa"):
        fused(model, Texts.pack([[0, 1]]), torch.zeros(1, 5, 32))


COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}
GREYS = {"white": (250, 250, 250), "grey": (128, 128, 128), "black": (5, 5, 5)}


class Halves:
    """Images of a coloured and a grey half: who sees no image, or hears no question, cannot tell what is asked."""

    name, fingerprint, natural = "halves", "halves", False
    answers: tuple[str, ...] | None = (*COLOURS, *GREYS)

    def __len__(self) -> int:
        return 256

    def record(self, row: int) -> Record:
        colour, grey = list(COLOURS)[key(row, "colour") % 3], list(GREYS)[key(row, "grey") % 3]
        pixels = np.zeros((32, 32, 3), np.uint8)
        pixels[:, :16], pixels[:, 16:] = COLOURS[colour], GREYS[grey]
        asked = {"what colour is it?": colour, "how bright is it?": grey}
        question = list(asked)[key(row, "asked") % 2]
        info = {"question": question, "answers": [asked[question]], "question_type": "colour"}
        return Record(str(row), pixels, info["answers"], info=info)

    def majority(self) -> dict[str | None, str]:
        return {None: "red"}


def recipe_of(method: str, steps: int, data: str = DATA, **more: Any) -> Recipe:
    return replace(default_recipe(method, "debug", (data,)), steps=steps, batch=32, **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vqa")
    return train(recipe_of("vqa", STEPS), out, Halves(), options=QUIET)


@pytest.mark.slow
def test_a_little_training_answers_what_needs_image_and_question(trained: Path) -> None:
    found = evaluate(load(trained), "vqa", Halves())
    assert found["accuracy"] == found["accuracy/question/colour"] > 0.9
    assert found["majority_accuracy"] < 0.5
    assert (found["questions"], found["answers"], found["outside"]) == (256, 6, 0)


@pytest.mark.slow
def test_on_scenes_some_training_beats_the_majority(tmp_path: Path) -> None:
    recipe = recipe_of("vqa", 300)
    model = replace(recipe.model, image=replace(recipe.model.image, patch=8))
    folder = train(replace(recipe, model=model, batch=64), tmp_path, options=QUIET)
    found = evaluate(load(folder), "vqa", "scenes:test?task=vqa&objects=1")
    assert found["outside"] == 0
    assert found["accuracy"] > found["majority_accuracy"] + 0.05
    assert found["accuracy/question/background"] > 0.9 > found["majority_accuracy/question/background"]
    assert found["majority_accuracy/question/count"] == found["majority_accuracy/answer/number"]


@pytest.mark.slow
@pytest.mark.parametrize("decode", ["rank", "free"])
def test_other_ways_to_answer(trained: Path, decode: Any) -> None:
    matcher = load(trained)
    listed, other = (evaluate(matcher, "vqa", Halves(), vqa=VqaOptions(decode=way)) for way in ("list", decode))
    assert other["accuracy"] == pytest.approx(listed["accuracy"], abs=0.05)  # it has learned to stay within the list
    assert other["outside"] <= (0 if decode == "rank" else 0.05)


@pytest.mark.slow
def test_closed_lists_from_files_and_data(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher, data = load(trained), Halves()
    (tmp_path / "answers.txt").write_text("yes\nno\n\n")
    found = evaluate(matcher, "vqa", data, vqa=VqaOptions(answers=tmp_path / "answers.txt"))
    assert (found["answers"], found["outside"]) == (2, 0)
    found = evaluate(matcher, "vqa", data, train="scenes:train?task=vqa&objects=1&n=200", vqa=VqaOptions(most=3))
    assert (found["answers"], found["outside"]) == (3, 0)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="is empty: expected an answer a line"):
        evaluate(matcher, "vqa", data, vqa=VqaOptions(answers=tmp_path / "empty.txt"))
    for options in (VqaOptions(decode="free"), VqaOptions()):
        with pytest.raises(ValueError, match="has no questions"):
            evaluate(matcher, "vqa", "scenes:test?n=4", vqa=options)
    with pytest.raises(ValueError, match=r"scenes:train\?n=4 has no questions"):
        evaluate(matcher, "vqa", data, train="scenes:train?n=4")
    open_ended = Halves()
    open_ended.answers = None
    with pytest.raises(ValueError, match="no closed list"):
        evaluate(matcher, "vqa", open_ended)
    assert "answers" not in evaluate(matcher, "vqa", open_ended, vqa=VqaOptions(decode="free"))
    monkeypatch.setattr(Halves, "record", broken)
    with pytest.raises(ValueError, match="none of its 256 rows is a usable image"):
        evaluate(matcher, "vqa", Halves())


@pytest.mark.slow
def test_on_the_command_line(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "vqa", str(trained), "--data", "scenes:test?task=vqa&n=8", "--vqa.decode", "rank", "--json"]
    cli.main([*command, str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["questions"], found["answers"], found["outside"]) == (8, 42, 0)
    assert re.search(r"^majority_accuracy +0\.", capsys.readouterr().out, re.MULTILINE)


def broken(halves: Halves, row: int) -> Record:
    raise BadSample("truncated image")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (VqaOptions(beams=0), "--vqa.beams is 0"),
        (VqaOptions(most=0), "--vqa.most is 0"),
        (VqaOptions(length_penalty=math.nan), "--vqa.length-penalty is nan"),
        (VqaOptions(decode="rank", beams=2), "not read by --vqa.decode rank"),
    ],
)
def test_options_that_make_no_sense(options: VqaOptions, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        options.check()


def test_validation_is_of_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of("vqa", 1, DATA + "&n=64")
    data = replace(recipe.data, val=("scenes:val?task=vqa&objects=1&n=20",))
    train(replace(recipe, data=data), tmp_path, options=RunOptions())
    assert "val at step 1: accuracy 0." in capsys.readouterr().err
    row = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "val/accuracy" in row]
    assert [r["step"] for r in row] == [1]


def test_transforms_and_questions_do_not_mix() -> None:
    with pytest.raises(ValueError, match=r"it cannot be combined with transforms"):
        preset("vqa+compose")


def test_fine_tuning_brings_towers_and_decoder(tmp_path: Path) -> None:
    source = open_source(DATA + "&n=64", 32)
    first = train(recipe_of("coca", 1, "scenes:train?objects=1&n=64"), tmp_path / "coca", options=QUIET)
    before = open_tensors(first / "model.safetensors")
    recipe = recipe_of("vqa", 1, DATA + "&n=64", init=str(first))
    resolved = resolve(recipe, source, tmp_path / "none", QUIET, "cpu")
    from kiloword.training.setup import make_learner

    learner, printed = make_learner(resolved.recipe, preset("vqa"))
    state = learner.model.state_dict()
    for name in state:
        if name in before:
            assert torch.equal(state[name], before[name]), name
    new = {name.split(".")[1] for name in state if name not in before}
    assert new == {"fuser"}
    assert "left over: none" in printed
    assert set(captions_of(source)) >= {source.record(0).info["question"]}
    assert Matcher(learner.model, resolved.tokenizer)
