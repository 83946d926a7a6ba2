"""Methods made of a preset and components: settings, flags, that every mix trains, however its batch is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import mostly_slow
from kiloword.methods.defaults import MUON, default_recipe
from kiloword.methods.registry import PRESETS
from kiloword.model.heads import Scale
from kiloword.training.optimizer import Optimizer
from kiloword.training.step import backward
from kiloword.verify import suite
from kiloword.verify.batch import MethodChoice, batch
from kiloword.verify.suite import compare, made_otherwise
from parts import learner, model
from runs import whole_and_cut

SYCOCA: list[dict[str, Any]] = [  # rows of tables 5 to 7 of arXiv:2401.02137
    *({"guide": guide, "mim_mask": mask} for guide in ("none", "text") for mask in ("random", "attentive")),
    *({"caption_share": low, "mim_share": high} for low, high in ((0.25, 0.75), (0.75, 0.25))),
    {"mim_op": "drop", "caption_op": "token"},
]
MIXES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in PRESETS),
    *(("sycoca", said) for said in SYCOCA),
    ("coca", {"caption_mask": "attentive", "parallel": 0.75}),
    ("vqa", {"question_sees": "all"}),
    ("llip", {"per_token_projections": True, "patch_keys": True, "form": "gram"}),
    ("llip", {"pool": "learned_average"}),
    ("pcme++", {"variance_blocks": 1}),
    ("flair", {"other_texts": "all"}),
    *((f"{name}+caption", {}) for name in ("siglip", "llip", "clip-c", "siglip+gaussian")),
    *((f"{name}+gaussian+inclusion", {}) for name in ("siglip", "clip", "llip", "fff", "clip-c")),
    *((f"clip+{part}", {}) for part in ("contextual", "negatives", "clic", "superclass")),
    *((f"siglip+{part}", {}) for part in ("mim", "mined", "exact", "supcon", "self-distill", "matryoshka", "concepts")),
    *((f"siglip+{part}", {}) for part in ("attended", "maxsim", "stylistic", "compose+negatives", "softmax")),
    *((f"pcme++{part}", {}) for part in ("+inclusion", "+ppcl", "+deterministic")),
    *((f"prolip{part}", {}) for part in ("+matching", "+deterministic", "+clic")),
    ("clip+mined", {"mined": {"balance": True}}),
    ("siglip+exact", {"exact": {"balance": True}}),
    ("siglip+mined+supcon", {"supcon": {"form": "in"}}),
    ("llip+caption+mim", {}),
    ("coca+gaussian", {"parallel": 0.5}),
    ("clip+sub-captions+compose+reinforced", {}),
]


@pytest.mark.parametrize("name", ["clip", "cappa", "llip", "flair", "prolip-released", "siglip+gaussian"])
def test_features_alone_are_those_beside_tokens(name: str) -> None:
    made, images = model(name).double(), batch(method=name).images
    torch.testing.assert_close(made.image_features(images), made.encode_image(images)[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "settings"), MIXES)
def test_every_preset_and_mix_trains(name: str, settings: dict[str, Any]) -> None:
    """Every parameter gets a gradient, no cut of the batch changes it, and steps on the same images lower the loss."""
    choice = MethodChoice(name, settings)
    without = next(iter(suite.verify(choice, ())))
    assert without.passed, without
    reference = suite.gradients(choice)
    cut = compare("", suite.gradients(choice, suite.Way(micro=4, chunk=3)), reference)
    assert cut.passed, cut
    made, some, losses = learner(name, settings), batch(method=choice), []
    optimizer = Optimizer(made, replace(MUON, lr=1e-3, muon_lr=2e-3, warmup=0.0), 3)
    for step in range(3):
        losses.append(float(backward(made, [some])["loss"]))
        optimizer.step(step)
        made.zero_grad()
    assert losses[2] < losses[0]


WHOLE = ["clip-c", "siglip+mixup", "siglip+cutmix", "siglip+stylistic", "slip"]


@pytest.mark.parametrize("name", [*WHOLE, "own_methods:by_chance"])
def test_ranks_and_workers_change_no_batch_unless_by_global_randomness(name: str) -> None:
    assert (made_otherwise(name) == 0) == (name in WHOLE)


SMALL = {
    "clip+superclass": ("superclass.seen", {}),
    "siglip+self-distill": ("self_distill.centre", {"self_distill": {"large": 2, "prototypes": 24}}),
}


@pytest.mark.parametrize("name", mostly_slow(list(SMALL), 0))
def test_what_a_method_remembers_is_resumed(name: str, tmp_path: Path) -> None:
    base = default_recipe(name, "debug", ("scenes?n=64",))
    data = replace(base.data, tokenizer_vocab=300)
    remembered, settings = SMALL[name]
    run = replace(base, settings=settings, batch=8, micro=4, steps=4, data=data)
    whole = whole_and_cut(run, tmp_path)
    assert any(key.endswith(remembered) and value.any() for key, value in whole.items())


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [  # settings are the base's and each part's own
        ("clip+sigmoid", {"scale": 5.0, "sigmoid": {"scale": 2.0, "bias": -3.0}}, Scale(2.0, -3.0)),
        ("siglip+softmax", {"scale": 5.0, "bias": -3.0}, Scale(1 / 0.07, limit=100.0)),
        ("clip", {"fixed_scale": True, "scale": 5.0}, Scale(5.0, limit=100.0, trained=False)),
        ("siglip+supcon", {"supcon": {"fixed_scale": True}}, Scale(1 / 0.07, limit=100.0, trained=False)),
    ],
)
def test_the_scale_of_a_mix(name: str, settings: dict[str, Any], expected: Scale) -> None:
    head = model(name, settings).head
    assert head.scale == expected
    assert head.log_scale.requires_grad == expected.trained
    assert (head.bias is None) == (expected.bias is None)


# In fp64 on the small model and batch of `kiloword verify`, whose random numbers are keyed by seed and name.
FIRST = {
    "cappa": (6.763606129839178, 2.823099728441104),
    "clip": (5.129710858506959, 22.906762102301386),
    "clip-c": (5.129710858506959, 22.906762102301386),  # transforms are the loader's: the batch is that of clip
    "coca": (18.072267336972274, 21.724293009297458),
    "fff": (67.01135637065092, 254.24005973339516),
    "filip": (3.9891043260058274, 12.741697937372965),
    "flair": (15.450306137833634, 29.832590300578524),
    "llip": (18.928405093698224, 84.70418148536923),
    "pcme++": (0.48321062192125336, 2.6036498122373066),
    "prolip": (16.481092039051056, 108.33842346010374),
    "prolip-released": (15.628535193633104, 147.83028479561096),
    "siglip": (21.86456670395193, 84.94829901045206),
    "slip": (8.518813832416992, 23.167253159142135),
    "sycoca": (19.24634197983355, 21.69425192424175),
    "vqa": (6.64823753673459, 2.48472293248057),
}


@pytest.mark.parametrize("name", PRESETS)
def test_the_first_loss_and_gradient_of_a_preset_stay(name: str) -> None:
    """Another value is a change of the method, its initial weights or its draws: say so in CHANGELOG.md."""
    made = learner(name)
    loss = backward(made, [batch(method=name)])["loss"]
    square = sum(float(p.grad.square().sum()) for p in made.parameters() if p.grad is not None)
    assert (float(loss), square**0.5) == pytest.approx(FIRST[name], rel=1e-10, abs=0)
