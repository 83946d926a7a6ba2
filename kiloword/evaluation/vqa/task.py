"""Visual question answering: how right a model's answers are. `kiloword eval vqa MODEL`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kiloword.data.open import open_source
from kiloword.data.reading import EvalBatch, captions_at
from kiloword.data.sample import ANSWERS, QUESTION, check_regular, question_in
from kiloword.data.source import check_asks
from kiloword.distributed.sharing import alone, is_first, lockstep
from kiloword.evaluation.features import per_batch
from kiloword.evaluation.results import check_results, write_results
from kiloword.evaluation.task import Inputs, Values
from kiloword.evaluation.vqa import VqaOptions, VqaTaskOptions
from kiloword.evaluation.vqa.metric import JudgedAnswer, accuracy, means
from kiloword.generation.options import GenerationOptions
from kiloword.types import BadSample, Source

if TYPE_CHECKING:
    from kiloword.generation.answerer import Answerer, AnswerList

QUESTION_ID = "question_id"

Guesses = Mapping[str | None, str]
"""The most frequent answer by question type, and over all of them under None."""


def run(inputs: Inputs, task_options: VqaTaskOptions) -> Values:
    """VQA accuracy (see `vqa_metric.accuracy`) over all questions, by question type and by answer type.

    Yields: "accuracy", "accuracy/question/TYPE", "accuracy/answer/TYPE"; where the training answers are known, the same
    as "majority_..." of who always gives the most frequent one (to this type of question, on scenes); "questions";
    and, where there is a list, its length as "answers" and the share of answers outside it as "outside". With
    `results`, questions without answers are answered, too, and not scored.
    Errors: ValueError for a model that answers no questions, data that asks none, a list that is missing.
    """
    from kiloword.generation.answerer import Answerer

    matcher, options, results = inputs.matcher, task_options.vqa, task_options.results
    options.check()
    if results is None:
        _check_answered(inputs.source)
    else:
        check_results(results, inputs.source, QUESTION_ID)
    answerer = Answerer(matcher.model, matcher.tokenizer)
    answers, guesses = _known(inputs.source, task_options.train, options)
    listed = None if answers is None else answerer.close(answers)

    def ask(part: EvalBatch) -> list[_Answered]:
        made = _answer(answerer, part.images, [info["question"] for info in part.infos], listed, options)
        return list(map(_Answered, made, part.infos))

    def asks(part: EvalBatch) -> list[bool]:
        return [(question_in(info) if results is None else info.get(QUESTION)) is not None for info in part.infos]

    with alone() if lockstep() else nullcontext():  # of a sharded model, which is called as often as answers need
        reason = "no question with an answer" if results is None else "no question"
        parts = per_batch(inputs, ask, asks, reason, captions=results is None)
        answered = [one for part in parts for one in part]
    if results is not None and is_first():
        write_results(results, inputs.source, QUESTION_ID, "answer", ((one.info, one.answer) for one in answered))
    scored = [one for one in answered if ANSWERS in one.info]
    if scored:
        yield from means(one.judged(one.answer) for one in scored)
    if scored and guesses:
        frequent = (one.judged(guesses.get(one.info.get("question_type"), guesses[None])) for one in scored)
        yield from ((f"majority_{name}", value) for name, value in means(frequent))
    yield "questions", float(len(answered))
    if answers is not None:
        yield "answers", float(len(answers))
        inside = set(answers)
        yield "outside", sum(one.answer not in inside for one in answered) / len(answered)


def _check_answered(source: Source) -> None:
    """Raises: ValueError for data that asks no questions, and for test questions, which have no answers."""
    if hasattr(source, "info"):
        with suppress(BadSample):
            info = source.info(0)
            if info.get(QUESTION) is not None and ANSWERS not in info:
                raise ValueError(
                    f"{source.name} has questions without answers, which cannot be scored: write the model's answers "
                    "with --results FILE, or name the file of answers with ?annotations=FILE."
                )
    check_asks(source)


@dataclass(frozen=True)
class _Answered:
    """An answer of the model, and what the data has about the question."""

    answer: str
    info: Mapping[str, Any]

    def judged(self, answer: str) -> JudgedAnswer:
        """How right an answer to this question is."""
        kinds = (self.info.get("question_type"), self.info.get("answer_type"))
        return JudgedAnswer(accuracy(answer, self.info[ANSWERS]), *kinds)


def _known(source: Source, train: Source | str | None, options: VqaOptions) -> tuple[Sequence[str] | None, Guesses]:
    """The closed list and the most frequent answers. Raises: ValueError when a list is needed and there is none."""
    if isinstance(train, str):
        train = open_source(train)
    counted = _counted(train, options.most) if train is not None else None
    majority = getattr(source, "majority", None)
    guesses: Guesses = majority() if callable(majority) else {None: counted[0]} if counted else {}
    if options.answers is not None:
        return _lines(options.answers), guesses
    answers = counted or getattr(source, "answers", None)
    if answers is None and options.decode != "free":
        raise ValueError(
            f"{source.name} has no closed list of answers: name the data that the model was trained on with --train, "
            "or a file with an answer a line with --vqa.answers; --vqa.decode free needs none."
        )
    return answers, guesses


def _counted(train: Source, most: int) -> list[str]:
    """The most frequent answers of a data set, of equally frequent ones by the alphabet.

    Raises: ValueError for none, and for data that asks no questions: its captions are no answers.
    """
    check_asks(train)
    counts: Counter[str] = Counter()
    for row in range(len(train)):
        try:
            counts.update(captions_at(train, row))
        except BadSample:
            continue
    if not counts:
        raise ValueError(f"{train.name} has no answers: expected `answers` beside its questions.")
    return sorted(counts, key=lambda answer: (-counts[answer], answer))[:most]


def _lines(path: Path) -> list[str]:
    check_regular(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8: expected an answer a line.") from None
    answers = [line.strip() for line in lines if line.strip()]
    if not answers:
        raise ValueError(f"{path} is empty: expected an answer a line.")
    return answers


def _answer(
    answerer: Answerer, images: Tensor, questions: list[str], listed: AnswerList | None, options: VqaOptions
) -> list[str]:
    memory = answerer.memory(images, questions)
    if options.decode == "rank":
        assert listed is not None, "a list was asked for"
        return answerer.rank(memory, listed, options.length_penalty)
    how = GenerationOptions(
        method="beam", beams=options.beams, length_penalty=options.length_penalty, exact=True, shortest=1
    )
    return answerer.answer(memory, how, listed if options.decode == "list" else None)
