"""ProLIP: is a caption's variance its generality, among captions of one length? (research/README.md)

`python -m research.generality --data tiny/train --val tiny/dev --out runs/generality`: class photos whose captions of
seven words name a node of the tree at any level, so that the photos that each is true of are known. The claim is
arXiv:2410.18857, section 5.3. `research.phrase_generality` asks the same of phrases of human captions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kiloword.api import Matcher
from research.arms import Arm, Experiment, main
from research.classes import ClassOptions, base, classified, tree_of
from research.evidence import Claim, Correlation
from research.prolip import HERE, SPREAD
from research.prompts import NEAREST, WAYS, prompted

STEPS, BATCH = 1000, 128
DROPPED, SPREAD_OUT = "words dropped", "spread"
ARMS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "siglip": ("siglip", {}),
    "prolip": ("prolip", {}),
    DROPPED: ("prolip", HERE),
    SPREAD_OUT: ("prolip", {**HERE, **SPREAD}),
}
GAUSSIANS, ENSEMBLE = ("prolip", DROPPED, SPREAD_OUT), "prompts ensemble"
RATES = {"siglip": 2.0, DROPPED: 2.0}  # times the default learning rate, of {0.5, 1, 2}: the best top-1 of seed 100


def arms(options: ClassOptions) -> list[Arm]:
    """The baseline, ProLIP as its preset, and with the two changes that made variances general on scenes."""

    def judge(matcher: Matcher) -> dict[str, Any]:
        metrics = classified(options, matcher) | prompted(matcher, options.val)
        return metrics if matcher.model.head.uncertainty is None else metrics | generality(matcher, options.val)

    def arm(name: str, method: str, settings: Mapping[str, Any]) -> Arm:
        recipe = replace(base(options, method, "", STEPS, BATCH), settings=dict(settings))
        return Arm(name=name, recipe=recipe, judge=judge, rate=RATES.get(name, 1.0))

    return [arm(name, *choice) for name, choice in ARMS.items()]


def generality(matcher: Matcher, val: str) -> dict[str, Any]:
    """The uncertainty of every node's caption, and the number of photos that it is true of, [N, 2]."""
    source = tree_of(val)
    captions = sorted(source.tree.nodes_of)
    counts = source.relevance(captions, range(len(source))).sum(1)
    uncertainty = matcher.uncertainty(matcher.encode_text(captions))
    pairs = [(float(u), int(n)) for u, n in zip(uncertainty.tolist(), counts.tolist(), strict=True) if n]
    return {"generality": pairs}


EXPERIMENT = Experiment(
    module="research.generality",
    title="Variances of captions and what they are true of",
    options=ClassOptions,
    arms=arms,
    columns={"top-1": "top1", **{f"{way}, noisy prompts": f"prompts {way} top1" for way in (*WAYS, NEAREST)}},
    claims=(
        *(Correlation(says="variance is generality", arm=arm, least=0.8, above=0.7) for arm in GAUSSIANS),
        *(
            Claim(says="top-1 is not 0.01 below siglip's", arm=arm, rivals=("siglip",), least=-0.01)
            for arm in GAUSSIANS
        ),
        *(
            Claim(says=way, arm=arm, rivals=(arm,), least=0.01, outcome=f"prompts {way}", rival_outcome=ENSEMBLE)
            for arm in GAUSSIANS
            for way in ("bprw 0", "bprw 5")
        ),
        *(
            Claim(
                says="no rule: labels without Gaussians",
                arm=arm,
                rivals=(arm,),
                least=0.01,
                outcome=f"prompts {NEAREST}",
                rival_outcome=f"prompts {rival}",
            )
            for arm, rival in (("siglip", "ensemble"), ("prolip", "bprw 5"))
        ),
    ),
)

if __name__ == "__main__":
    main(EXPERIMENT)
