"""Class names and prompt templates by the name of a data set, and from files of users.

The names of data sets are CLIP_benchmark's. `imagenet.tsv` has a line for each class of ImageNet in the order of its
indices: wnid, name, and the subsets that contain it (a: ImageNet-A, r: ImageNet-R). In the two JSON files, text in
place of a list names another set with the same list.

Sources: arXiv:2103.00020 and its repository (openai/CLIP: data/prompts.md, notebooks), LAION-AI/CLIP_benchmark (class
names and templates in English), mlfoundations/wise-ft (the 113 classes of ObjectNet that ImageNet has). Where CLIP's
templates differ from CLIP_benchmark's, they are NAME-openai. `imagenet7` are the 7 templates that CLIP's notebook
selects among the 80. Table 14 of arXiv:2405.10286 has the templates of CLIP.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kiloword.data.classes import Templates
from kiloword.data.query import read_options, split_query
from kiloword.errors import suggestion
from kiloword.terminal import shown

IMAGENET = "imagenet1k"
SLOT = "{c}"
_FOLDERS = {  # of ObjectNet, which are not named like their classes
    "binder closed": "binder (closed)",
    "butchers knife": "butcher's knife",
    "coffee french press": "coffee/french press",
    "drying rack for dishes": "drying rack for plates",
    "full sized towel": "bath towel",
    "hand towel or rag": "dishrag or hand towel",
    "mixing salad bowl": "mixing / salad bowl",
    "weight exercise": "weight (exercise)",
}
_SUBSETS = {IMAGENET: "", "imagenetv2": "", "imagenet_sketch": "", "imagenet-a": "a", "imagenet-r": "r"}
_FOLDER = Path(__file__).parent


@cache
def _imagenet(name: str = IMAGENET) -> list[list[str]]:
    lines = (_FOLDER / "imagenet.tsv").read_text("utf-8").splitlines()
    rows = [[*line.split("\t"), ""][:3] for line in lines]
    return [row for row in rows if _SUBSETS[name] in row[2]]


@cache
def _lists(kind: str) -> dict[str, list[str] | str]:
    lists: dict[str, list[str] | str] = json.loads((_FOLDER / f"{kind}.json").read_text("utf-8"))
    return lists


def text_lines(where: str, raw: bytes) -> list[str]:
    """The lines of a file. Errors: ValueError when it is not UTF-8, or has an empty line."""
    try:
        lines = [line.strip() for line in raw.decode("utf-8-sig").strip().split("\n")]
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8.") from None
    if not all(lines):  # class indices count lines: skipping an empty one would move all that follow
        raise ValueError(f"{where}: line {lines.index('') + 1} is empty. Expected text in every line.")
    return lines


def classnames(name: str) -> list[str]:
    """The class names of a data set, in the order of its labels. Errors: ValueError for an unknown name."""
    return [text for _, text, _ in _imagenet(name)] if name in _SUBSETS else _list("classnames", name)


def templates(name: str) -> list[str]:
    """The prompt templates of a data set, with `{c}` for the class name. Errors: ValueError for an unknown name."""
    return _list("templates", name)


def classname_sets() -> list[str]:
    """The data sets whose class names are known."""
    return sorted([*_SUBSETS, *_lists("classnames")])


def template_sets() -> list[str]:
    """The data sets whose templates are known, and other lists of templates."""
    return sorted(_lists("templates"))


def listing(name: str | None = None) -> list[str]:
    """Lines that show the known data sets with their numbers of classes and templates, or what is known of one.

    Errors: ValueError for an unknown name.
    """
    sets = sorted({*classname_sets(), *template_sets()}) if name is None else [name]
    known = [
        (classnames(s) if s in classname_sets() else [], templates(s) if s in template_sets() else []) for s in sets
    ]
    if name is None:
        counts = zip(sets, known, strict=True)
        lines = (f"{s:30}{len(names) or '-':>8}{len(prompts) or '-':>10}" for s, (names, prompts) in counts)
        return [f"{'':30} classes templates", *lines]
    names, prompts = known[0] if any(known[0]) else (classnames(name), [])
    lines = (f"{index:4}  {text}" for index, text in enumerate(names))
    return [*([f"{len(names)} classes:"] if names else []), *lines, "templates:", *prompts]


def names_of_wnids(ids: Sequence[str]) -> list[str] | None:
    """The names of classes of ImageNet; None unless all are."""
    by_id = {wnid: name for wnid, name, _ in _imagenet()}
    return [by_id[wnid] for wnid in ids] if ids and all(wnid in by_id for wnid in ids) else None


def read_classnames(named: str) -> list[str]:
    """Class names from a file or of a known data set.

    Args: named: a text file with one name per line, a JSON file with a list, or with lists by data set
    (`FILE?set=NAME`); or the name of a data set.
    Errors: ValueError for what is none of these, and for a file of another form.
    """
    names = _read(named, lambda _: True)
    if names is None and named not in classname_sets():
        raise ValueError(
            f"{shown(named[:200])}: no such file, and no data set whose class names are known (`kiloword data names`)."
            f"{suggestion(named, classname_sets())}"
        )
    if names is not None and not _are_texts(names):
        raise ValueError(f"{named}: expected a list of class names, or lists by data set with FILE?set=NAME.")
    return classnames(named) if names is None else list(names)


def read_templates(named: str) -> Templates:
    """Prompt templates from a file, of a known data set, or one template.

    Args: named: a text file with one template per line; a JSON file with a list, with lists by data set (as of
    CLIP_benchmark, `FILE?set=NAME`), or with prompts by class name; the name of a data set; or a template with `{c}` or
    `{}`.
    Errors: ValueError for what is none of these, for a file of another form, and for a template without slot.
    """
    lists = _read(named, _of_sets)
    if lists is None and named in template_sets():
        return templates(named)
    if lists is None and not _has_slot(named):
        raise ValueError(
            f"{shown(named[:200])!r}: no such file, no data set whose templates are known (`kiloword data names`), "
            f"and no template, which has {{c}} or {{}} for the class name.{suggestion(named, template_sets())}"
        )
    if isinstance(lists, dict) and lists and all(map(_are_texts, lists.values())):
        return lists  # by class name
    if lists is not None and not _are_texts(lists):
        raise ValueError(
            f"{named}: expected a list of templates, lists by data set with FILE?set=NAME, or prompts by class name."
        )
    return slotted([named] if lists is None else lists, named)


def caseless(text: str) -> str:
    """A text as it is compared without case: composed (NFC) and case-folded. Every letter, mark and symbol counts."""
    return _composed(_composed(text).casefold())


def spaced(folders: Sequence[str]) -> list[str]:
    """Class names of folders or labels: with a space for "_", but unchanged where two names would become equal."""
    names = [folder.replace("_", " ") for folder in folders]
    return names if len({*names}) == len({*folders}) else list(folders)


def places_among(names: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """The place of each name in a list of known names, None for a name that is not in the list.

    Equal names match first. The names that are left on both sides are compared composed (NFC), then also without case,
    then also with a space for "_" and with the folders of ObjectNet. Of several equal names, the n-th matches the n-th.
    Errors: ValueError where different names become equal, so that a match would be a guess.
    """
    places: list[int | None] = [None] * len(names)
    for form in (str, _composed, caseless, _of_folder):
        groups = defaultdict[str, tuple[list[int], list[int]]](
            lambda: ([], [])
        )  # places of equal names, left on a side
        for n in (n for n, place in enumerate(places) if place is None):
            groups[form(names[n])][0].append(n)
        for k in {*range(len(known))} - {*places}:
            groups[form(known[k])][1].append(k)
        for ours, theirs in groups.values():
            forms = {names[n] for n in ours}, {known[k] for k in theirs}
            if all(forms) and max(map(len, forms)) > 1:
                listed = ", ".join(repr(shown(name[:60])) for name in sorted(set.union(*forms)))
                raise ValueError(
                    f'class names {listed} differ only in case, Unicode form or "_": write them exactly as in the data.'
                )
            for n, k in zip(ours, sorted(theirs), strict=False):
                places[n] = k
    return places


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _of_folder(name: str) -> str:
    name = caseless(name).replace("_", " ")
    return _FOLDERS.get(name, name)


def slotted(listed: Sequence[str], where: str) -> list[str]:
    """Templates with `{c}` for the class name, where some may have `{}`.

    Args: where: they come from, for the message. Errors: ValueError for a template without either.
    """
    plain = [template for template in listed if not _has_slot(template)]
    if plain or not listed:
        raise ValueError(
            f"{shown(where[:200])}: {len(plain)} of {len(listed)} templates have no slot for the class name, {{c}} or "
            f"{{}}: {shown(', '.join(plain[:1])[:100])!r}."
        )
    return [template.replace("{}", SLOT) for template in listed]


def _has_slot(template: str) -> bool:
    return SLOT in template or "{}" in template


def _list(kind: str, name: str) -> list[str]:
    """A list by name, or by the name that stands in its place."""
    lists = _lists(kind)
    if name not in lists:
        known = [*_SUBSETS, *lists]
        raise ValueError(f"no {kind} are known by the name {shown(name[:200])!r}.{suggestion(name, known)}")
    listed = lists[name]
    return _list(kind, listed) if isinstance(listed, str) else list(listed)


def _read(named: str, of_sets: Callable[[dict[str, Any]], bool]) -> Any:
    """The lines of a text file, or the value of a JSON file; None where `named` is no file.

    Where the value has an entry for each data set, the entry that `FILE?set=NAME` chooses, or the only entry.
    """
    name, query = split_query(named)
    file = os.path.expanduser(name)
    if not os.path.isfile(file):
        return None
    chosen, raw = read_options(name, query, {"set": (str, "a name")}).get("set"), Path(file).read_bytes()
    if not file.lower().endswith(".json"):
        return text_lines(file, raw)
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise ValueError(f"{file} cannot be parsed as JSON.") from None
    if not isinstance(value, dict) or not (chosen or of_sets(value)):
        return value
    if chosen is None and len(value) == 1:
        return next(iter(value.values()))
    if chosen not in value:
        hint = suggestion(chosen or "", value)
        listed = ", ".join(shown(key[:60]) for key in list(value)[:8])
        raise ValueError(f"{file} has lists of {len(value)} data sets ({listed}): name one by {file}?set=NAME.{hint}")
    return value[chosen]


def _of_sets(value: dict[str, Any]) -> bool:
    """Whether values are of data sets: objects, or lists of templates. Else they are the prompts of classes."""
    return all(
        isinstance(inner, dict) or (_are_texts(inner) and all(map(_has_slot, inner))) for inner in value.values()
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text.strip() for text in value)


def prompts(classnames: Sequence[str], templates: Templates) -> tuple[list[str], list[int]]:
    """All prompts, class by class, and the class index of each."""
    if isinstance(classnames, str) or not classnames or not all(isinstance(name, str) for name in classnames):
        raise ValueError(f"no class names: they must be a list of strings, got {classnames!r}")
    if isinstance(templates, Mapping):
        missing = [name for name in classnames if not templates.get(name)]
        if missing:
            raise ValueError(f"templates give no prompts for the class {missing[0]!r} ({len(missing)} such classes)")
        lists = [list(templates[name]) for name in classnames]
    else:
        several = [templates] if isinstance(templates, str) else templates
        # open_clip's templates are functions of the name
        written: list[str] = [template(SLOT) if callable(template) else template for template in several]
        with_slot = slotted(written, "templates")
        lists = [[template.replace(SLOT, name) for template in with_slot] for name in classnames]
    return [prompt for group in lists for prompt in group], [i for i, group in enumerate(lists) for _ in group]
