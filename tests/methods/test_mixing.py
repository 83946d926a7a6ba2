"""Methods made of a preset and components: names, settings, flags, and what may not go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from kiloword.cli.describe import slots
from kiloword.cli.main import main
from kiloword.cli.words import mixed
from kiloword.config.recipes import sizes
from kiloword.losses.pairs import sigmoid_loss, softmax_loss
from kiloword.methods.registry import components, names, preset
from kiloword.models.build import build

DEBUG = sizes()["debug"]


def test_a_piece_replaces_its_slot_and_no_other() -> None:
    mix, base = preset("clip+sigmoid"), preset("clip")
    assert (mix.name, mix.pair_loss, base.pair_loss) == ("clip+sigmoid", sigmoid_loss, softmax_loss)
    same = set(slots(mix).items()) & set(slots(base).items())
    assert {name for name, _ in same} == set(slots(base)) - {"method", "pair loss"}


def test_a_module_that_hides_that_of_this_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("json.py").touch()  # of the standard library, which Python finds first
    with pytest.raises(ValueError, match=r"cannot load method json:preset .*json.__init__\.py hides json\.py of this"):
        preset("json:preset")


def test_a_replaced_pair_loss_is_named_before_the_first_step() -> None:
    (note,) = preset("siglip+softmax").notes[len(preset("siglip").notes) :]
    assert note(cast(Any, None)).startswith("softmax replaces the pair loss of siglip: settings that only that loss ")
    assert len(preset("siglip+compose").notes) == len(preset("siglip").notes)


def test_settings_of_a_mix_are_the_base_s_and_its_pieces_own() -> None:
    method = preset("clip+sigmoid", {"scale": 5.0, "sigmoid": {"scale": 2.0, "bias": -3.0}})
    head = build(DEBUG, method, 0).head
    assert head.bias is not None
    assert (head.log_scale.exp().item(), head.bias.item()) == (pytest.approx(2.0), -3.0)


def test_a_scale_that_softmax_limits_is_limited_in_a_mix_too() -> None:
    head = build(DEBUG, preset("siglip+softmax"), 0).head
    assert head.bias is None
    head.log_scale.data.fill_(9.0)
    head.clamp_()
    assert head.log_scale.exp().item() == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clip+softmx", "cannot be mixed with 'softmx'.*Did you mean softmax"),
        ("clip+sigmoid+softmax", "sigmoid and softmax both fill the slot 'pair loss' of clip"),
        ("pcme+++softmx", "pcme\\+\\+ cannot be mixed with 'softmx'.*Did you mean softmax"),
        ("clp+softmax", "unknown method 'clp'.*Did you mean clip"),
        ("siglop", "unknown method 'siglop'.*Did you mean siglop:preset, of siglop.py in this folder?"),
    ],
)
def test_what_cannot_mix_gets_a_sentence(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("siglop.py").touch()
    with pytest.raises(ValueError, match=message):
        preset(name)


@pytest.mark.parametrize("part", ["clic", "concepts", "negatives", "reinforced", "text-crops"])
@pytest.mark.parametrize("pooling", ["attended", "contextual", "maxsim"])
def test_a_pooling_that_does_not_fit_is_refused_in_any_order(part: str, pooling: str) -> None:
    for name in (f"siglip+{part}+{pooling}", f"siglip+{pooling}+{part}"):
        with pytest.raises(ValueError, match=rf"{part} compares one vector per image with one per"):
            preset(name)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cappa+softmax", {}, "cappa has no pair loss, which softmax would change"),
        ("vqa+mined", {}, "vqa has no pair loss, which mined would change"),
        ("coca+sigmoid+bias-search", {"contrast_weight": 0.0}, "coca has no pair loss, which sigmoid would change"),
        ("cappa+clic", {}, "cappa has not: without a pair loss"),
        ("cappa+text-crops", {}, "cappa has not: without a pair loss.*such as coca for cappa"),
        ("vqa+negatives", {}, "vqa has not: without a pair loss"),
        ("vqa+superclass", {}, "texts of vqa are answers"),
        ("flair+softmax", {}, "flair scores pairs in several ways, each with a loss, of which softmax would keep one"),
        ("filip+sigmoid", {"whole": 0.5}, "filip scores pairs in several ways"),
        ("filip+bias-search", {}, "filip has no bias for bias-search"),
        ("flair+bias-search", {}, "of which bias-search would prepare one"),
        ("siglip+bias-search+attended", {}, "of which bias-search would prepare one"),
        ("slip+simclr", {}, "slip has the contrast simclr already"),
    ],
)
def test_what_would_not_be_trained_is_refused(name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(name, settings)


def test_a_pair_loss_that_is_trained_takes_components() -> None:
    assert preset("cappa+negatives+softmax", {"contrast_weight": 1.0}).contrasts.keys() == {"negatives"}
    assert preset("flair+softmax", {"whole": 0.0}).pair_loss is softmax_loss


def test_unknown_settings_of_a_piece_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sigmoid.*bais"):
        preset("clip+sigmoid", {"sigmoid": {"bais": -3.0}})


def test_flags_name_components() -> None:
    assert mixed("clip", ["--pair-loss", "sigmoid", "--out", "x"]) == "clip+sigmoid"
    assert mixed("clip", ["--pair_loss=sigmoid"]) == "clip+sigmoid"
    assert mixed("clip", ["--out", "x"]) == "clip"
    with pytest.raises(ValueError, match="--transforms is 'sigmoid': expected"):
        mixed("clip", ["--transforms", "sigmoid"])
    assert mixed("clip", ["--terms", "caption", "mim"]) == "clip+caption+mim"
    with pytest.raises(ValueError, match="--terms has no value"):
        mixed("clip", ["--terms", "--out", "x"])
    with pytest.raises(ValueError, match="--contrasts has no value: expected"):
        mixed("clip", ["--contrasts", "--out", "x"])


def test_a_mix_trains_from_the_command_line_and_its_model_loads(tmp_path: Path) -> None:
    run = ["--data", "scenes?n=64", "--size", "debug", "--batch", "8", "--steps", "2", "--vocab", "300"]
    main(["train", "clip", "--pair-loss", "sigmoid", "--settings.sigmoid.bias", "-4", *run, "--out", str(tmp_path)])
    file = json.loads((tmp_path / "model" / "config.json").read_text())
    assert file["method"] == "clip+sigmoid"
    assert file["settings"]["sigmoid"]["bias"] == -4
    main(["score", str(tmp_path / "model"), "--images", str(_image(tmp_path)), "--texts", "a red star"])


def _image(folder: Path) -> Path:
    from PIL import Image

    Image.new("RGB", (40, 30), "red").save(folder / "red.png")
    return folder / "red.png"


@pytest.mark.slow
def test_every_piece_fits_some_method_and_says_what_it_is() -> None:
    for name, component in components().items():
        assert component.summary
        said = [_refusal(f"{base}+{name}") for base in names()]
        assert None in said, f"no method takes {name}"
        assert all(name in sentence for sentence in said if sentence is not None), said


def _refusal(method: str) -> str | None:
    """What is said of a method that cannot be; None of one that can."""
    try:
        preset(method)
    except ValueError as error:
        return str(error)
    return None
