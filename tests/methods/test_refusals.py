"""What cannot be is refused with one sentence: settings out of range, parts that do not fit, shapes that do not fit."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from kiloword.config.recipes import ModelConfig, TrunkConfig
from kiloword.config.settings import Nothing
from kiloword.methods.method import SLOTS, Between, Component, Method, Ramp
from kiloword.methods.registry import PRESETS, components, preset
from parts import learner, size

NAN = math.nan
VALUES: list[tuple[Any, str]] = [  # of settings of methods, "+part.setting" of a component's, that do not take it
    (NAN, "coca.caption_weight coca.contrast_weight coca.smoothing sycoca.mim_weight fff.p1_text llip.temperature"),
    (NAN, "pcme++.pseudo prolip.vib prolip.eps prolip.log_var prolip.bias"),
    (math.inf, "coca.contrast_weight llip.temperature prolip.image_in_text"),
    (0.0, "coca.caption_weight sycoca.mim_weight fff.p1 llip.temperature pcme++.scale prolip.c"),
    (0, "fff.bias_batches llip.k prolip.masked_every siglip+gaussian+inclusion.masked_every"),
    (-1.0, "coca.contrast_weight sycoca.caption_weight llip.temperature pcme++.pseudo prolip.masked prolip.mask_words"),
    (-1.0, "prolip.spread prolip.scale prolip+deterministic.scale"),
    (1.0, "coca.smoothing vqa.smoothing"),
    (1.5, "coca.parallel coca.masks_from clip-c.rho fff.p3 prolip.drop_patches"),
    ("none", "coca.caption_op coca.similarity sycoca.mim_mask flair.other_texts prolip.inclusion_form clip-c.partner"),
    (1, "clip-c.alpha vqa.sees prolip.epsilon clip+sigmoid.bais"),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for value, names in VALUES for name in names.split()])
def test_settings_out_of_range(name: str, value: Any) -> None:
    method, _, setting = name.rpartition(".")
    part = method.replace("pcme++", "").rpartition("+")[2] if "+" in method.replace("pcme++", "") else ""
    with pytest.raises(ValueError, match=setting):
        preset(method, {part: {setting: value}} if part else {setting: value})


TOGETHER: list[tuple[str, dict[str, Any], str]] = [  # method, settings, what must be named
    ("fff", dict.fromkeys(("image_text", "image_image", "text_text"), False), "off"),
    ("coca", {"masks_from": 0.5, "masks_until": 0.5}, "0.5"),
    ("sycoca", {"mim_target": "tokens", "norm_pix": True}, "norm_pix"),
    ("siglip+maxsim", {"maxsim": {"reduce": "sum"}}, "sides text"),
    ("clip+reinforced", {"reinforced": {"teachers": ("a", "a")}}, "different names"),
    ("clip+reinforced", {"reinforced": {"teachers": ("a", "b", "c"), "scales": (1.0, 2.0)}}, "3 teachers"),
    ("clip+reinforced", {"reinforced": {"weight": 1.0}}, "weight"),
    ("clip+reinforced", {"reinforced": {"scales": (0.0,)}}, "scale"),
    ("siglip+self-distill", {"self_distill": {"least": 0.5}}, "ascending"),
    ("siglip+concepts", {"concepts": {"table": "none.parquet"}}, "none.parquet"),
    ("coca+sigmoid+bias-search", {"contrast_weight": 0.0}, "coca has no pair loss"),
    ("filip+sigmoid", {"whole": 0.5}, "several ways"),
    ("fff+maxsim", {"maxsim": {"whole": 1.0}}, "before training"),
]
NAMES = {  # what must be named, of these
    "Did you mean siglip": "siglop",
    "Did you mean clip": "clp+softmax",
    "Did you mean softmax": "clip+softmx pcme+++softmx",
    "module:name": "siglip+nothing",
    "cannot load": "json:preset ../mine.py:preset .mine:preset :preset siglip+nowhere:part",
    "both fill": "clip+sigmoid+softmax pcme+++matching+ppcl siglip+mined+exact siglip+compose+mixup",
    "already": "clip-c+mixup slip+simclr pcme+++gaussian fff+bias-search prolip+gaussian prolip+inclusion",
    "omit": "coca+caption sycoca+mim prolip+gaussian prolip+inclusion",
    "pair loss": "cappa+softmax vqa+mined vqa+maxsim cappa+clic",
    "answers": "vqa+superclass",
    "transforms": "vqa+compose vqa+sub-captions",
    "sigmoid": "clip+fff siglip+fff+softmax pcme+++fff clip+attended",
    "no.* bias": "clip+bias-search filip+bias-search clip+concepts",
    "several ways": "flair+softmax filip+gaussian",
    "matryoshka": "siglip+maxsim+matryoshka",
    "bias-search": "flair+bias-search siglip+bias-search+attended",
    "contextual": "llip+contextual flair+contextual",
    "one vector": "llip+matryoshka prolip+matryoshka pcme+++matryoshka llip+attended prolip+attended llip+maxsim "
    "prolip+maxsim siglip+gaussian+maxsim prolip+concepts llip+gaussian+deterministic prolip+deterministic+contextual",
    r"add \+gaussian": "siglip+inclusion clip+matching siglip+ppcl",
    "Gaussians": "clip+deterministic",
    "'settings'": "own_methods:bare",
    "Pairs": "own_methods:of_pairs",
    "Nowhere": "own_methods:undefined",
    "Method": "own_methods:number",
    "Component": "siglip+own_methods:number",
    "missing": "own_methods:missing siglip+own_methods:missing",
}
TOGETHER += [(name, {}, word) for word, listed in NAMES.items() for name in listed.split()]
TOGETHER += [
    (name, {}, f"{part}.* one vector")
    for part in ("clic", "concepts", "negatives", "reinforced")
    for pooling in ("attended", "contextual", "maxsim")
    for name in (f"siglip+{part}+{pooling}", f"siglip+{pooling}+{part}")
]


@pytest.mark.parametrize(("method", "settings", "word"), TOGETHER)
def test_what_does_not_fit_together(method: str, settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        preset(method, settings)


ATTENTIONAL = {"head__image_pool": "attentional"}
TRUNK = TrunkConfig(name="lite", width=8, grid=2)
RESNETS_LACK = ("llip", "prolip", "sycoca")
BUILT: list[tuple[str, dict[str, Any], ModelConfig, str]] = [
    ("siglip+matryoshka", {"matryoshka": {"smallest": 5000}}, size(), "5000"),
    ("llip", {"heads": 3}, size(), "heads 3"),
    ("clip+self-distill", {}, size(image__trunk=TRUNK), "trunk"),
    ("clip+self-distill", {}, size(image__tower="resnet"), "transformer"),
    *((name, {}, size(image__tower="resnet", head__image_pool="mean"), "transformer") for name in RESNETS_LACK),
    ("siglip+concepts", {}, size(**ATTENTIONAL), "image-pool attentional"),
    ("pcme++", {"variance_blocks": 3}, size(), "3 blocks"),
    ("prolip+caption", {}, size(), "settings.bidirectional False"),
    ("vqa", {}, size(text__causal=False), "word by word"),
    ("coca", {}, size(text__pad_to_context=True), "pads"),
    ("coca", {}, size(**ATTENTIONAL, head__pool_queries=0), "pool_queries"),
    ("coca", {"caption_mask": "random"}, size(image__size=8, image__patch=8), "one patch"),
    *(("coca", {"caption_mask": "random", "caption_share": s}, size(), "caption_share") for s in (0.0, 1.0, NAN)),
    ("coca", {"caption_mask": "attentive"}, size(**ATTENTIONAL, head__pool_width=16), "random masks"),
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


@pytest.mark.parametrize("name", components())
def test_a_component_fits_some_method_and_is_named_by_the_others(name: str) -> None:
    said = []
    for base in PRESETS:
        try:
            preset(f"{base}+{name}")
        except ValueError as error:
            said.append(str(error))
    assert len(said) < len(PRESETS)
    assert all(name in sentence for sentence in said)


def test_a_component_names_a_slot_as_method_does() -> None:
    assert set(SLOTS) <= Method.__dataclass_fields__.keys()
    with pytest.raises(ValueError, match="pair_loss"):
        Component("pair loss", "loss of pairs", Nothing, lambda method, settings: method)  # type: ignore[arg-type]


def test_a_method_of_a_user_is_found_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is that of the installed command, which does not look there."""
    (tmp_path / "mine.py").write_text("from own_methods import plain as method")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert preset("mine:method").contrasts.keys() == {"texts"}
