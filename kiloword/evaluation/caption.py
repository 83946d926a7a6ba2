"""The task `caption`: captions of a model, or of a table, against those that people wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kiloword.data.joins import CaptionTable
from kiloword.data.reading import EvalBatch, captions_at
from kiloword.data.source import info_of, key_of
from kiloword.distributed.sharing import alone, is_first
from kiloword.evaluation.caption_metrics import VARIETY, check_programs, clipscore, score_captions
from kiloword.evaluation.caption_truth import judge
from kiloword.evaluation.features import Seen, per_batch, seen, tile
from kiloword.evaluation.results import check_results, official_id, read_results, write_results
from kiloword.evaluation.task import Findings, Inputs
from kiloword.evaluation.tasks import CaptionTaskOptions
from kiloword.evaluation.zeroshot import field_name, grouped
from kiloword.generation.captioner import Captioner
from kiloword.report import Gallery, Tile
from kiloword.terminal import warn
from kiloword.types import BadSample, Skipped

IMAGE_ID, DOMAIN = "image_id", "domain"
PROMPT = "A photo depicts "  # before captions whose CLIPScore is measured, as its authors recommend
TILES = 10  # images of the gallery


@dataclass(frozen=True)
class CaptionedImage:
    """One image with its caption, and those that people wrote."""

    row: int
    key: str
    caption: str
    references: Sequence[str]
    info: Mapping[str, Any] = field(default_factory=dict)  # `Record.info`: what groups and result files need


def run(inputs: Inputs, options: CaptionTaskOptions) -> Findings:
    """Describe every readable image that has captions; yield the metrics of `score_captions`,
    CLIPScore with `clipscore`, "cider_domain:near" and "count_domain:near" for groups, for scenes metrics of `judge`.

    With `results`, images without captions are described, too; where none has any, only their number is yielded, as
    "captions". Of ranks that share the work, the first one scores.
    Errors: ValueError for a model that cannot write, and where no image can be judged or a program is missing.
    """
    source, scored = inputs.source, vars(options.judge)
    check_programs(options.judge.tokenizer, options.judge.spice)
    if options.results is not None:
        check_results(source, IMAGE_ID)
    described = list((generated if options.captions is None else existing)(inputs, options))
    if not is_first():
        return
    every, described = described, [one for one in described if one.references]
    if not (described or (every and options.results)):
        why = "".join(f", the first because: {one.reason}" for one in inputs.skipped[:1])
        raise ValueError(f"{source.name}: none of its {len(source)} images can be judged{why}.")
    if options.results is not None:
        write_results(options.results, source, IMAGE_ID, "caption", ((one.info, one.caption) for one in every))
        if not described:
            yield "captions", float(len(every))
            return
        inputs.skipped.extend(Skipped(one.row, one.key, "no caption") for one in every if not one.references)
    captions = [one.caption for one in described]
    whole = score_captions(captions, [one.references for one in described], **scored)
    warn(*(f"note: {note}." for note in whole.notes))
    yield from whole.values.items()
    if options.clipscore is not None:
        with alone():
            yield from _clipscores(inputs, options.clipscore, described)
    for field_ in options.group_by or (DOMAIN,):
        groups = grouped([one.info for one in described], field_, bool(options.group_by))
        for name, own in ((f"{field_name(field_)}:{group}", own) for group, own in groups.items()):
            of_group = score_captions([captions[n] for n in own], [described[n].references for n in own], **scored)
            yield from (
                (f"{metric}_{name}", value) for metric, value in of_group.values.items() if metric not in VARIETY
            )
            yield f"count_{name}", float(len(own))
    if scene := getattr(source, "scene", None):  # the ground truth of an image, where the source has it
        yield from judge(captions, [scene(one.row) for one in described]).items()
    if inputs.page:
        worst = [(described[place], whole.cider[place]) for place in np.argsort(whole.cider, kind="stable")[:TILES]]
        tiles = list[Tile]()
        for one, cider in worst:
            known = [f"“{text}”" for text in one.references[:3]]
            tiles.append(tile(source, one.row, one.caption or "(nothing)", f"CIDEr-D {cider:.2f}", *known, side=256))
        yield Gallery(tiles, "Farthest from the captions of people")


def _clipscores(inputs: Inputs, model: str, described: Sequence[CaptionedImage]) -> Iterator[tuple[str, float]]:
    """CLIPScore and RefCLIPScore by a model's own images and texts, of the images that can be read."""
    from kiloword.api import load

    matcher = load(model, "cpu" if inputs.model is None else str(inputs.model.model.device))
    found = Seen.whole(seen(replace(inputs, model=matcher, workers=0, skipped=[])))
    place = {row: n for n, row in enumerate(found.rows)}
    of = [one for one in described if one.row in place]
    inputs.skipped.extend(Skipped(one.row, one.key, "no CLIPScore") for one in described if one.row not in place)
    texts = [PROMPT + text for one in of for text in (one.caption, *one.references)]
    counts = [1 + len(one.references) for one in of]
    images = found.images["vec"][[place[one.row] for one in of]]
    groups = torch.split(matcher.encode_text(texts)["vec"].double().cpu(), counts)
    alone, both = clipscore(images.double().cpu(), torch.stack([g[0] for g in groups]), [g[1:] for g in groups])
    yield "clipscore", float(alone.mean())
    yield "refclipscore", float(both.mean())


def generated(inputs: Inputs, options: CaptionTaskOptions) -> list[CaptionedImage]:
    """A model's captions of the images that have captions, or for result files of all."""
    captioner, bare = Captioner(inputs.matcher.model, inputs.matcher.tokenizer), options.results is not None

    def describe(part: EvalBatch) -> list[CaptionedImage]:
        texts = captioner.caption(part.images, options.generate, part.keys)
        captions = [of_image[0].text if of_image else "" for of_image in texts]
        return list(map(CaptionedImage, part.rows, part.keys, captions, part.captions, part.infos))

    def usable(part: EvalBatch) -> list[bool]:
        return [bool(captions) or bare for captions in part.captions]

    return [one for part in per_batch(inputs, describe, usable, "no caption", not bare) for one in part]


def existing(inputs: Inputs, options: CaptionTaskOptions) -> Iterator[CaptionedImage]:
    """A file's captions; images without captions in the data or in the file are appended to `skipped`.

    For result files images need no captions in the data. `Record.info` is read where that is needed, or free.
    """
    source, path = inputs.source, options.captions
    assert path is not None
    table = None if path.suffix.lower() == ".json" else CaptionTable(path)
    texts = read_results(path, IMAGE_ID) if table is None else {}
    informed = table is None or options.results or options.group_by or hasattr(source, "info")
    for row in range(len(source)):
        name = f"row {row}"
        try:
            name, references = key_of(source, row), captions_at(source, row)
            info = info_of(source, row) if informed else {}
        except BadSample as error:
            inputs.skipped.append(Skipped(row, name, str(error)))
            continue
        caption = texts.get(official_id(source.name, info, IMAGE_ID)) if table is None else table.first(name)
        if caption is not None and (references or options.results is not None):
            yield CaptionedImage(row, name, caption, references, info)
        else:
            inputs.skipped.append(Skipped(row, name, "not in the table of captions" if references else "no caption"))
