"""Class tasks of scenes: names, prompts and labels."""

from __future__ import annotations

from dataclasses import dataclass

from kiloword.data.scenes.world import COLOURS, FILLS, SHAPES, Scene

_OF_ONE = ("something {c}", "a picture of something {c}", "an image with something {c}", "there is something {c}")


@dataclass(frozen=True)
class ClassTask:
    """Classes of scenes; every prompt is a caption of the language when `{c}` is one of the names."""

    classnames: tuple[str, ...]
    templates: tuple[str, ...]
    objects: tuple[int, ...] = (1,)  # numbers of things in its scenes


TASKS = {
    "colour": ClassTask(COLOURS, _OF_ONE),
    "fill": ClassTask(FILLS, _OF_ONE),
    "shape": ClassTask(SHAPES, ("a {c}", "a picture of a {c}", "an image with a {c}", "there is a {c}")),
    "count": ClassTask(
        ("one object", "two objects", "three objects"),
        ("{c}", "exactly {c}", "a picture with {c}", "an image of exactly {c}"),
        (1, 2, 3),
    ),
}


def label(task: str, scene: Scene) -> int:
    """The class of a scene, an index into the task's names."""
    if task == "count":
        return len(scene.things) - 1
    thing = scene.things[0]
    return {"colour": thing.colour, "fill": thing.fill, "shape": thing.shape}[task]
