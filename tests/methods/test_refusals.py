"""What cannot be is refused with one sentence: settings out of range, parts that do not fit, shapes that do not fit."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from kiloword.config.recipes import ModelConfig, TrunkConfig
from kiloword.methods.method import Between, Ramp
from kiloword.methods.registry import components, names, preset
from parts import learner, size

NAN = math.nan
SETTINGS: list[tuple[str, str, list[Any]]] = [  # method, setting, values of which none is taken
    ("coca", "caption_weight", [0.0, NAN]),
    ("coca", "contrast_weight", [-1.0, NAN, math.inf]),
    ("coca", "smoothing", [1.0, NAN]),
    ("coca", "decoder_depth", [-1]),
    ("coca", "caption_mask", ["low"]),
    ("coca", "caption_op", ["blur"]),
    ("coca", "similarity", ["euclid"]),
    ("coca", "parallel", [1.5]),
    ("coca", "masks_from", [1.5]),
    ("sycoca", "mim_weight", [0.0, NAN]),
    ("sycoca", "image_decoder_depth", [-2]),
    ("sycoca", "guide", ["image"]),
    ("sycoca", "mim_mask", ["none"]),
    ("sycoca", "caption_weight", [-1.0]),
    ("vqa", "smoothing", [1.0]),
    ("vqa", "decoder_depth", [-1]),
    ("vqa", "sees", [1]),
    ("clip-c", "rho", [1.2]),
    ("clip-c", "partner", ["nearest"]),
    ("clip-c", "alpha", [1]),
    ("fff", "p1", [0.0]),
    ("fff", "p3", [1.5]),
    ("fff", "p1_text", [NAN]),
    ("fff", "bias_batches", [0]),
    ("flair", "other_texts", ["two"]),
    ("llip", "temperature", [0.0, -1.0, math.inf, NAN]),
    ("llip", "k", [0]),
    ("pcme++", "scale", [0.0]),
    ("pcme++", "pseudo", [-0.1, NAN]),
    ("prolip", "masked", [-1.0]),
    ("prolip", "vib", [NAN]),
    ("prolip", "image_in_text", [math.inf]),
    ("prolip", "drop_patches", [1.5]),
    ("prolip", "mask_words", [-0.1]),
    ("prolip", "masked_every", [0]),
    ("prolip", "c", [0.0]),
    ("prolip", "spread", [-1.0]),
    ("prolip", "eps", [NAN]),
    ("prolip", "log_var", [NAN, 1000.0]),
    ("prolip", "scale", [-1.0]),
    ("prolip", "bias", [NAN]),
    ("prolip", "inclusion_form", ["printed"]),
    ("prolip", "epsilon", [-10.0]),
    ("prolip+deterministic", "deterministic.weight", [0.0]),
    ("prolip+deterministic", "deterministic.scale", [-1.0]),
    ("clip+sigmoid", "sigmoid.bais", [-3.0]),
    ("siglip+gaussian+inclusion", "inclusion.masked_every", [0]),
]


@pytest.mark.parametrize(
    ("method", "name", "value"), [(method, name, value) for method, name, values in SETTINGS for value in values]
)
def test_settings_out_of_range(method: str, name: str, value: Any) -> None:
    part, _, own = name.rpartition(".")
    settings = {part: {own: value}} if part else {name: value}
    with pytest.raises(ValueError, match=own):
        preset(method, settings)


TOGETHER: list[tuple[str, dict[str, Any], str]] = [  # method, settings, what must be named
    ("fff", dict.fromkeys(("image_text", "image_image", "text_text"), False), "off"),
    ("coca", {"masks_from": 0.5, "masks_until": 0.5}, "0.5"),
    ("sycoca", {"masks_from": 0.75, "masks_until": 0.25}, "0.25"),
    ("sycoca", {"mim_target": "tokens", "norm_pix": True}, "norm_pix"),
    ("siglip+maxsim", {"maxsim": {"reduce": "sum"}}, "sides text"),
    ("clip+reinforced", {"reinforced": {"teachers": ("a", "a")}}, "different names"),
    ("clip+reinforced", {"reinforced": {"teachers": ("a", "b", "c"), "scales": (1.0, 2.0)}}, "3 teachers"),
    ("clip+reinforced", {"reinforced": {"weight": 1.0}}, "weight"),
    ("clip+reinforced", {"reinforced": {"scales": (0.0,)}}, "scale"),
    ("siglip+self-distill", {"self_distill": {"least": 0.5}}, "ascending"),
    ("clip+text-crops", {"text_crops": {"least": 0.5}}, "ascending"),
    ("siglip+concepts", {"concepts": {"table": "none.parquet"}}, "none.parquet"),
    # names
    ("siglop", {}, "Did you mean siglop:preset"),
    ("clp+softmax", {}, "Did you mean clip"),
    ("clip+softmx", {}, "Did you mean softmax"),
    ("pcme+++softmx", {}, "Did you mean softmax"),
    ("siglip+nothing", {}, "module:name"),
    ("json:preset", {}, "hides json.py"),
    # one of each kind
    ("clip+sigmoid+softmax", {}, "sigmoid and softmax"),
    ("pcme+++matching+ppcl", {}, "matching and ppcl"),
    ("siglip+mined+exact", {}, "'positives'"),
    ("siglip+compose+mixup", {}, "'transforms'"),
    ("clip-c+mixup", {}, "already"),
    ("slip+simclr", {}, "already"),
    ("coca+caption", {}, r"omit \+caption"),
    ("sycoca+mim", {}, r"omit \+mim"),
    ("pcme+++gaussian", {}, "already"),
    ("prolip+gaussian", {}, r"omit \+gaussian"),
    ("prolip+inclusion", {}, r"omit \+inclusion"),
    ("fff+bias-search", {}, "already"),
    # a pair loss that something needs
    ("cappa+softmax", {}, "cappa has no pair loss"),
    ("vqa+mined", {}, "vqa has no pair loss"),
    ("vqa+maxsim", {}, "pair loss"),
    ("cappa+clic", {}, "pair loss"),
    ("cappa+text-crops", {}, "coca for cappa"),
    ("coca+sigmoid+bias-search", {"contrast_weight": 0.0}, "coca has no pair loss"),
    ("vqa+superclass", {}, "answers"),
    ("vqa+compose", {}, "transforms"),
    ("vqa+sub-captions", {}, "transforms"),
    ("clip+fff", {}, r"add \+sigmoid"),
    ("siglip+fff+softmax", {}, "sigmoid"),
    ("pcme+++fff", {}, "sigmoid"),
    ("clip+attended", {}, "sigmoid"),
    ("clip+bias-search", {}, "no bias"),
    ("filip+bias-search", {}, "no bias"),
    ("clip+concepts", {}, "no bias"),
    # several scores of a pair
    ("flair+softmax", {}, "several ways"),
    ("filip+sigmoid", {"whole": 0.5}, "several ways"),
    ("filip+gaussian", {}, "several ways"),
    ("siglip+maxsim+matryoshka", {}, "matryoshka"),
    ("flair+bias-search", {}, "bias-search"),
    ("siglip+bias-search+attended", {}, "bias-search"),
    ("fff+maxsim", {"maxsim": {"whole": 1.0}}, "before training"),
    # poolings and Gaussians
    *((f"{name}+matryoshka", {}, "one vector") for name in ("llip", "prolip", "pcme++")),
    *((f"{name}+contextual", {}, "contextual") for name in ("llip", "flair")),
    *((f"{name}+{part}", {}, "one vector") for name in ("llip", "prolip") for part in ("attended", "maxsim")),
    ("siglip+gaussian+maxsim", {}, "one vector"),
    ("prolip+concepts", {}, "one vector"),
    ("siglip+inclusion", {}, r"add \+gaussian"),
    ("clip+matching", {}, r"add \+gaussian"),
    ("siglip+ppcl", {}, r"add \+gaussian"),
    ("clip+deterministic", {}, "no Gaussians"),
    ("llip+gaussian+deterministic", {}, "one vector"),
    ("prolip+deterministic+contextual", {}, "one vector"),
    *(
        (name, {}, f"{part}.* one vector")
        for part in ("clic", "concepts", "negatives", "reinforced", "text-crops")
        for pooling in ("attended", "contextual", "maxsim")
        for name in (f"siglip+{part}+{pooling}", f"siglip+{pooling}+{part}")
    ),
]


@pytest.mark.parametrize(("method", "settings", "word"), TOGETHER)
def test_what_does_not_fit_together(
    method: str, settings: dict[str, Any], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("siglop.py", "json.py"):  # of which the second is one of the standard library too
        Path(file).touch()
    with pytest.raises(ValueError, match=word):
        preset(method, settings)


ATTENTIONAL = {"head__image_pool": "attentional"}
TRUNK = TrunkConfig(name="lite", width=8, grid=2)
BUILT: list[tuple[str, dict[str, Any], ModelConfig, str]] = [
    ("siglip+matryoshka", {"matryoshka": {"smallest": 5000}}, size(), "5000"),
    ("llip", {"heads": 3}, size(), "heads 3"),
    ("flair", {"heads": 3}, size(), "heads 3"),
    ("clip+text-crops", {"text_crops": {"heads": 3}}, size(), "heads 3"),
    *((f"clip+{part}", {}, size(image__trunk=TRUNK), "trunk") for part in ("self-distill", "text-crops")),
    ("clip+text-crops", {}, size(text__trunk=TRUNK), "trunk"),
    *((f"clip+{part}", {}, size(image__tower="resnet"), "transformer") for part in ("self-distill", "text-crops")),
    ("siglip+concepts", {}, size(**ATTENTIONAL), "image-pool attentional"),
    ("pcme++", {"variance_blocks": 3}, size(), "3 blocks"),
    ("prolip+caption", {}, size(), "settings.bidirectional False"),
    ("vqa", {}, size(text__causal=False), "word by word"),
    ("coca", {}, size(text__pad_to_context=True), "pads"),
    ("coca", {}, size(**ATTENTIONAL, head__pool_queries=0), "pool_queries"),
    ("coca", {"caption_mask": "random"}, size(image__size=8, image__patch=8), "one patch"),
    *(("coca", {"caption_mask": "random", "caption_share": s}, size(), "caption_share") for s in (0.0, 1.0, NAN)),
    ("coca", {"caption_mask": "attentive"}, size(**ATTENTIONAL, head__pool_width=16), "random masks"),
    ("clip+mim", {}, size(**ATTENTIONAL, head__pool_width=16), "random masks"),
    ("sycoca", {"mim_share": 1.5}, size(), "mim_share"),
    ("sycoca", {"mim_target": "tokens"}, size(), "frozen trunk"),
]


@pytest.mark.parametrize(("method", "settings", "shape", "word"), BUILT)
def test_shapes_that_do_not_fit(method: str, settings: dict[str, Any], shape: ModelConfig, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        learner(method, settings, shape)


def test_what_a_refusal_says_to_do_is_taken() -> None:
    learner("prolip+caption", {"bidirectional": False})
    for name in ("coca", "clip+mim"):
        random = {"caption_mask": "random"} if name == "coca" else {"mim": {"mim_mask": "random"}}
        learner(name, random, size(**ATTENTIONAL, head__pool_width=16))
    assert preset("cappa+negatives+softmax", {"contrast_weight": 1.0}).contrasts.keys() == {"negatives"}
    preset("flair+softmax", {"whole": 0.0})


@pytest.mark.parametrize("made", [Ramp, Between])
@pytest.mark.parametrize(("first", "last"), [(0.5, 0.5), (-0.1, 0.5), (0.5, 1.1)])
def test_a_weight_changes_within_the_run(made: Any, first: float, last: float) -> None:
    with pytest.raises(ValueError, match="ascending"):
        made(1.0, first, last)


@pytest.mark.slow
def test_every_component_fits_some_method_and_says_what_it_is() -> None:
    for name, component in components().items():
        assert component.summary
        said = [refusal(f"{base}+{name}") for base in names()]
        assert None in said, f"no method takes {name}"
        assert all(name in sentence for sentence in said if sentence is not None), said


def refusal(method: str) -> str | None:
    """What is said of a method that cannot be; None of one that can."""
    try:
        preset(method)
    except ValueError as error:
        return str(error)
    return None


OWN = """
from dataclasses import replace
from kiloword.methods import siglip
from kiloword.types import Pairs

def good():
    return replace(siglip.preset(siglip.Settings()), name="good")

def bare(settings):
    return good()

def number():
    return 3

def positives(pairs: Pairs):
    return good()

def undefined(settings: "Nowhere"):
    return good()

part = 3
"""


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("own:bare", "'settings'"),
        ("own:positives", "Pairs"),
        ("own:undefined", "'settings'"),
        ("own:number", "Method"),
        ("own:missing", "'missing'"),
        ("siglip+own:part", "Component"),
        ("siglip+own:missing", "own:missing"),
        ("own:good", ""),
    ],
)
def test_a_user_s_own_is_found_in_the_working_folder_or_refused(
    name: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is that of the installed command, which does not look there."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    if not word:
        assert preset(name).name == "good"
        return
    with pytest.raises(ValueError, match=word):
        preset(name)
