"""The whole conformity suite over every preset and over mixes of the papers; and mixes that are cut and go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cases import mostly_slow
from kiloword.config.recipes import Recipe
from kiloword.data.open import open_source
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import PRESETS, preset
from kiloword.stores.embed import embed
from kiloword.stores.teachers import open_teacher
from kiloword.training.loop import RunOptions, train
from kiloword.verify.batch import MethodChoice
from kiloword.verify.suite import verify
from runs import whole_and_cut

MIXES = (  # over up to four ranks, as the presets are
    *("llip+compose+mined", "llip+simclr", "llip+superclass", "fff+exact+compose"),
    *("prolip+simclr", "prolip+clic", "prolip+self-distill+superclass"),
    *("siglip+gaussian+caption+mim", "siglip+concepts+compose", "clip+matryoshka+simclr", "filip+simclr+compose"),
    *("clip+reinforced+negatives", "siglip+maxsim"),
)
PAIRED = (  # over two
    *("llip+compose", "llip+mined", "llip+fff", "clip+contextual+mixup", "llip+sub-captions"),
    *("siglip+stylistic", "siglip+supcon", "clip+mined", "clip+compose+clic+negatives"),
    *("llip+gaussian", "llip+gaussian+inclusion", "clip+gaussian+matching", "pcme+++ppcl+mixup"),
    *("prolip+deterministic", "pcme+++deterministic", "sycoca+contextual", "coca+superclass"),
    *("siglip+clic", "coca+clic", "flair+simclr", "flair+sub-captions", "siglip+matryoshka"),
    *("siglip+concepts", "coca+sigmoid+concepts", "clip+maxsim+simclr", "coca+maxsim"),
    *("siglip+compose+superclass+negatives", "siglip+reinforced+self-distill", "coca+sub-captions"),
    MethodChoice("sycoca", {"parallel": 0.5}),
    MethodChoice("llip+caption", {"caption": {"parallel": 0.5}}),
    MethodChoice("flair", {"other_texts": "all"}),
    MethodChoice("pcme++", {"variance_blocks": 1}),
    MethodChoice("llip", {"form": "gram", "k": 3, "heads": 4}),
    MethodChoice("siglip+mined+supcon", {"supcon": {"form": "in"}}),
)
DATA = "scenes?n=64&captions=3"
QUIET = RunOptions(quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*PRESETS, *MIXES, *PAIRED])
def test_every_check_of_every_method(method: str | MethodChoice) -> None:
    ranks = (1, 2) if method in PAIRED else (1, 2, 4)
    failed = [check for check in verify(method, ranks) if not check.passed]
    assert not failed


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A feature store of a hardly trained model: which pairs it finds does not matter here."""
    folder = tmp_path_factory.mktemp("teacher")
    train(recipe("siglip", (), steps=2), folder / "run", options=QUIET)
    teacher = open_teacher(str(folder / "run" / "model"), "cpu")
    embed(teacher, open_source(DATA), folder / "features")
    return folder / "features"


def recipe(method: str, features: tuple[str, ...], steps: int = 8) -> Recipe:
    base = default_recipe(method, "debug", (DATA,))
    return replace(
        base, data=replace(base.data, tokenizer_vocab=300, features=features), batch=16, micro=8, steps=steps, seed=5
    )


@pytest.mark.parametrize(
    "method", mostly_slow(["clip-c", "fff", "llip+compose+mined", "prolip", "pcme++", "sycoca", "slip"], 4)
)
def test_a_cut_run_goes_on_as_if_nothing_had_been(method: str, features: Path, tmp_path: Path) -> None:
    whole_and_cut(recipe(method, (str(features),) if preset(method).needs else ()), tmp_path)


def test_what_a_method_needs_and_the_data_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()  # images are also looked for beside the table's folder
    (tmp_path / "in" / "t.csv").write_text("image,caption\n" + "".join(f"{n}.png,a star\n" for n in range(20)))
    for method, sources, says in (
        ("siglip+mined", (DATA,), r"precomputed features named 'teacher'.*kiloword embed.*--features"),
        ("siglip+exact", (str(tmp_path / "in" / "t.csv"),), "no ground truth"),
        ("siglip+exact", ("scenes?n=32&levels=1", "scenes?n=32&levels=3"), "only source"),
    ):
        some = recipe(method, ())
        with pytest.raises(ValueError, match=says):
            train(replace(some, data=replace(some.data, sources=sources)), tmp_path / "out", options=QUIET)
