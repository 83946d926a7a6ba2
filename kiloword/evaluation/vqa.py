"""The task `vqa`: answers to questions about images, by the official evaluator's accuracy (arXiv:1505.00468)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kiloword.data.open import open_source
from kiloword.data.reading import EvalBatch, captions_at
from kiloword.data.sample import ANSWERS, QUESTION, question_in
from kiloword.data.source import check_asks, info_of
from kiloword.distributed.sharing import is_first
from kiloword.evaluation.features import per_batch
from kiloword.evaluation.results import check_results, write_results
from kiloword.evaluation.task import Findings, Inputs
from kiloword.evaluation.tasks import VqaOptions, VqaTaskOptions
from kiloword.evaluation.zeroshot import grouped
from kiloword.generation.captioner import Answerer
from kiloword.generation.options import GenerationOptions
from kiloword.types import BadSample, Source

QUESTION_ID = "question_id"
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
AGREE = 3  # number of annotators with the same answer that make it right
MOST_PERIODS = 32  # the evaluator hands its flag for Unicode over as this limit
_WORDS = "zero one two three four five six seven eight nine ten"
NUMBERS = {"none": "0", **{word: str(n) for n, word in enumerate(_WORDS.split())}}
ARTICLES = ("a", "an", "the")
# The evaluator writes "(?!<=\d)" before this, which was meant to spare the period of "3." and never does.
_PERIOD = re.compile(r"\.(?!\d)")
_COMMA = re.compile(r"\d,\d")
_WHOLE = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't needn't not've o'clock
oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd
someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's
they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's
where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
y'all y'all'd've y'all'll you'd you'd've you'll you're you've
"""
# words that lack one apostrophe, and the words; and one that is the wrong way round in the evaluator's table
CONTRACTIONS = {w[:k] + w[k + 1 :]: w for w in _WHOLE.split() for k, letter in enumerate(w) if letter == "'"}
CONTRACTIONS["somebody'd"] = "somebodyd"


def run(inputs: Inputs, task_options: VqaTaskOptions) -> Findings:
    """VQA accuracy (see `accuracy`) over all questions, by question type and by answer type; "majority_...", the
    accuracy of the most frequent training answer; "questions"; "answers", the length of the list; the share "outside".

    With `results`, questions without answers are answered, too, and not scored.
    Errors: ValueError for a model that answers no questions, data that asks none, a list that is missing.
    """
    matcher, source, options, results = inputs.matcher, inputs.source, task_options.vqa, task_options.results
    if results is None:
        with suppress(BadSample):
            if (info := info_of(source, 0)).get(QUESTION) is not None and ANSWERS not in info:
                raise ValueError(f"{source.name} has no answers: add --results FILE to write the model's answers.")
        check_asks(source)
    else:
        check_results(source, QUESTION_ID)
    answerer = Answerer(matcher.model, matcher.tokenizer)
    answers, frequent = _known(source, task_options.train, options)
    listed = None if answers is None else answerer.close(answers)
    how = GenerationOptions(beams=options.beams, length_penalty=options.length_penalty, exact=True)

    def ask(part: EvalBatch) -> list[tuple[str, Mapping[str, Any]]]:
        questions = [info[QUESTION] for info in part.infos]
        said = answerer.answer(part.images, questions, how, listed if options.decode == "list" else None)
        return list(zip(said, part.infos, strict=True))

    def asks(part: EvalBatch) -> list[bool]:
        return [(question_in(info) if results is None else info.get(QUESTION)) is not None for info in part.infos]

    reason = "no question with an answer" if results is None else "no question"
    parts = per_batch(inputs, ask, asks, reason, captions=results is None)
    answered = [pair for part in parts for pair in part]
    if results is not None and is_first():
        write_results(results, source, QUESTION_ID, "answer", ((info, answer) for answer, info in answered))
    scored = [(answer, info) for answer, info in answered if ANSWERS in info]
    if scored:
        yield from means(scored)
    if scored and frequent:
        usual = [(frequent.get(info.get("question_type"), frequent[None]), info) for _, info in scored]
        yield from ((f"majority_{name}", value) for name, value in means(usual))
    yield "questions", float(len(answered))
    if answers is not None:
        yield "answers", float(len(answers))
        inside = set(answers)
        yield "outside", sum(answer not in inside for answer, _ in answered) / len(answered)


def _known(
    source: Source, train: Source | str | None, options: VqaOptions
) -> tuple[Sequence[str] | None, Mapping[str | None, str]]:
    """The closed list, and the most frequent answer by question type, over all of them under None.

    Raises: ValueError when a list is needed and there is none, and for training data that asks nothing.
    """
    counts: Counter[str] = Counter()
    if train is not None:
        train = open_source(train) if isinstance(train, str) else train
        check_asks(train)
        for row in range(len(train)):
            with suppress(BadSample):
                counts.update(captions_at(train, row))
        if not counts:
            raise ValueError(f"{train.name} has no answers: expected `answers` beside its questions.")
    counted = sorted(counts, key=lambda answer: (-counts[answer], answer))[: options.most]
    majority = getattr(source, "majority", None)
    frequent = majority() if callable(majority) else {None: counted[0]} if counted else {}
    answers = counted or getattr(source, "answers", None)
    if options.answers is not None:
        lines = options.answers.read_text("utf-8-sig").split("\n")
        answers = [line.strip() for line in lines if line.strip()]
    if not answers and (options.decode != "free" or options.answers is not None):
        raise ValueError(
            f"{options.answers or source.name} has no list of answers: name the data that the model was trained on "
            "with --train, or a file with an answer a line with --vqa.answers; --vqa.decode free needs none."
        )
    return answers or None, frequent


def accuracy(answer: str, answers: Sequence[str]) -> float:
    """How right an answer is, in [0, 1]: the mean over the annotators of min(1, agreeing others / 3).

    Where fewer than four annotators answered, all others must agree; the answer of a single one must be met.

    Args: answer: the model's; answers: one an annotator, as stored (officially ten), at least one.
    """
    guess, *references = [text.replace("\n", " ").replace("\t", " ").strip() for text in (answer, *answers)]
    if len(set(references)) > 1:  # else the evaluator compares them as they are
        guess, references = normalise(guess), [normalise(a) for a in references]
    agree = [a == guess for a in references]
    if len(agree) == 1:
        return float(agree[0])
    needed = min(AGREE, len(agree) - 1)
    return sum(min(1.0, (sum(agree) - one_agrees) / needed) for one_agrees in agree) / len(agree)


def normalise(answer: str) -> str:
    """An answer as the evaluator compares it where annotators differ: "The  two dogs." -> "2 dogs".

    A mark beside a space anywhere, or a comma within a number, and all of its kind go; else it becomes a space.
    """
    out, numbers = answer, _COMMA.search(answer) is not None
    for mark in PUNCTUATION:
        goes = numbers or f"{mark} " in answer or f" {mark}" in answer
        out = out.replace(mark, "" if goes else " ")
    words = [NUMBERS.get(word, word) for word in _PERIOD.sub("", out, count=MOST_PERIODS).lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def means(answered: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, float]]:
    """The mean accuracy over all questions, then by question type and by answer type, in order of their names.

    Args: answers, each with the question's `Record.info`.
    Names: "accuracy", "accuracy/question/NAME", "accuracy/answer/NAME".
    """
    rows = [(accuracy(answer, info[ANSWERS]), info) for answer, info in answered]
    yield "accuracy", sum(value for value, _ in rows) / len(rows)
    for kind in ("question", "answer"):
        for name, own in grouped([info for _, info in rows], f"{kind}_type", known=False).items():
            yield f"accuracy/{kind}/{name}", sum(rows[n][0] for n in own) / len(own)
