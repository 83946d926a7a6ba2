"""Which prompts a model believes when most of them are wrong: accuracy of every way to weigh them, and the weights.

`python -m research.bprw --model runs/a/model runs/b/model`; the claim is arXiv:2410.18857, table 3. On the
class tasks of scenes, where right prompts stand beside wrong ones: of another class, of another attribute, negated.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from kiloword.api import Matcher, load
from kiloword.data.open import open_source
from kiloword.data.scenes.world import BACKGROUNDS, COLOURS, FILLS, TASKS
from kiloword.evaluation.command import labels
from kiloword.evaluation.features import Classes, Seen, labelled
from kiloword.evaluation.prompts import Chosen, Prompts, choose
from kiloword.evaluation.task import Inputs
from kiloword.evaluation.tasks import PromptOptions, Way
from kiloword.evaluation.zeroshot import encoded, figures
from kiloword.files import write_json
from kiloword.terminal import say
from research.arms import in_one_message

PROGRAM = "python -m research.bprw"
KINDS = ("right", "another class", "another attribute", "negated")
OTHERS = 3  # prompts that name another class: one fewer than the right ones, or nobody could tell
SHOTS = 5  # labelled images a class
WAYS: dict[str, tuple[Way, PromptOptions]] = {
    "uniform": ("ensemble", PromptOptions()),
    "filter": ("filter", PromptOptions()),
    "top-k": ("topk", PromptOptions()),
    "bprw, K = 0": ("bprw", PromptOptions()),
    f"bprw, K = {SHOTS}": ("bprw", PromptOptions(shots=SHOTS)),
}
RIGHT = "right prompts alone"

Found = dict[str, dict[str, float]]
"""Way -> accuracy, and the mean weight of a prompt of each kind."""


@dataclass(frozen=True, kw_only=True)
class BprwOptions:
    model: tuple[str, ...]  # folders of models with Gaussians; several of one recipe and other seeds
    tasks: tuple[str, ...] = tuple(TASKS)
    n: int = 1000  # test images of each task
    draws: int = 5  # choices of labelled images and of noise, over which every figure is a mean
    batch: int = 256
    device: str = "cpu"
    json: Path | None = None  # also write all figures here


def noisy(task: str) -> dict[str, list[tuple[str, str]]]:
    """Prompts of every class with their kinds: four right, six wrong. All but the negated are captions of the language.

    The other class is the next one in every wrong prompt of a class, and so is the other attribute's value: errors that
    an average does not cancel.
    """
    names, right = TASKS[task].classnames, TASKS[task].templates
    prompts: dict[str, list[tuple[str, str]]] = {}
    for c, name in enumerate(names):
        other = names[(c + 1) % len(names)]
        class_prompts = [(template.replace("{c}", name), KINDS[0]) for template in right]
        class_prompts += [(template.replace("{c}", other), KINDS[1]) for template in right[:OTHERS]]
        class_prompts += [(prompt, KINDS[2]) for prompt in _other_attributes(task, c)]
        class_prompts.append((f"an image without {right[0].replace('{c}', name)}", KINDS[3]))
        prompts[name] = class_prompts
    return prompts


def _other_attributes(task: str, c: int) -> list[str]:
    word = FILLS[c % len(FILLS)] if task == "colour" else COLOURS[c % len(COLOURS)]
    return [f"something {word}", f"an image with a {BACKGROUNDS[c % len(BACKGROUNDS)]} background"]


def judge(matcher: Matcher, task: str, options: BprwOptions) -> list[Found]:
    """One task, once for every draw. All ways are scored on the same images: those that no way has labels of."""
    prompts = noisy(task)
    names = list(prompts)
    source = open_source(f"scenes:test?task={task}&n={options.n}", matcher.model.config.image.size)
    class_prompts = {name: [prompt for prompt, _ in own] for name, own in prompts.items()}
    true = {name: [prompt for prompt, kind in own if kind == KINDS[0]] for name, own in prompts.items()}
    asked, right = encoded(matcher, names, class_prompts), encoded(matcher, names, true)
    images = Seen.whole(labelled(Inputs(matcher, source, options.batch), classes=Classes(names)))
    kinds = [kind for own in prompts.values() for _, kind in own]
    return [dict(_draw(matcher, asked, right, images, kinds, seed)) for seed in range(options.draws)]


def _draw(
    matcher: Matcher, asked: Prompts, right: Prompts, images: Seen, kinds: Sequence[str], seed: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Every way with one choice of labelled images."""
    few = choose("bprw", matcher, asked, images, PromptOptions(shots=SHOTS, seed=seed))
    rest = images.without(few.taken)
    alone = choose("ensemble", matcher, right, rest, PromptOptions())
    yield RIGHT, {"acc1": _accuracy(matcher, rest, alone)}
    for name, (way, given) in WAYS.items():
        drawn = replace(given, seed=seed) if way == "bprw" else given
        chosen = few if given.shots else choose(way, matcher, asked, rest, drawn)
        yield name, {"acc1": _accuracy(matcher, rest, chosen), **_by_kind(chosen, kinds)}


def _accuracy(matcher: Matcher, images: Seen, chosen: Chosen) -> float:
    return dict(figures(matcher.score(images.images, chosen.classes).cpu(), images.labels))["acc1"]


def _by_kind(chosen: Chosen, kinds: Sequence[str]) -> dict[str, float]:
    """Mean weight of a prompt of each kind."""
    weights = chosen.weights.tolist()
    return {kind: statistics.mean(w for w, k in zip(weights, kinds, strict=True) if k == kind) for kind in KINDS}


def table(found: Mapping[str, Mapping[str, Sequence[Found]]]) -> str:
    """Markdown of figures by model, task and draw: accuracies, then weights, each the mean over draws and models.

    Behind the accuracy the standard deviation over models, where there are several.
    """
    tasks = list(next(iter(found.values())))
    per_class = {task: len(next(iter(noisy(task).values()))) for task in tasks}
    lines = [f"| accuracy | {' | '.join(tasks)} |", "|---|" + "---|" * len(tasks)]
    for way in (RIGHT, *WAYS):
        cells = (_cell([_mean(of[task], way, "acc1") for of in found.values()]) for task in tasks)
        lines.append(f"| {way} | {' | '.join(cells)} |")
    lines += ["", f"| weight of one prompt | {' | '.join(tasks)} |", "|---|" + "---|" * len(tasks)]
    lines.append(f"| uniform | {' | '.join(f'{1 / per_class[task]:.3f}' for task in tasks)} |")
    for way in (way for way in WAYS if way != "uniform"):
        for kind in KINDS:
            means = (statistics.mean(_mean(of[task], way, kind) for of in found.values()) for task in tasks)
            lines.append(f"| {way}: {kind} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    return "\n".join(lines)


def _mean(draws: Sequence[Found], way: str, name: str) -> float:
    return statistics.mean(metrics[way][name] for metrics in draws)


def _cell(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def run(options: BprwOptions) -> dict[str, dict[str, list[Found]]]:
    """Judge every model on every task, in several draws.

    Raises: ValueError for no model, an unknown task, or a model without Gaussians.
    """
    if not options.model:
        raise ValueError("--model got nothing: expected folders of models.")
    unknown = [task for task in options.tasks if task not in TASKS]
    if unknown or not options.tasks:
        raise ValueError(f"--tasks got {unknown[0] if unknown else 'nothing'}. Expected some of {', '.join(TASKS)}.")
    if options.draws < 1:
        raise ValueError(f"--draws is {options.draws}. Expected at least 1.")
    draws: dict[str, dict[str, list[Found]]] = {}
    for name, folder in zip(labels(options.model), options.model, strict=True):
        matcher = load(folder, device=options.device)
        draws[name] = {task: judge(matcher, task, options) for task in options.tasks}
    return draws


@in_one_message(PROGRAM)
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; errors a user can mend are one sentence and exit code 2."""
    options = tyro.cli(BprwOptions, prog=PROGRAM, description=__doc__, args=argv)
    draws = run(options)
    if options.json is not None:
        write_json(options.json, draws)
    say(*table(draws).splitlines())


if __name__ == "__main__":
    main()
