"""Search over next tokens, on tables of random probabilities and on small models."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import mostly_slow
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.generation import captioner as captioner_module
from kiloword.generation.captioner import Caption, Captioner
from kiloword.generation.decoding import ModelDecoding
from kiloword.generation.options import GenerationOptions
from kiloword.generation.rules import FinishedTexts, Rules, Trie
from kiloword.generation.search import nucleus, search
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.randomness import key
from kiloword.types import Texts
from whole_decoding import WholeDecoding

START, END, PAD, VOCAB = 0, 1, 2, 6
WORDS = (3, 4, 5)
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


def texts(found: FinishedTexts, image: int) -> dict[Text, float]:
    """The texts found for an image with their scores, best first."""
    rows = zip(found.ids[image].tolist(), found.lengths[image].tolist(), found.score[image].tolist(), strict=True)
    return {tuple(ids[:n]): score for ids, n, score in rows if n}


def every_text(longest: int, shortest: int = 0) -> list[Text]:
    """All that may be said: with an end, or cut at the limit."""
    whole = [(*w, END) for n in range(shortest, longest) for w in itertools.product(WORDS, repeat=n)]
    return whole + list(itertools.product(WORDS, repeat=longest))


def run(options: GenerationOptions, images: list[int], seeds: Tensor | None = None, **more: Any) -> FinishedTexts:
    return search(Table(images), len(images), rules(**more), options, seeds)


def options(method: Any, **more: Any) -> GenerationOptions:
    return GenerationOptions(method=method, **{"shortest": 0, **more})


def seeds(images: list[int], num: int = 1, seed: int = 0) -> Tensor:
    return torch.tensor([[key(seed, p, n) for n in range(num)] for p in images])


IMAGES = list(range(7))


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("shortest", [0, 2])
def test_a_wide_beam_finds_what_trying_every_text_finds(penalty: float, shortest: int) -> None:
    wide = options("beam", beams=150, num=8, length_penalty=penalty, exact=True)
    found = run(wide, IMAGES, shortest=shortest)
    table = Table([])
    for image in IMAGES:
        score = {t: table.logprob(image, t) / len(t) ** penalty for t in every_text(4, shortest)}
        best = sorted(score, key=lambda t: -score[t])[:8]
        mine = texts(found, image)
        assert list(mine)[:8] == best
        assert list(mine.values())[:8] == pytest.approx([score[t] for t in best], rel=1e-5)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
def test_exact_search_stops_early_only_where_nothing_is_lost(penalty: float) -> None:
    """The same beams without any early end are a reference; the usual rule ends sooner."""
    small = options("beam", beams=3, length_penalty=penalty)
    exact = replace(small, exact=True)
    for image in range(30):
        usual, sure = Table([image]), Table([image])
        first = texts(search(usual, 1, rules(8), small), 0)
        second = texts(search(sure, 1, rules(8), exact), 0)
        full = _beams_to_the_end(image, 3, 8, penalty)
        assert next(iter(second)) == full
        assert max(second.values()) >= max(first.values()) - 1e-6
        assert usual.steps <= sure.steps


def _beams_to_the_end(image: int, beams: int, longest: int, penalty: float) -> Text:
    """The textbook's beam search, one image, in lists."""
    table = Table([])
    live: dict[Text, float] = {(): 0.0}
    done: dict[Text, float] = {}
    for n in range(1, longest + 1):
        more: dict[Text, float] = {}
        for said, total in live.items():
            logp = table.logits(image, (START, *said)).double().log_softmax(0)
            more |= {(*said, w): total + float(logp[w]) for w in (END, *WORDS)}
        ranked = sorted(more, key=lambda t: -more[t])
        done |= {t: more[t] / n**penalty for t in ranked[:beams] if t[-1] == END or n == longest}
        live = {t: more[t] for t in [t for t in ranked if t[-1] != END][:beams]}
    return max(done, key=lambda t: done[t])


def greedy_reference(image: int, longest: int) -> Text:
    table, said = Table([]), (START,)
    while len(said) <= longest and said[-1] != END:
        logits = table.logits(image, said)
        said = (*said, max((END, *WORDS), key=lambda w: float(logits[w])))
    return said[1:]


def test_greedy_takes_the_likeliest_word() -> None:
    found = run(options("greedy"), IMAGES, longest=9)
    for image in IMAGES:
        text, score = next(iter(texts(found, image).items()))
        assert text == greedy_reference(image, 9)
        assert score == pytest.approx(Table([]).logprob(image, text) / len(text), rel=1e-5)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_one_beam_is_greedy(penalty: float) -> None:
    images = list(range(40))
    beam = run(options("beam", beams=1, length_penalty=penalty), images, longest=8)
    greedy = run(options("greedy", length_penalty=penalty), images, longest=8)
    for image in images:
        assert next(iter(texts(beam, image))) == next(iter(texts(greedy, image)))


@pytest.mark.parametrize("method", ["greedy", "beam", "nucleus"])
def test_what_stands_beside_a_image_does_not_matter(method: str) -> None:
    chosen = options(method, num=1 if method == "greedy" else 3)
    together = run(chosen, IMAGES, seeds(IMAGES, chosen.num), longest=7)
    for image in IMAGES:
        alone = run(chosen, [image], seeds([image], chosen.num), longest=7)
        assert texts(alone, 0) == pytest.approx(texts(together, image), rel=1e-6)


@pytest.mark.parametrize("method", ["greedy", "beam", "nucleus"])
def test_texts_stop_at_the_end_and_at_the_limit(method: str) -> None:
    images = list(range(30))
    found = run(options(method), images, seeds(images), longest=3)
    lengths = Counter()
    for image in images:
        for text in texts(found, image):
            assert END not in text[:-1]
            assert (text[-1] == END) or len(text) == 3
            lengths[len(text), text[-1] == END] += 1
    assert lengths[3, False]
    assert lengths[2, True]


def test_a_search_ends_when_every_text_has() -> None:
    """A decoder that always ends after one word is stepped twice, whatever the limit."""

    class Short(Table):
        def logits(self, image: int, said: Text) -> Tensor:
            logits = super().logits(image, said)
            logits[END] = 50.0 if len(said) > 1 else -50.0
            return logits

    for method in ("greedy", "beam", "nucleus"):
        table = Short(list(IMAGES))
        search(table, 7, rules(50), options(method, beams=2), seeds(IMAGES))
        assert table.steps == 2


@given(st.lists(st.floats(-6, 2), min_size=2, max_size=12), st.floats(0.05, 1.0), st.floats(0.25, 4.0))
@settings(max_examples=100, deadline=None)
def test_the_nucleus_is_the_smallest_set_that_reaches_p(logits: list[float], top_p: float, temperature: float) -> None:
    logp = torch.tensor([logits]).log_softmax(1)
    p = (logp.double() / temperature).softmax(1)[0].tolist()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    size = next((n for n in range(1, len(p)) if sum(p[i] for i in order[:n]) >= top_p), len(p))
    chances = torch.linspace(0, 1, 400)[:-1]
    drawn = nucleus(logp.expand(399, -1), chances, top_p, temperature).tolist()
    least = p[order[size - 1]]
    assert all(p[i] >= least - 1e-6 for i in drawn)
    mass = sum(p[i] for i in order[:size])
    for i in order[:size]:
        if all(abs(p[i] - p[j]) > 1e-5 for j in order if j != i) and abs(mass - top_p) > 1e-4:
            assert abs(drawn.count(i) / 399 - p[i] / mass) < 0.02


def test_a_wide_nucleus_is_drawn_from_in_a_large_vocabulary() -> None:
    """More tokens than are looked at first; those that may not be said are never drawn."""
    logp = torch.zeros(2000, 1000).masked_fill(torch.arange(1000) % 2 == 0, float("-inf"))
    drawn = nucleus(logp, torch.arange(2000) / 2000, 1.0)
    assert set(drawn.tolist()) == set(range(1, 1000, 2))
    assert max(Counter(drawn.tolist()).values()) <= 5
    sure = torch.full((1, 1000), -50.0).index_fill(1, torch.tensor([7]), 0.0)  # one row is done with few tokens
    beside = nucleus(torch.cat([sure, logp]), torch.arange(-1, 2000).clamp(min=0) / 2000, 0.99)
    assert int(beside[0]) == 7
    assert len(set(beside[1:].tolist())) == 495


def test_draws_follow_the_model() -> None:
    """20000 one-word texts of one image: shares against probabilities, four standard deviations."""
    n = 20000
    found = run(options("nucleus", num=n, top_p=1.0), [5], seeds([5], n), longest=1)
    drawn = Counter(found.ids[0, :, 0].tolist())
    logp = Table([]).logits(5, (START,)).double()
    logp[[START, PAD]] = float("-inf")
    for word, p in enumerate(logp.softmax(0).tolist()):
        assert abs(drawn[word] / n - p) <= 4 * (p * (1 - p) / n) ** 0.5


def test_draws_have_a_key() -> None:
    first = run(options("nucleus", num=3), IMAGES, seeds(IMAGES, 3), longest=7)
    again = run(options("nucleus", num=3), IMAGES, seeds(IMAGES, 3), longest=7)
    other = run(options("nucleus", num=3), IMAGES, seeds(IMAGES, 3, seed=1), longest=7)
    assert torch.equal(first.ids, again.ids)
    assert not torch.equal(first.ids, other.ids)
    assert len({str(row.tolist()) for row in first.ids.flatten(0, 1)}) > 7


def test_beams_are_distinct_and_best_first() -> None:
    found = run(options("beam", num=5), IMAGES)
    for image in IMAGES:
        several = texts(found, image)
        assert len(several) >= 5
        assert list(several.values()) == sorted(several.values(), reverse=True)
    assert all(len(set(map(tuple, ids.tolist()))) >= 5 for ids in found.ids)
    more = run(options("beam", num=3, beams=3, exact=True), IMAGES, longest=6)
    assert max(len(texts(more, image)) for image in IMAGES) == 6  # some may read the same


@pytest.mark.parametrize("method", ["greedy", "beam", "nucleus"])
@pytest.mark.parametrize("size", [1, 2])
def test_no_run_of_tokens_comes_twice(method: str, size: int) -> None:
    images = list(range(20))
    free = run(options(method), images, seeds(images), longest=10, shortest=6)
    found = run(options(method), images, seeds(images), longest=10, no_repeat=size)
    assert any(_repeats(text, size) for p in images for text in texts(free, p))
    assert not any(_repeats(text, size) for p in images for text in texts(found, p))


def _repeats(text: Text, size: int) -> bool:
    runs = [text[n : n + size] for n in range(len(text) - size + 1)]
    return len(set(runs)) < len(runs)


def test_nothing_left_to_say_is_an_end() -> None:
    """Three words, none twice, and yet six before the end."""
    for method in ("greedy", "beam", "nucleus"):
        found = run(options(method), IMAGES, seeds(IMAGES), longest=9, no_repeat=1, shortest=6)
        for image in IMAGES:
            assert all(sorted(text) == [END, *WORDS] for text in texts(found, image))


ANSWERS: list[Text] = [(3, END), (3, 4, END), (3, 4, 4, END), (5, 3, END), (4, 4, 4, 5, END)]


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_closed_list_by_beams_is_the_best_of_the_list(penalty: float) -> None:
    found = run(options("beam", beams=5, length_penalty=penalty, exact=True), IMAGES, longest=5, trie=Trie(ANSWERS))
    for image in IMAGES:
        score = {t: Table([]).logprob(image, t) / len(t) ** penalty for t in ANSWERS}
        mine = texts(found, image)
        assert mine.keys() <= score.keys()
        assert next(iter(mine)) == max(score, key=lambda t: score[t])
        assert max(mine.values()) == pytest.approx(max(score.values()), rel=1e-5)


@pytest.mark.parametrize("method", ["greedy", "beam", "nucleus"])
def test_a_closed_list_is_never_left(method: str) -> None:
    """Whatever else was asked: of beams, repeats and least lengths."""
    images = list(range(40))
    found = run(options(method), images, seeds(images), longest=5, trie=Trie(ANSWERS), no_repeat=1, shortest=3)
    said = {text for p in images for text in texts(found, p)}
    assert said <= set(ANSWERS)
    assert len(said) > 2


def test_a_trie_allows_what_its_texts_say() -> None:
    trie = Trie(ANSWERS)
    nodes = torch.tensor(
        [0, int(trie.follow(torch.tensor([0]), torch.tensor([3]))), trie.follow(*torch.tensor([[0], [2]]))]
    )
    allowed = trie.allowed(nodes, VOCAB)
    assert [row.nonzero()[:, 0].tolist() for row in allowed] == [[3, 4, 5], [END, 4], []]
    after = trie.follow(nodes, torch.tensor([VOCAB + 9, END, 3]))
    assert not trie.allowed(after, VOCAB).any()
    alike = int(nodes[1]) * VOCAB + END  # from the root no token, however its number reads
    assert not trie.allowed(trie.follow(torch.tensor([0]), torch.tensor([alike])), VOCAB).any()
    for wrong in ([], [()]):
        with pytest.raises(ValueError, match="texts to choose from"):
            Trie(wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "greedy", "num": 2}, "greedy generates one caption, but num is 2"),
        ({"num": 6}, "num is 6, but there are 5 beams"),
        ({"top_p": 0.5}, "top_p is an option of method nucleus, not of beam"),
        ({"method": "greedy", "exact": True}, "exact is an option of method beam, not of greedy"),
        ({"method": "best"}, "method is 'best'. Expected greedy or beam or nucleus"),
        ({"beams": 0}, "beams is 0. Expected at least 1"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"temperature": 0.0}, "temperature is 0"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"longest": 4, "shortest": 3}, "longest is 4, shortest 3"),
    ],
)
def test_options_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationOptions(**wrong).check()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a red circle above a blue square", "two green stars"] * 3, 290)


def make(tokenizer: Tokenizer, method: str = "coca", seed: int = 0, sharp: float = 3, **given: Any) -> Model:
    """A model whose next words are far from even, as a trained one's are."""
    config = default_recipe(method, "debug").model
    config = replace(config, text=replace(config.text, vocab=tokenizer.vocab, context=20))
    model = build(config, preset(method, given), seed)
    if "text_decoder" in model.more:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(sharp if "text" in name and parameter.ndim == 2 else 1)
    return model.eval()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "given", mostly_slow([{}, {"tied": True}, {"class_token": False}, {"decoder_depth": 1}], 0, 2), ids=str
)
@pytest.mark.parametrize("method", ["greedy", "beam", "nucleus"])
def test_cached_equals_uncached(
    tokenizer: Tokenizer, images: Tensor, method: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(tokenizer, **given)
    chosen = GenerationOptions(method=method, num=1 if method == "greedy" else 4)
    cached = Captioner(model, tokenizer).caption(images, chosen)
    monkeypatch.setattr(captioner_module, "ModelDecoding", WholeDecoding)
    whole = Captioner(model, tokenizer).caption(images, chosen)
    assert [[c.ids for c in some] for some in cached] == [[c.ids for c in some] for some in whole]
    pairs = [pair for both in zip(cached, whole, strict=True) for pair in zip(*both, strict=True)]
    assert all(one.logprob == pytest.approx(other.logprob, rel=1e-5) for one, other in pairs)
    assert len({one.ids for one, _ in pairs}) > 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("sharp", "dtype", "close"), [(1, torch.float32, 1e-5), (3, torch.float64, 1e-12)])
def test_logits_step_by_step(
    tokenizer: Tokenizer, images: Tensor, packed: bool, sharp: float, dtype: torch.dtype, close: float
) -> None:
    """Through beams that come and go, even and uneven, before the first step and after; memories dense and packed."""
    model = make(tokenizer, sharp=sharp).to(dtype)
    memory = Captioner(model, tokenizer).memory(images)
    if packed:
        texts = Texts(torch.zeros(11, dtype=torch.int64), torch.tensor([0, 3, 5, 6, 9, 11]), 3)
        keys = [(k[0, torch.arange(11) % 5], v[0, torch.arange(11) % 5]) for k, v in memory.keys]
        memory = replace(memory, keys=keys, texts=texts)
    cached, whole = ModelDecoding(model, memory), WholeDecoding(model, memory)
    generator = torch.Generator().manual_seed(1)
    rows = 5
    moves = [
        [0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
        None,
        [1, 0, 2, 2, 5, 4, 6, 7, 9, 9],
        [2, 3, 4, 5],
        None,
        [0, 2, 1],
        [0, 0],
    ]
    with torch.inference_mode():
        for move in moves:
            if move is not None:
                cached.reorder(torch.tensor(move))
                whole.reorder(torch.tensor(move))
                rows = len(move)
            ids = torch.randint(6, tokenizer.vocab, (rows,), generator=generator)
            assert torch.allclose(cached.step(ids), whole.step(ids), rtol=0, atol=close)


def test_a_text_is_as_likely_as_the_caption_loss_says(tokenizer: Tokenizer, images: Tensor) -> None:
    """What training measures, on the captions that were generated."""
    from kiloword.methods.coca.coca import caption_loss

    model = make(tokenizer)
    captioner = Captioner(model, tokenizer)
    captions = [c[0] for c in captioner.caption(images, GenerationOptions(longest=12))]
    for n, caption in enumerate(captions):
        packed = Texts.pack([[tokenizer.roles.start, *caption.ids, tokenizer.roles.cls]])
        with torch.no_grad():
            keys = captioner.memory(images[n : n + 1]).keys
            loss = caption_loss(model, packed, model.text_tower(packed), keys)
        assert float(loss) == pytest.approx(-caption.logprob, rel=1e-5)
        assert caption.score == pytest.approx(caption.logprob / len(caption.ids), rel=1e-5)


@pytest.mark.parametrize("method", ["beam", "nucleus"])
def test_captions_of_a_batch_are_those_of_its_images(tokenizer: Tokenizer, images: Tensor, method: str) -> None:
    captioner, chosen = Captioner(make(tokenizer), tokenizer), GenerationOptions(method=method, num=3)
    together = captioner.caption(images, chosen)
    alone = [captioner.caption(image[None], chosen)[0] for image in images]
    assert [[c.ids for c in some] for some in together] == [[c.ids for c in some] for some in alone]
    assert all(len({c.text for c in some}) == len(some) == 3 for some in together)
    assert all([c.score for c in some] == sorted((c.score for c in some), reverse=True) for some in together)


@pytest.mark.parametrize("method", ["beam", "nucleus"])
def test_where_texts_read_the_same_more_are_searched(
    tokenizer: Tokenizer, images: Tensor, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By wider beams or other draws; of those that read the same in a round the likeliest is kept."""
    beams = {"beams": 6} if method == "beam" else {}
    captioner, chosen = Captioner(make(tokenizer), tokenizer), GenerationOptions(method=method, num=6, **beams)
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: str(sum(ids) % 7))
    monkeypatch.setattr(captioner_module, "ROUNDS", 1)
    once = captioner.caption(images, chosen)
    monkeypatch.undo()
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: str(sum(ids) % 7))
    searched: list[list[list[Caption]]] = []
    made = captioner._texts

    def watch(found: FinishedTexts) -> list[list[Caption]]:
        searched.append(made(found))
        return searched[-1]

    monkeypatch.setattr(captioner, "_texts", watch)
    found = captioner.caption(images, chosen)
    assert sum(map(len, once)) < sum(map(len, found))
    for n, more in enumerate(found):
        assert len({c.text for c in more}) == len(more) <= 6
        assert [c.score for c in more] == sorted((c.score for c in more), reverse=True)
        for caption in more:
            first = [c.score for c in searched[0][n] if c.text == caption.text]
            assert not first or caption.score == max(first)


def test_special_tokens_are_never_generated(tokenizer: Tokenizer, images: Tensor) -> None:
    """The likeliest of all in this model; so are ids that the tokenizer has not."""
    model = make(tokenizer)
    with torch.no_grad():
        model.more["text_decoder"].output[[0, 2, 3, 4, 5]] *= 50
    captioner = Captioner(model, tokenizer)
    for method in ("greedy", "beam", "nucleus"):
        whole = {"top_p": 1.0} if method == "nucleus" else {}
        for some in captioner.caption(images, GenerationOptions(method=method, **whole)):
            assert not set(some[0].ids) & {0, 2, 3, 4, 5}
            assert len(some[0].ids) <= 18  # start, these, and the class token fill the context


def test_longest_and_shortest(tokenizer: Tokenizer, images: Tensor) -> None:
    captioner = Captioner(make(tokenizer), tokenizer)
    for some in captioner.caption(images, GenerationOptions(longest=9, shortest=7)):
        assert len(some[0].ids) == 8
    with pytest.raises(ValueError, match="longest is 20 tokens, but the text tower reads 19"):
        captioner.caption(images, GenerationOptions(longest=20))
    with pytest.raises(
        ValueError, match=r"shortest is 18 tokens, but the text tower reads 19.*: expected at most 17\."
    ):
        captioner.caption(images, GenerationOptions(shortest=18))
    assert all(len(some[0].ids) == 18 for some in captioner.caption(images, GenerationOptions(shortest=17)))


def test_answers_from_a_closed_list(tokenizer: Tokenizer, images: Tensor) -> None:
    captioner = Captioner(make(tokenizer), tokenizer)
    answers = ["red", "blue", "two", "a red circle"]
    packed = tokenizer.encode(answers, captioner.model.config.text)
    bounds = packed.starts.tolist()
    ids = packed.ids.tolist()
    trie = Trie([ids[a + 1 : b] for a, b in itertools.pairwise(bounds)])
    for method in ("greedy", "beam", "nucleus"):
        found = captioner.write(captioner.memory(images), GenerationOptions(method=method), [""] * 5, trie)
        assert all(some and some[0].text in answers for some in found)


def test_models_that_cannot_write(tokenizer: Tokenizer, images: Tensor) -> None:
    with pytest.raises(ValueError, match="has no text decoder, so it cannot generate text: train coca, sycoca"):
        Captioner(make(tokenizer, "clip"), tokenizer)
    model = make(tokenizer)
    with torch.no_grad():
        model.more["text_decoder"].output.fill_(float("nan"))
    with pytest.raises(ValueError, match="outputs NaN or infinite probabilities"):
        Captioner(model, tokenizer).caption(images)
