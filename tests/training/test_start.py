"""Starting ProLIP from models without Gaussians: what stays the same, what is new; and a longer context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from folders import model_folder
from kiloword.api import load
from kiloword.cli.main import main
from kiloword.config.recipes import AugmentConfig, ModelConfig, ModelFile, Recipe, sizes
from kiloword.data.text.tokenizer import Tokenizer, tokenizer_from
from kiloword.methods.defaults import default_recipe, tuned
from kiloword.methods.registry import preset
from kiloword.model.model import Model, resize_text
from kiloword.models.build import build
from kiloword.models.model_folder import load_model, read_model_file, save_model
from kiloword.training import start
from kiloword.types import Features

WORDS = [f"w{n}" for n in range(40)]
SHORT = [" ".join(WORDS[n : n + 1 + n % 7]) for n in range(24)]  # fit beside any special tokens


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """A vocabulary as an imported model has it: its weights have no row for mask, cls and unc."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + [(f"\u2581{w}", -1.0) for w in WORDS]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return tokenizer_from(backend.to_str())


def config(words: Tokenizer, kind: str) -> ModelConfig:
    """Towers as loud as trained ones: CLIP's (causal), SigLIP's (pads are seen, no class token), or own."""
    small = sizes()["debug"]
    text = replace(small.text, vocab=words.plain_vocab, init_std=1.0, causal=kind == "clip", context=32)
    image = replace(small.image, patch=8, init_std=1.0)
    if kind == "siglip":
        text = replace(text, pad_to_context=True)
        image = replace(image, class_token=False)
        return replace(small, image=image, text=text, head=replace(small.head, image_pool="map"))
    return replace(small, image=image, text=text)


def folder(words: Tokenizer, kind: str, out: Path) -> Path:
    method = "clip" if kind == "clip" else "siglip"
    model = build(config(words, kind), preset(method), seed=3)
    save_model(out, model, words, ModelFile(method=method, settings={}, model=config(words, kind)))
    return out


def begin(
    method: str, path: Path, words: Tokenizer, settings: dict[str, Any] | None = None, **text: Any
) -> tuple[Model, Recipe, str]:
    recipe = replace(start.defaults(method, str(path), "debug"), settings=settings or {})
    recipe = replace(recipe, model=replace(recipe.model, text=replace(recipe.model.text, **text)))
    start.check(recipe)
    recipe = start.settle(recipe, words)
    model = build(recipe.model, preset(method, recipe.settings), seed=0)
    return model.eval(), recipe, start.load(model, recipe)


@torch.no_grad()
def encode(model: Model, words: Tokenizer) -> tuple[Features, Features]:
    generator = torch.Generator().manual_seed(0)
    size = model.config.image.size
    images = torch.randint(0, 256, (24, 3, size, size), dtype=torch.uint8, generator=generator)
    texts = words.encode(SHORT, model.config.text)
    return model.encode_image(images)[1], model.encode_text(texts)[1]


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


@pytest.mark.parametrize("method", ["prolip", "siglip+gaussian"])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_features_of_texts_stay_what_they_were(kind: str, method: str, words: Tokenizer, tmp_path: Path) -> None:
    path = folder(words, kind, tmp_path)
    before = load_model(path)[0].eval()
    model, recipe, said = begin(method, path, words)
    now, then = encode(model, words)[1]["vec"], encode(before, words)[1]["vec"]
    assert (now - then).abs().max() < 1e-5
    assert model.config.text.extra_tokens == (("unc",) if kind == "clip" else ("unc", "cls"))
    assert recipe.model.text.vocab == words.vocab == words.plain_vocab + 4
    assert "text_tower.tokens has 4 rows more" in said
    assert "head.uncertainty.text_log_var.weight" in said.partition("new: ")[2].partition("left over: ")[0]


@pytest.mark.parametrize(("kind", "least"), [("clip", 0.99), ("own", 0.5)])
def test_scores_hardly_change_and_more_with_tokens_that_start_anew(
    kind: str, least: float, words: Tokenizer, tmp_path: Path
) -> None:
    path = folder(words, kind, tmp_path)  # own: bidirectional without pads, [CLS] stands two places behind the end
    before = load_model(path)[0].eval()
    score = before.score(*encode(before, words))
    model, _, said = begin("prolip", path, words)
    near = correlation(model.score(*encode(model, words)), score)
    assert near > least
    assert "image_tower.uncertainty_token starts as the class token" in said
    fresh = build(model.config, preset("prolip"), seed=9).state_dict()
    tokens, state = words.roles, model.state_dict()
    for row in (tokens.unc, tokens.cls):
        state["text_tower.tokens"][row] = fresh["text_tower.tokens"][row]
    model.load_state_dict({**state, "image_tower.uncertainty_token": fresh["image_tower.uncertainty_token"]})
    assert correlation(model.score(*encode(model, words)), score) < near


@pytest.mark.parametrize(
    ("kind", "settings", "causal"), [("clip", {}, True), ("clip", {"bidirectional": True}, False), ("own", {}, False)]
)
def test_a_causal_tower_stays_causal_by_default(
    kind: str, settings: dict[str, bool], causal: bool, words: Tokenizer, tmp_path: Path
) -> None:
    """A scale of 100 beside a bias of -10 would call each pair a match: it begins anew."""
    model, recipe, _ = begin("prolip", folder(words, kind, tmp_path), words, settings)
    assert model.config.text.causal == causal
    assert recipe.settings.get("bidirectional") == {"clip": not causal}.get(kind)
    assert float(model.head.log_scale.detach().exp()) == pytest.approx(10)


def test_prolip_starts_from_prolip_as_it_is_and_not_from_log_variances_of_another_form(
    words: Tokenizer, tmp_path: Path
) -> None:
    path = folder(words, "own", tmp_path / "own")
    for method in ("prolip", "prolip-released"):
        model, recipe, _ = begin(method, path, words)
        save_model(tmp_path / method, model, words, ModelFile(method=method, settings={}, model=recipe.model))
        again, _, said = begin("prolip", tmp_path / method, words)
        if method == "prolip":
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
            assert "new: none; left over: none." in said
    loaded, _, left = said.partition("left over: ")
    assert "head.uncertainty.text_log_var.weight" in loaded.partition("new: ")[2]
    assert "head.uncertainty.mean_log_var.weight" in left


RAMP = torch.arange(32.0)[:, None] * torch.tensor([1.0, -2.0])


@pytest.mark.parametrize("context", [23, 31, 33, 64, 256])
@pytest.mark.parametrize("end", ["pads", "class"])
def test_positions_are_kept_at_both_ends_and_interpolated_between(context: int, end: str, words: Tokenizer) -> None:
    """Where the last positions are those of particular tokens."""
    shape = config(words, "siglip" if end == "pads" else "own")
    if end == "class":
        shape = replace(shape, text=replace(shape.text, extra_tokens=("cls",), class_place="last"))
    new, state = resize_text(shape, {"text_tower.positions": RAMP, "other": RAMP}, context)
    found = state["text_tower.positions"]
    assert new.text.context == len(found) == context
    assert (found[:20] == RAMP[:20]).all()
    assert (found[-2:] == RAMP[-2:]).all()
    assert (found[:, 0].diff() >= 0).all()
    assert (found[20:-2, 0].clamp(20, 29) == found[20:-2, 0]).all()
    assert torch.allclose(found[:, 1], -2 * found[:, 0])
    assert state["other"] is RAMP


def long_clip(positions: Tensor, keep: int = 20) -> Tensor:
    """[L, W] -> [4 L - 3 keep, W], as arXiv:2403.15378 and its code: three positions between two, and three beyond."""
    rows = list(positions[:keep])
    for n in range(keep, len(positions) - 1):
        rows += [((4 - j) * positions[n] + j * positions[n + 1]) / 4 for j in range(4)]
    rows += [positions[-1] + j * (positions[-1] - positions[-2]) / 4 for j in range(4)]
    return torch.stack(rows)


def test_a_longer_context_has_the_positions_of_long_clip(words: Tokenizer) -> None:
    shape = config(words, "clip")
    shape = replace(shape, text=replace(shape.text, context=77))
    positions = torch.randn(77, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    new, state = resize_text(shape, {"text_tower.positions": positions}, 248)
    assert new.text.context == 248
    torch.testing.assert_close(state["text_tower.positions"], long_clip(positions), rtol=1e-6, atol=1e-6)
    assert torch.equal(state["text_tower.positions"][:20], positions[:20])
    assert resize_text(shape, {"text_tower.positions": positions}, 512)[1]["text_tower.positions"].shape == (512, 5)


def test_a_context_that_leaves_nothing_is_refused(words: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 23"):
        load(folder(words, "siglip", tmp_path), context=22)
    small = replace(config(words, "clip"), text=replace(config(words, "clip").text, context=21))
    with pytest.raises(ValueError, match="at least 22"):
        resize_text(small, {"text_tower.positions": RAMP[:21]}, 64)


@pytest.mark.parametrize("context", [12, 256])
@pytest.mark.parametrize("kind", ["clip", "own"])
def test_texts_that_fit_score_the_same_with_another_context(
    kind: str, context: int, words: Tokenizer, tmp_path: Path
) -> None:
    """Without pads, they stand on positions that are kept; longer ones do not."""
    path = folder(words, kind, tmp_path)
    before, after = load(path), load(path, context=context)
    a, b = (matcher.encode_text(SHORT)["vec"] for matcher in (before, after))
    assert torch.equal(a, b)
    many = " ".join(WORDS * 6)
    a, b = (matcher.encode_text([many])["vec"] for matcher in (before, after))
    assert b.isfinite().all()
    assert not torch.allclose(a, b, atol=1e-3)


def test_training_starts_with_a_longer_context(words: Tokenizer, tmp_path: Path) -> None:
    path = folder(words, "siglip", tmp_path)
    model, _, said = begin("prolip", path, words, context=64)
    assert "(texts of 64 tokens instead of 32)" in said
    old = load_model(path)[0].text_tower.positions
    assert (model.text_tower.positions[-2:] == old[-2:]).all()
    assert (model.text_tower.positions[:20] == old[:20]).all()
    assert read_model_file(path).model.text.context == 32


@pytest.mark.parametrize(("width", "patch", "size"), [(30, 32, "debug"), (130, 16, "tiny"), (380, 32, "s16")])
def test_optimizer_and_batch_are_those_of_the_size_most_like_the_model(
    words: Tokenizer, tmp_path: Path, width: int, patch: int, size: str
) -> None:
    """By the width of the image tower, then by its patches."""
    small = config(words, "own")
    model = replace(small, image=replace(small.image, width=width, patch=patch, size=32))
    save_model(tmp_path, build(model, preset("siglip")), words, ModelFile(method="siglip", settings={}, model=model))
    found = start.defaults("siglip", str(tmp_path), data=("a.tar",))
    scratch = default_recipe("siglip", size, ("a.tar",))
    assert found == replace(tuned(scratch), model=model, init=str(tmp_path))
    assert start.defaults("siglip", str(tmp_path), "tiny", tune=False).optim == default_recipe("siglip", "tiny").optim
    start.check(found)
    start.check(replace(found, model=replace(model, image=replace(model.image, size=64))))
    wrong = replace(model, text=replace(model.text, pad_to_context=True), head=replace(model.head, dim=3))
    with pytest.raises(ValueError, match=r"--model\.text\.pad-to-context.*--model\.head\.dim"):
        start.check(replace(found, model=wrong))


@pytest.mark.parametrize(
    ("size", "crop", "rates"),
    [
        ("tiny", 0.8, {"lr": 1e-4, "muon_lr": 5e-4}),  # a tenth of those from scratch
        ("b32", 0.9, {"lr": 3e-5, "muon_lr": 2e-3, "weight_decay": 0.1, "warmup": 0.02}),  # WiSE-FT's
    ],
)
def test_rates_of_trained_weights(size: str, crop: float, rates: dict[str, Any]) -> None:
    scratch = default_recipe("siglip", size, ("a.tar",))
    gentle, data = tuned(scratch), replace(scratch.data, augment=AugmentConfig(crop=crop, flip=0.5))
    assert {name: getattr(gentle.optim, name) for name in rates} == pytest.approx(rates)
    assert replace(gentle, optim=scratch.optim) == replace(scratch, data=data)
    assert tuned(default_recipe("siglip")).data == default_recipe("siglip").data


def test_a_method_with_a_tower_that_the_weights_lack_has_the_rates_from_scratch(tmp_path: Path) -> None:
    folders = {name: str(model_folder(tmp_path / name, name)) for name in ("clip", "sycoca")}
    for base, method, gentle in (("clip", "siglip", True), ("clip", "coca", False), ("sycoca", "vqa", False)):
        scratch = default_recipe(method, "debug")
        assert start.defaults(method, folders[base]).optim == (tuned(scratch) if gentle else scratch).optim, method


def test_defaults_of_a_start_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that were not given."""
    rest = ["--init", str(model_folder(tmp_path / "start")), "--batch", "8", "--steps", "2", "--optim.lr", "1e-3"]
    main(["train", "siglip", "--data", "scenes?n=64", *rest, "--dry-run", "--out", str(tmp_path / "run")])
    told = " ".join(line for line in capsys.readouterr().out.splitlines() if line.startswith("note"))
    assert "--optim.muon-lr 0.0005" in told
    assert "--optim.lr" not in told


def test_a_smaller_limit_of_the_scale_holds_for_weights_whose_scale_is_smaller_still(
    words: Tokenizer, tmp_path: Path
) -> None:
    path = folder(words, "clip", tmp_path)
    stored = load_model(path)[0].head
    for limit, expected in ((30.0, 30.0), (5.0, float(stored.log_scale.detach().exp()))):  # a larger scale is kept
        model = begin("clip", path, words, {"max_scale": limit})[0]
        model.head.log_scale.data.fill_(9.0)
        model.head.clamp_()
        assert float(model.head.log_scale.detach().exp()) == pytest.approx(expected)


def test_what_is_loaded_is_counted_and_the_rest_named(words: Tokenizer, tmp_path: Path) -> None:
    path = folder(words, "own", tmp_path)
    said = begin("clip", path, words)[2]  # without the bias of SigLIP
    count = len(load_model(path)[0].state_dict()) - 1
    assert said == f"started from {path}: {count} tensors loaded; new: head.log_limit; left over: head.bias."
    recipe = start.settle(start.defaults("siglip", str(path), "debug"), words)
    wider = replace(recipe.model, text=replace(recipe.model.text, mlp=7), head=replace(recipe.model.head, dim=8))
    model = build(wider, preset("siglip"), seed=0)
    with pytest.raises(ValueError, match=r"mlp\.fc\.weight is \[64, 32\] instead of \[7, 32\]"):
        start.load(model, replace(recipe, model=wider))
