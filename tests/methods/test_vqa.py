"""Answering questions: the term against a slow transcription, closed lists, fine-tuning, and `eval vqa`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kiloword.api import Matcher, load
from kiloword.config.recipes import Recipe, sizes
from kiloword.data.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.tasks import VqaOptions
from kiloword.generation.captioner import Answerer
from kiloword.generation.options import GenerationOptions
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.tensors import open_tensors
from kiloword.randomness import key
from kiloword.training.loop import RunOptions, train
from kiloword.training.setup import make_learner, resolve
from kiloword.types import BadSample, Batch, Record
from kiloword.verify.batch import batch as small_batch
from literal import cross_block, norm, self_block, text_tokens
from parts import learner, losses, size

DATA = "scenes:train?task=vqa&objects=1"
QUIET = RunOptions(quiet=True)


def literal_loss(model: Any, batch: Batch, sees_all: bool) -> Tensor:
    """Mean over all next tokens of all answers, one text at a time, without packing."""
    assert batch.questions is not None
    tower, decoder, fuser = model.text_tower, model.more["text_decoder"], model.more["fuser"]
    images, found = model.image_tower(model.normalise(batch.images)), []
    for t, of in enumerate(batch.image_of_text.tolist()):
        question = batch.questions.cut(of, of + 1).ids
        x = tower.tokens[question] + tower.positions[: len(question)]
        for block, cross in zip(tower.blocks, fuser.blocks, strict=True):
            x = cross_block(self_block(x, block, not sees_all), images[of], cross)
        memory = norm(x, tower.norm)
        memory = memory if fuser.bridge is None else fuser.bridge(memory)
        answer = batch.texts.cut(t, t + 1).ids
        answer = answer[: len(answer) - len(model.config.text.extra_tokens)]
        y = text_tokens(answer.tolist(), model)
        for layer in decoder.layers:
            y = cross_block(self_block(y, layer.own, True), memory, layer.cross)
        logits = norm(y, decoder.norm) @ decoder.table(tower.tokens).T
        found.append(torch.nn.functional.cross_entropy(logits[:-1], answer[1:], reduction="none"))
    return torch.cat(found).mean()


@pytest.mark.parametrize(("width", "sees"), [(32, "before"), (48, "before"), (32, "all")])
def test_the_loss_is_the_transcription(width: int, sees: str) -> None:
    made, some = learner("vqa", {"question_sees": sees}, size(image__width=width)), small_batch(method="vqa")
    assert (made.model.more["fuser"].bridge is None) == (width == 32)
    expected = literal_loss(made.model, some, sees == "all")
    torch.testing.assert_close(losses(made, some)["answer"], expected, rtol=0, atol=1e-10)
    assert not any(p.requires_grad for p in made.model.head.parameters())


WORDS = ["yes", "no", "dark blue", "dark green", "dark", "a b c", "two"]
TOKENIZER = Tokenizer.train([*WORDS, "what colour is the star?", "how many are there?", "is it?"] * 3, 320)


def answerer_of(seed: int, method: str = "vqa") -> Answerer:
    """With a louder output, so that untrained models are of decided opinions."""
    config = sizes()["debug"]
    text = replace(config.text, vocab=TOKENIZER.vocab, special=TOKENIZER.roles.ids())
    model: Any = build(replace(config, text=text, image=replace(config.image, init_std=0.3)), preset(method), seed)
    model.more["text_decoder"].output.data.mul_(6)
    return Answerer(model, TOKENIZER)


IMAGES, QUESTIONS = small_batch(end=4).images, ["what colour is the star?", "how many are there?", "is it?", "what?"]


@pytest.mark.parametrize(("seed", "penalty"), [(0, 0.0), (1, 1.0), (2, -1.0)])
def test_many_beams_find_the_likeliest_answer_of_a_list(seed: int, penalty: float) -> None:
    """By the loss of each question with each answer; also alone."""
    answerer = answerer_of(seed)
    config, none = answerer.model.config.text, torch.zeros(1, dtype=torch.int64)
    how = GenerationOptions(beams=12, length_penalty=penalty, exact=True)
    listed = answerer.close(WORDS)
    together = answerer.answer(IMAGES, QUESTIONS, how, listed)
    for i, question in enumerate(QUESTIONS):
        asked, image, scores = TOKENIZER.encode([question], config), IMAGES[i : i + 1], {}
        for answer in WORDS:
            texts = TOKENIZER.encode([answer], config)
            one = Batch(image, texts, none, seeds=none, position=none, composed=none > 0, questions=asked)
            tokens = len(texts.ids) - 2  # without start and class token
            scores[answer] = -literal_loss(answerer.model, one, False).item() * tokens / tokens**penalty
        assert together[i] == max(scores, key=lambda answer: scores[answer])
        assert answerer.answer(image, [question], how, listed) == [together[i]]


def test_close_answers_are_distinguished_under_autocast() -> None:
    """As in a validation on CUDA: logits that differ by a thousandth are equal in bf16, and one answer always wins."""
    answerer: Any = answerer_of(1)
    listed = answerer.close(["yes", "no"])
    table = answerer.model.more["text_decoder"].output
    for (best, _), right in listed.items():
        with torch.no_grad():
            for ids in listed:
                answerer.model.text_tower.tokens[ids[0]] = 0.1  # what follows is alike
                table[ids[0]] = table[205].bfloat16()  # the likeliest of most questions
            table[best] *= 1.001
        with torch.autocast("cpu", torch.bfloat16):
            found = answerer.answer(IMAGES, QUESTIONS, GenerationOptions(), listed)
        assert found == [right] * 4


def test_lists_and_models_that_cannot_be() -> None:
    answerer = answerer_of(0)
    for answers, reason in (([], "no answers"), ([" "], "no word"), (["a b " * 40], "too many words")):
        with pytest.raises(ValueError, match=reason):
            answerer.close(answers)
    assert list(answerer.close(["Yes", "yes", "no"]).values()) == ["Yes", "no"]  # the same tokens
    with pytest.raises(ValueError, match="train vqa"):
        answerer_of(0, "coca")


COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}
GREYS = {"white": (250, 250, 250), "grey": (128, 128, 128), "black": (5, 5, 5)}


class Halves:
    """Images of a coloured and a grey half: who sees no image, or hears no question, cannot tell what is asked."""

    name, fingerprint, natural = "halves", "halves", False

    def __init__(self, answers: tuple[str, ...] | None = (*COLOURS, *GREYS), broken: bool = False) -> None:
        self.answers, self.broken = answers, broken

    def __len__(self) -> int:
        return 256

    def record(self, row: int) -> Record:
        if self.broken:
            raise BadSample("truncated image")
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


@pytest.mark.slow
def test_a_little_training_answers_what_needs_image_and_question(tmp_path: Path) -> None:
    matcher = load(train(recipe_of("vqa", 80), tmp_path, Halves(), options=QUIET))
    for decode, outside in (("list", 0.0), ("free", 0.05)):
        found = evaluate(matcher, "vqa", Halves(), vqa=VqaOptions(decode=decode))  # type: ignore[arg-type]
        assert found["accuracy"] == found["accuracy/question/colour"] > 0.9
        assert found["majority_accuracy"] < 0.5
        assert found["questions"] == 256
        assert found["outside"] <= outside
        assert found.get("answers", 6) == 6


def test_closed_lists_from_files_and_data(tmp_path: Path) -> None:
    matcher, data = Matcher(answerer_of(0).model, TOKENIZER), Halves()
    scenes = "scenes:train?task=vqa&objects=1&n=200"
    for name, text in (("answers", "yes\nno\n\n"), ("empty", "\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    found = evaluate(matcher, "vqa", data, vqa=VqaOptions(answers=tmp_path / "answers.txt"))
    assert (found["answers"], found["outside"]) == (2, 0)
    found = evaluate(matcher, "vqa", data, train=scenes, vqa=VqaOptions(most=3))
    assert (found["answers"], found["outside"]) == (3, 0)
    assert "answers" not in evaluate(matcher, "vqa", Halves(None), vqa=VqaOptions(decode="free"))
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (data, {"vqa": VqaOptions(answers=tmp_path / "empty.txt")}, "empty"),
        ("scenes:test?n=4", {"vqa": VqaOptions(decode="free")}, "no questions"),
        ("scenes:test?n=4", {}, "no questions"),
        (data, {"train": "scenes:train?n=4"}, "no questions"),
        (Halves(None), {}, "no list of answers"),
        (Halves(broken=True), {}, "none of its 256 rows"),
    ]
    for source, options, word in wrong:
        with pytest.raises(ValueError, match=word):
            evaluate(matcher, "vqa", source, **options)


def test_fine_tuning_brings_towers_and_decoder(tmp_path: Path) -> None:
    first = train(recipe_of("coca", 1, "scenes:train?objects=1&n=64"), tmp_path / "coca", options=QUIET)
    before = open_tensors(first / "model.safetensors")
    recipe = recipe_of("vqa", 1, DATA + "&n=64", init=str(first))
    resolved = resolve(recipe, open_source(DATA + "&n=64", 32), tmp_path / "none", QUIET, "cpu")
    made, _ = make_learner(resolved.recipe, preset("vqa"))
    state = made.model.state_dict()
    assert before.keys() <= state.keys()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert {name.split(".")[1] for name in state.keys() - before.keys()} == {"fuser"}
    assert Matcher(made.model, resolved.tokenizer)
