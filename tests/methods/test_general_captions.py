"""What is not in the paper: copies of captions that lose words, and the spread of matched pairs."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.config.recipes import TextConfig
from kiloword.methods.prolip.inclusion import InclusionSettings, MaskedText, Spread, drop_words, mask_words, terms
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.randomness import key
from kiloword.types import Encoded, Features, Texts
from kiloword.verify.batch import batch, config

MASK = TextConfig().special["mask"]


def lists(texts: Texts) -> list[list[int]]:
    return [part.tolist() for part in texts.ids.split(texts.starts.diff().tolist())]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    captions=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=14), min_size=1, max_size=5),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    seed=st.integers(0, 2**62),
)
def test_words_are_skipped(captions: list[list[int]], share: float, seed: int) -> None:
    """Exactly those that would be masked; what stays (special tokens, ids 0 to 5, among it) keeps its order."""
    ours, whole = TextConfig(vocab=64), Texts.pack(captions)
    seeds = torch.tensor([key(seed, n) for n in range(len(captions))])
    masked = lists(mask_words(whole, seeds, share, ours))
    left = lists(drop_words(whole, seeds, share, ours))
    for caption, hidden, copy in zip(captions, masked, left, strict=True):
        words = sum(token > 5 for token in caption)
        assert copy == [a for a, b in zip(caption, hidden, strict=True) if a == b]
        assert len(caption) - len(copy) == round(share * words)


def gaussians(n: int, seed: int) -> Features:
    """In double precision, with gradients."""
    made = torch.randn(2, n, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"vec": made[0].clone().requires_grad_(), "log_var": made[1].clone().requires_grad_()}


def model() -> Model:
    return build(config(), preset("prolip", {"log_var": -2.0})).double()


class Watched:
    """A model that remembers the texts that it was given."""

    def __init__(self, inside: Model) -> None:
        self.inside, self.texts = inside, []  # type: ignore[var-annotated]

    def encode_text(self, texts: Texts) -> tuple[Tensor, Features]:
        self.texts.append(texts)
        return self.inside.encode_text(texts)


def test_a_copy_of_a_caption_loses_words_if_set() -> None:
    """With `drop` copies have no mask token and fewer tokens; nothing else is asked of them."""
    some, made, seen = batch(method="prolip"), model(), {}
    tokens, texts = made.encode_text(some.texts)
    for hide in ("mask", "drop"):
        term: Any = MaskedText(InclusionSettings(masked_every=1, hide_words=hide), made.config)  # type: ignore[arg-type]
        watched = Watched(made)
        assert float(term(watched, some, Encoded(tokens, tokens, texts, texts)).detach()) > 0
        seen[hide] = lists(watched.texts[0])
    assert any(MASK in copy for copy in seen["mask"])
    assert seen["drop"] == [[token for token in copy if token != MASK] for copy in seen["mask"]]


def test_spread_is_how_likely_a_pair_is_of_one_origin() -> None:
    """-log of the density of the means' gap under the sum of both variances, less its constant; matched pairs alone."""
    some = batch(method="prolip")
    images, texts = gaussians(len(some), 0), gaussians(len(some.texts), 1)
    empty = torch.empty(0)
    found = Spread()(model(), some, Encoded(empty, empty, images, texts))
    expected = []
    for t, i in enumerate(some.image_of_text.tolist()):
        variance = images["log_var"][i].exp() + texts["log_var"][t].exp()
        normal = torch.distributions.Normal(torch.zeros(6, dtype=torch.float64), variance.sqrt())
        gap = (images["vec"][i] - texts["vec"][t]).detach()
        expected.append((-normal.log_prob(gap) - 0.5 * torch.tensor(2 * torch.pi, dtype=torch.float64).log()).mean())
    torch.testing.assert_close(found, torch.stack(expected).sum())
    assert int(Spread().count(some)) == len(some.texts)
    logs = [images["log_var"], texts["log_var"]]
    by_found, by_expected = (
        torch.autograd.grad(x, logs, retain_graph=True) for x in (found, torch.stack(expected).sum())
    )
    torch.testing.assert_close(by_found, by_expected)
    assert torch.autograd.grad(found, [images["vec"], texts["vec"]], allow_unused=True) == (None, None)


def test_spread_is_a_term_only_where_it_weighs() -> None:
    assert "spread" not in terms(InclusionSettings())
    weight, made = terms(InclusionSettings(spread=3.0))["spread"]
    assert weight == 3.0
    assert isinstance(made(config()), Spread)
