"""Search over next tokens, on tables of random probabilities and on small models."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kiloword.data.text.tokenizer import Tokenizer, vocabulary
from kiloword.generation.captioner import Captioner
from kiloword.generation.decoding import ModelDecoding
from kiloword.generation.options import GenerationOptions
from kiloword.generation.search import Found, Rules, beginnings, nucleus, search
from kiloword.methods.coca.coca import caption_loss
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.randomness import key
from kiloword.types import Texts
from whole_decoding import WholeDecoding

START, END, PAD, VOCAB = 0, 1, 2, 6
WORDS = (3, 4, 5)
IMAGES = list(range(7))
METHODS = ("greedy", "beam", "nucleus")
Text = tuple[int, ...]


class Table:
    """Logits by image and by all that was said: random, of its own for every prefix, whatever rows stand beside."""

    def __init__(self, images: list[int], sharp: float = 2.0) -> None:
        self.images, self.sharp = images, sharp
        self.said: list[Text] = [()] * len(images)
        self.steps = 0

    def logits(self, image: int, said: Text) -> Tensor:
        generator = torch.Generator().manual_seed(key("table", image, *said))
        return self.sharp * torch.randn(VOCAB, generator=generator)

    def step(self, ids: Tensor) -> Tensor:
        self.steps += 1
        assert len(ids) == len(self.said)
        self.said = [(*said, int(new)) for said, new in zip(self.said, ids, strict=True)]
        return torch.stack([self.logits(p, said) for p, said in zip(self.images, self.said, strict=True)])

    def reorder(self, rows: Tensor) -> None:
        self.said = [self.said[r] for r in rows.tolist()]
        self.images = [self.images[r] for r in rows.tolist()]

    def logprob(self, image: int, text: Text) -> float:
        """Of a text, token by token."""
        said: Text = (START,)
        total = 0.0
        for token in text:
            total += float(self.logits(image, said).double().log_softmax(0)[token])
            said = (*said, token)
        return total


def rules(longest: int = 4, **more: Any) -> Rules:
    never = torch.zeros(VOCAB, dtype=torch.bool)
    never[[START, PAD]] = True
    return Rules(start=START, end=END, never=never, longest=longest, **more)


def options(method: Any, **more: Any) -> GenerationOptions:
    return GenerationOptions(method=method, **{"shortest": 0, **more})


def run(options: GenerationOptions, images: list[int], seed: int = 0, **more: Any) -> list[list[Found]]:
    seeds = [[key(seed, image, n) for n in range(options.num)] for image in images]
    return search(Table(images), len(images), rules(**more), options, seeds)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("shortest", [0, 2])
def test_a_wide_beam_finds_what_trying_every_text_finds(penalty: float, shortest: int) -> None:
    found = run(options("beam", beams=150, num=8, length_penalty=penalty, exact=True), IMAGES, shortest=shortest)
    every = [(*w, END) for n in range(shortest, 4) for w in itertools.product(WORDS, repeat=n)]
    every += list(itertools.product(WORDS, repeat=4))  # cut at the limit
    for image in IMAGES:
        score = {t: Table([]).logprob(image, t) / len(t) ** penalty for t in every}
        best = sorted(score, key=lambda t: -score[t])[:8]
        assert [one.ids for one in found[image][:8]] == best
        assert [one.score for one in found[image][:8]] == pytest.approx([score[t] for t in best], rel=1e-5)
        assert len({one.ids for one in found[image]}) == len(found[image])


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
def test_exact_search_stops_early_only_where_nothing_is_lost(penalty: float) -> None:
    """The same beams without any early end are a reference; the usual rule ends sooner. One beam is greedy."""
    small = options("beam", beams=3, length_penalty=penalty)
    for image in range(30):
        usual, sure = Table([image]), Table([image])
        first = search(usual, 1, rules(8), small)[0][0]
        second = search(sure, 1, rules(8), replace(small, exact=True))[0][0]
        assert second.ids == beams_to_the_end(image, 3, 8, penalty)
        assert second.score >= first.score - 1e-6
        assert usual.steps <= sure.steps
    for image, (one, *_) in enumerate(run(options("greedy"), list(range(40)), longest=9)):
        said: Text = (START,)
        while len(said) <= 9 and said[-1] != END:
            logits = Table([]).logits(image, said)
            said = (*said, max((END, *WORDS), key=lambda w: float(logits[w])))
        assert one.ids == said[1:]
        assert one.score == pytest.approx(Table([]).logprob(image, one.ids) / len(one.ids), rel=1e-5)


def beams_to_the_end(image: int, beams: int, longest: int, penalty: float) -> Text:
    """The textbook's beam search, one image, in lists."""
    live: dict[Text, float] = {(): 0.0}
    done: dict[Text, float] = {}
    for n in range(1, longest + 1):
        more: dict[Text, float] = {}
        for said, total in live.items():
            logp = Table([]).logits(image, (START, *said)).double().log_softmax(0)
            more |= {(*said, w): total + float(logp[w]) for w in (END, *WORDS)}
        ranked = sorted(more, key=lambda t: -more[t])
        done |= {t: more[t] / n**penalty for t in ranked[:beams] if t[-1] == END or n == longest}
        live = {t: more[t] for t in [t for t in ranked if t[-1] != END][:beams]}
    return max(done, key=lambda t: done[t])


@pytest.mark.parametrize("method", METHODS)
def test_texts_end_and_do_not_depend_on_what_stands_beside(method: str) -> None:
    chosen = options(method, num=1 if method == "greedy" else 3)
    together = run(chosen, IMAGES, longest=7)
    for image, several in enumerate(together):
        (alone,) = run(chosen, [image], longest=7)
        assert [one.ids for one in alone] == [one.ids for one in several]
        assert [one.score for one in several] == sorted((one.score for one in several), reverse=True)
        assert [one.score for one in alone] == pytest.approx([one.score for one in several], rel=1e-6)
    lengths = Counter()
    for several in run(options(method), list(range(30)), longest=3):
        for one in several:
            assert END not in one.ids[:-1]
            assert one.ids[-1] == END or len(one.ids) == 3
            lengths[len(one.ids), one.ids[-1] == END] += 1
    assert lengths[3, False]
    assert lengths[2, True]


@given(st.lists(st.floats(-6, 2), min_size=2, max_size=12), st.floats(0.05, 1.0), st.floats(0.25, 4.0))
@settings(max_examples=100, deadline=None)
def test_the_nucleus_is_the_smallest_set_that_reaches_p(logits: list[float], top_p: float, temperature: float) -> None:
    logp = torch.tensor([logits]).log_softmax(1)
    p = (logp.double() / temperature).softmax(1)[0].tolist()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    size = next((n for n in range(1, len(p)) if sum(p[i] for i in order[:n]) >= top_p), len(p))
    chances = torch.linspace(0, 1, 400)[:-1]
    drawn = nucleus(logp.expand(399, -1), chances, top_p, temperature).tolist()
    assert all(p[i] >= p[order[size - 1]] - 1e-6 for i in drawn)
    mass = sum(p[i] for i in order[:size])
    for i in order[:size]:
        if all(abs(p[i] - p[j]) > 1e-5 for j in order if j != i) and abs(mass - top_p) > 1e-4:
            assert abs(drawn.count(i) / 399 - p[i] / mass) < 0.02


def test_draws_follow_the_model_and_have_a_key() -> None:
    """5000 one-word texts of one image: shares against probabilities, four standard deviations."""
    n = 5000
    (found,) = run(options("nucleus", num=n, top_p=1.0), [5], longest=1)
    drawn = Counter(one.ids[0] for one in found)
    logp = Table([]).logits(5, (START,)).double()
    logp[[START, PAD]] = float("-inf")
    for word, p in enumerate(logp.softmax(0).tolist()):
        assert abs(drawn[word] / n - p) <= 4 * (p * (1 - p) / n) ** 0.5
    first, again, other = (run(options("nucleus", num=3), IMAGES, seed, longest=7) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len({one.ids for several in first for one in several}) > 7


@pytest.mark.parametrize("method", METHODS)
def test_no_run_of_tokens_comes_twice(method: str) -> None:
    def repeats(found: list[list[Found]], size: int) -> bool:
        texts = [one.ids for several in found for one in several]
        runs = [[text[n : n + size] for n in range(len(text) - size + 1)] for text in texts]
        return any(len(set(some)) < len(some) for some in runs)

    images = list(range(20))
    for size in (1, 2):
        assert repeats(run(options(method), images, longest=10, shortest=6), size)
        assert not repeats(run(options(method), images, longest=10, no_repeat=size), size)
    for several in run(options(method), IMAGES, longest=9, no_repeat=1, shortest=6):  # three words, none twice: an end
        assert all(sorted(one.ids) == [END, *WORDS] for one in several)


ANSWERS: list[Text] = [(3, END), (3, 4, END), (3, 4, 4, END), (5, 3, END), (4, 4, 4, 5, END)]


@pytest.mark.parametrize("method", METHODS)
def test_a_closed_list_is_never_left_and_beams_find_its_best(method: str) -> None:
    """Whatever else was asked: of beams, repeats and least lengths."""
    closed = beginnings(ANSWERS)
    found = run(options(method), list(range(40)), longest=5, closed=closed, no_repeat=1, shortest=3)
    said = {one.ids for several in found for one in several}
    assert said <= set(ANSWERS)
    assert len(said) > 2
    for penalty in (0.0, 1.0) if method == "beam" else ():
        chosen = options("beam", length_penalty=penalty, exact=True)
        for image, (best, *_) in enumerate(run(chosen, IMAGES, longest=5, closed=closed)):
            score = {t: Table([]).logprob(image, t) / len(t) ** penalty for t in ANSWERS}
            assert best.ids == max(score, key=lambda t: score[t])
            assert best.score == pytest.approx(max(score.values()), rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"method": "greedy", "num": 2}, "num"),
        ({"num": 6}, "num"),
        ({"top_p": 0.5}, "top-p"),
        ({"method": "greedy", "exact": True}, "exact"),
        ({"beams": 0}, "beams"),
        ({"beams": 5000000}, "beams"),
        ({"method": "nucleus", "top_p": 0.0}, "top-p"),
        ({"method": "nucleus", "temperature": 0.0}, "temperature"),
        ({"length_penalty": float("nan")}, "length-penalty"),
    ],
)
def test_options_that_make_no_sense(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=f"--{word} is"):
        GenerationOptions(**wrong).check()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a red circle above a blue square", "two green stars"] * 3, 290)


def make(tokenizer: Tokenizer, method: str = "coca", sharp: float = 3, **given: Any) -> Model:
    """A model whose next words are far from even, as a trained one's are."""
    config = default_recipe(method, "debug").model
    config = replace(config, text=replace(config.text, vocab=tokenizer.vocab, context=20))
    model = build(config, preset(method, given), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(sharp if "text" in name and parameter.ndim == 2 else 1)
    return model.eval()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("given", [{}, {"tied": True}, {"class_token": False}, {"decoder_depth": 1}], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_logits_step_by_step(tokenizer: Tokenizer, images: Tensor, packed: bool, given: dict[str, Any]) -> None:
    """Through beams that come and go, before the first step and after; memories dense and packed."""
    model = make(tokenizer, **given).double()
    memory = Captioner(model, tokenizer).memory(images)
    if packed:
        texts = Texts(torch.zeros(11, dtype=torch.int64), torch.tensor([0, 3, 5, 6, 9, 11]), 3)
        keys = [(k[0, torch.arange(11) % 5], v[0, torch.arange(11) % 5]) for k, v in memory.keys]
        memory = replace(memory, keys=keys, texts=texts)
    cached, whole = ModelDecoding(model, memory), WholeDecoding(model, memory)
    generator, rows = torch.Generator().manual_seed(1), list(range(5))
    with torch.inference_mode():
        for move in (
            [0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
            [1, 0, 2, 2, 5, 4, 6, 7, 9, 9],
            None,
            [2, 3, 4, 5],
            [0, 2, 1],
            [0, 0],
        ):
            if move is not None:
                cached.reorder(torch.tensor(move))
                whole.reorder(torch.tensor(move))
                rows = move
            ids = torch.randint(6, tokenizer.vocab, (len(rows),), generator=generator)
            assert torch.allclose(cached.step(ids), whole.step(ids), rtol=0, atol=1e-12)


def test_a_text_is_as_likely_as_the_caption_loss_says(tokenizer: Tokenizer, images: Tensor) -> None:
    """What training measures, on the captions that were generated."""
    captioner = Captioner(make(tokenizer), tokenizer)
    model = captioner.model
    for n, (caption, *_) in enumerate(captioner.caption(images, GenerationOptions(longest=12))):
        packed = Texts.pack([[tokenizer.roles.start, *caption.ids, tokenizer.roles.cls]])
        with torch.no_grad():
            loss = caption_loss(model, packed, model.text_tower(packed), captioner.memory(images[n : n + 1]).keys)
        assert float(loss) == pytest.approx(-caption.logprob, rel=1e-5)
        assert caption.score == pytest.approx(caption.logprob / len(caption.ids), rel=1e-5)


class Few:
    """A tokenizer whose texts read like seven."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decode(self, ids: Text) -> str:
        return str(sum(ids) % 7)


@pytest.mark.parametrize("method", ["beam", "nucleus"])
def test_captions_of_a_batch_are_unique_and_those_of_its_images(
    tokenizer: Tokenizer, images: Tensor, method: str
) -> None:
    """Where texts read the same, wider beams or other draws are searched; the likeliest of equal ones is kept."""
    beams = {"beams": 6} if method == "beam" else {}
    model, chosen = make(tokenizer), GenerationOptions(method=method, num=6, **beams)
    captioner, few = Captioner(model, tokenizer), Captioner(model, Few(tokenizer))  # type: ignore[arg-type]
    for one, all_in_one in ((captioner, 30), (few, 28)):
        together = one.caption(images, chosen)
        alone = [one.caption(image[None], chosen)[0] for image in images]
        assert [[c.ids for c in some] for some in together] == [[c.ids for c in some] for some in alone]
        assert all(len({c.text for c in some}) == len(some) <= 6 for some in together)
        assert all([c.score for c in some] == sorted((c.score for c in some), reverse=True) for some in together)
        assert sum(map(len, together)) >= all_in_one
    likeliest = {Few(tokenizer).decode(c.ids): c.score for c in reversed(captioner.caption(images, chosen)[0])}
    kept = {c.text: c.score for c in few.caption(images, chosen)[0]}
    assert all(kept[text] >= score - 1e-6 for text, score in likeliest.items() if text in kept)


def test_special_tokens_and_limits(tokenizer: Tokenizer, images: Tensor) -> None:
    """Specials are the likeliest of all in this model, and so are ids that the tokenizer has not."""
    model = make(tokenizer)
    with torch.no_grad():
        model.more["text_decoder"].output[[0, 2, 3, 4, 5]] *= 50
    for method in METHODS:
        whole = {"top_p": 1.0} if method == "nucleus" else {}
        for some in Captioner(model, tokenizer).caption(images, GenerationOptions(method=method, **whole)):
            assert not set(some[0].ids) & {0, 2, 3, 4, 5}
            assert len(some[0].ids) <= 18  # start, these, and the class token fill the context
    clip = vocabulary("clip")
    never = Captioner(make(clip), clip).rules(GenerationOptions()).never
    assert never.nonzero().flatten().tolist() == [49406, 49408, 49409, 49410]  # pad is the word "!" too
    captioner = Captioner(make(tokenizer), tokenizer)
    for chosen, length in (({"longest": 9, "shortest": 7}, 8), ({"shortest": 17}, 18)):
        assert all(len(some[0].ids) == length for some in captioner.caption(images, GenerationOptions(**chosen)))
    for chosen in ({"longest": 20}, {"shortest": 18}, {"longest": 4, "shortest": 3}):
        with pytest.raises(ValueError, match="text tower reads"):
            captioner.caption(images, GenerationOptions(**chosen))
    with pytest.raises(ValueError, match="no text decoder"):
        Captioner(make(tokenizer, "clip"), tokenizer)
    with torch.no_grad():
        model.more["text_decoder"].output.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        Captioner(model, tokenizer).caption(images)
