"""SyCoCa over CoCa on photos and a frozen image tower: retrieval and generated captions (research/README.md).

`python -m research.sycoca_frozen --data flickr8k_224/train --val flickr8k_224/dev --images tokens/train tokens/dev
--out runs/sycoca-frozen`, without `--texts`: the text decoder needs words that the text tower learns. At masked places
the trunk's tokens are predicted. The claims are those of arXiv:2401.02137, tables 1, 2 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kiloword.api import Matcher
from kiloword.evaluation.caption import generated
from kiloword.evaluation.caption_metrics import score_captions
from kiloword.evaluation.task import Inputs
from kiloword.evaluation.tasks import CaptionTaskOptions
from kiloword.generation.options import GenerationOptions
from research.arms import Arm, Experiment, main
from research.evidence import Claim
from research.frozen import FrozenOptions, base, judge_dev, reading
from research.scenes_judge import RECALL

STEPS, BATCH = 200, 128
WINDOW = {"masks_from": 0.1, "masks_until": 0.9}  # the last tenth on whole images, as those that are judged
TOKENS = {**WINDOW, "mim_target": "tokens"}
RANDOM = {"caption_mask": "none", "mim_mask": "random"}
ARMS: dict[str, tuple[str, Mapping[str, Any]]] = {  # the rows of table 5
    "itc": ("clip", {}),
    "coca": ("coca", {}),
    "coca-attentive": ("coca", {"caption_mask": "attentive", **WINDOW}),
    "mim": ("sycoca", {"guide": "none", **RANDOM, **TOKENS}),
    "tg-mim random": ("sycoca", {**RANDOM, **TOKENS}),
    "sycoca": ("sycoca", TOKENS),
}
ITC_RATE, COCA_RATE, SYCOCA_RATE = 1.0, 1.0, 1.0  # times the default, of {0.5, 1, 2}: the best mR@1 of seed 100
RATES = {"clip": ITC_RATE, "coca": COCA_RATE, "sycoca": SYCOCA_RATE}


def arms(options: FrozenOptions) -> list[Arm]:
    """The rows of table 5 with equal tops of one block, as masked places must be told from others."""
    top = replace(base(replace(options, small=True), "sycoca"), steps=STEPS, batch=BATCH)

    def arm(name: str, method: str, settings: Mapping[str, Any]) -> Arm:
        recipe = replace(top, method=method, settings=dict(settings))
        return Arm(name=name, recipe=recipe, judge=partial(judge, options), rate=RATES[method])

    return [arm(name, *trained) for name, trained in ARMS.items()]


def judge(options: FrozenOptions, matcher: Matcher) -> dict[str, Any]:
    """`judge_dev`; for models that write also the metrics of captions, and CIDEr-D of every photo: ciders [I]."""
    metrics = judge_dev(options, matcher)
    if "text_decoder" not in matcher.model.more:
        return metrics
    reader, source = reading(options, matcher)
    greedy = CaptionTaskOptions(generate=GenerationOptions(method="greedy"))
    described = generated(Inputs(reader, source), greedy)
    scored = score_captions([one.caption for one in described], [one.references for one in described])
    return {**metrics, **scored.values, "ciders": scored.cider}


EXPERIMENT = Experiment(
    module="research.sycoca_frozen",
    title="SyCoCa over CoCa on a frozen image tower",
    options=FrozenOptions,
    arms=arms,
    columns={"mR@1": "mr1", "CIDEr": "cider", "distinct": "distinct", **RECALL},
    claims=(
        Claim(says="retrieval", arm="sycoca", rivals=("coca",), least=0.01),
        Claim(says="generated captions", arm="sycoca", rivals=("coca",), least=0.02, outcome="ciders"),
    ),
)

if __name__ == "__main__":
    main(EXPERIMENT)
