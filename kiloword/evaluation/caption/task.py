"""Captions of a model against those that people wrote: `kiloword eval caption MODEL`.

In place of a model there may be a parquet table of captions (key, captions) or a COCO result file, of any captioner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kiloword.data.joins import CaptionTable
from kiloword.data.reading import EvalBatch, captions_at
from kiloword.data.source import info_of, key_of
from kiloword.distributed.sharing import is_first
from kiloword.evaluation.caption import CaptionTaskOptions
from kiloword.evaluation.caption.metrics import VARIETY, check_programs, score_captions
from kiloword.evaluation.caption.page import CaptionedImage, CaptionPageData
from kiloword.evaluation.caption.truth import elsewhere, judge_caption, summary
from kiloword.evaluation.features import per_batch
from kiloword.evaluation.results import check_results, official_id, read_results, write_results
from kiloword.evaluation.task import Inputs, Values
from kiloword.evaluation.zeroshot import field_name, group_of
from kiloword.generation.options import GenerationOptions
from kiloword.types import BadSample, Skipped, Source

IMAGE_ID, DOMAIN = "image_id", "domain"
Find = Callable[[str, Mapping[str, Any]], str | None]


def run(inputs: Inputs, options: CaptionTaskOptions) -> Values:
    """Describe every readable image that has captions of its own; yield what `score_captions` returns.

    For scenes also what `judge` and `elsewhere` return; for each group of the fields `group_by` its figures by itself:
    "cider_domain:near", and its number of images: "count_domain:near". With `results`, images without captions are
    described, too; where none has any, only their number is yielded, as "captions". Of ranks that share the work, the
    first one scores.
    Errors: ValueError for a model that cannot write, a table without a caption of these images, images without
    captions, and for programs that `judge` asks for and that are missing.
    """
    source, skipped, judge = inputs.source, inputs.skipped, options.judge
    judge.check()
    check_programs(judge.tokenizer, judge.spice)
    if options.results is not None:
        check_results(options.results, source, IMAGE_ID)
    if options.captions is not None:
        if options.generate != GenerationOptions():
            raise ValueError(f"generate says how a model writes, but captions come from {options.captions}: omit it.")
        described = list(existing(source, options.captions, skipped, options))
    elif inputs.model is not None:
        described = generated(inputs, options)
    else:
        raise ValueError("there is neither a model to write captions nor a table of captions to judge.")
    if not is_first():
        return
    if not described:
        why = f", the first because: {skipped[0].reason}" if skipped else ""
        raise ValueError(f"{source.name}: none of its {len(source)} images can be judged{why}.")
    if options.results is not None:
        write_results(options.results, source, IMAGE_ID, "caption", ((one.info, one.caption) for one in described))
        bare = [one for one in described if not one.references]
        if len(bare) == len(described):
            yield "captions", float(len(described))
            return
        skipped += [Skipped(one.row, one.key, "no caption") for one in bare]
        described = [one for one in described if one.references]
    captions = [one.caption for one in described]
    scored = score_captions(captions, [one.references for one in described], judge)
    yield from scored.values.items()
    yield from _by_group(described, options)
    judged = None
    if scene := getattr(source, "scene", None):  # the ground truth of an image, where the source has it
        scenes = [scene(one.row) for one in described]
        judged = list(map(judge_caption, captions, scenes))
        yield from summary(judged).items()
        yield from elsewhere(captions, scenes).items()
    if inputs.shown is not None:
        inputs.shown["captions"] = CaptionPageData(source, described, scored.cider, judged)


def _by_group(described: list[CaptionedImage], options: CaptionTaskOptions) -> Values:
    """The figures of every group by itself, and its number of images. Raises: ValueError for a field of no image."""
    for field in options.group_by or (DOMAIN,):
        groups: dict[str, list[CaptionedImage]] = {}
        for one in described:
            if (group := group_of(one.info, field)) is not None:
                groups.setdefault(group, []).append(one)
        if not groups and options.group_by:
            raise ValueError(
                f"--group-by {field}: no image has this field. Expected a key of its json, or a column that "
                "FILE?info=COLUMN names."
            )
        for name, members in sorted(groups.items()):
            scored = score_captions([m.caption for m in members], [m.references for m in members], options.judge)
            compared = {metric: value for metric, value in scored.values.items() if metric not in VARIETY}
            for metric, value in {**compared, "count": float(len(members))}.items():
                yield f"{metric}_{field_name(field)}:{name}", value


def generated(inputs: Inputs, options: CaptionTaskOptions) -> list[CaptionedImage]:
    """A model's captions of the images that have captions, or for result files of all."""
    from kiloword.generation.captioner import Captioner

    captioner = Captioner(inputs.matcher.model, inputs.matcher.tokenizer)

    def describe(part: EvalBatch) -> list[CaptionedImage]:
        texts = captioner.caption(part.images, options.generate, part.keys)
        captions = [of_image[0].text if of_image else "" for of_image in texts]
        return list(map(CaptionedImage, part.rows, part.keys, captions, part.captions, part.infos))

    def usable(part: EvalBatch) -> list[bool]:
        return [bool(captions) or options.results is not None for captions in part.captions]

    parts = per_batch(inputs, describe, usable, "no caption", captions=options.results is None)
    return [one for part in parts for one in part]


def existing(
    source: Source, path: Path, skipped: list[Skipped], options: CaptionTaskOptions
) -> Iterator[CaptionedImage]:
    """A file's captions; images without captions in the data or in the file are appended to `skipped`.

    For result files images need no captions in the data. `Record.info` is read where that is needed, or free.
    """
    find, first, named = _captions(source, path)
    informed = named == IMAGE_ID or options.results or options.group_by or hasattr(source, "info")
    matched = False
    for row in range(len(source)):
        name = f"row {row}"
        try:
            name = key_of(source, row)
            info = info_of(source, row) if informed else {}
            caption = find(name, info)
            matched |= caption is not None
            references = captions_at(source, row)
        except BadSample as error:
            skipped.append(Skipped(row, name, str(error)))
            continue
        if caption is None:
            skipped.append(Skipped(row, name, "not in the table of captions" if references else "no caption"))
        elif not references and options.results is None:
            skipped.append(Skipped(row, name, "no caption"))
        else:
            yield CaptionedImage(row, name, caption, references, info)
    if not matched:
        raise ValueError(
            f"{path} has captions for none of the images of {source.name}: its keys are such as {first!r}. Write the "
            f"images' keys into `{named}`."
        )


def _captions(source: Source, path: Path) -> tuple[Find, object, str]:
    """How a file finds the caption of an image by key and `Record.info`, its first key, and the name of its keys."""
    if path.suffix.lower() != ".json":
        table = CaptionTable(path)
        return (lambda key, info: table.first(key)), next(iter(table.place_of)), "key"
    texts = read_results(path, IMAGE_ID, "caption")
    return (lambda key, info: texts.get(official_id(source.name, info, IMAGE_ID))), next(iter(texts)), IMAGE_ID
