"""Captions of a model against those that people wrote: `kiloword eval caption MODEL`.

In place of a model there may be a parquet table of captions (key, captions), of any captioner.
"""

from __future__ import annotations

from collections.abc import Iterator

from kiloword.data.reading import EvalBatch, captions_at
from kiloword.data.sources.extra_captions import CaptionTable
from kiloword.data.sources.optional import key_of
from kiloword.distributed.sharing import is_first
from kiloword.evaluation.caption import CaptionTaskOptions
from kiloword.evaluation.caption.metrics import check_programs, score_captions
from kiloword.evaluation.caption.page import CaptionedImage, CaptionPageData
from kiloword.evaluation.caption.truth import elsewhere, judge_caption, summary
from kiloword.evaluation.features import per_batch
from kiloword.evaluation.task import Inputs, Values
from kiloword.generation.options import GenerationOptions
from kiloword.types import BadSample, Skipped, Source


def run(inputs: Inputs, options: CaptionTaskOptions) -> Values:
    """Describe every readable image that has captions of its own; yield what `score_captions` returns.

    For scenes also what `judge` and `elsewhere` return. Of ranks that share the work, the first one scores.
    Errors: ValueError for a model that cannot write, a table without a caption of these images, images without
    captions, and for programs that `judge` asks for and that are missing.
    """
    source, skipped, judge = inputs.source, inputs.skipped, options.judge
    judge.check()
    check_programs(judge.tokenizer, judge.spice)
    if options.captions is not None:
        if options.generate != GenerationOptions():
            raise ValueError(f"generate says how a model writes, but captions come from {options.captions}: omit it.")
        described = list(existing(source, CaptionTable(options.captions), skipped))
    elif inputs.model is not None:
        described = generated(inputs, options.generate)
    else:
        raise ValueError("there is neither a model to write captions nor a table of captions to judge.")
    if not is_first():
        return
    if not described:
        why = f", the first because: {skipped[0].reason}" if skipped else ""
        raise ValueError(f"{source.name}: none of its {len(source)} images can be judged{why}.")
    captions = [one.caption for one in described]
    scored = score_captions(captions, [one.references for one in described], judge)
    yield from scored.values.items()
    judged = None
    if scene := getattr(source, "scene", None):  # the ground truth of an image, where the source has it
        scenes = [scene(one.row) for one in described]
        judged = list(map(judge_caption, captions, scenes))
        yield from summary(judged).items()
        yield from elsewhere(captions, scenes).items()
    if inputs.shown is not None:
        inputs.shown["captions"] = CaptionPageData(source, described, scored.cider, judged)


def generated(inputs: Inputs, options: GenerationOptions) -> list[CaptionedImage]:
    """A model's captions of the images that have captions."""
    from kiloword.generation.captioner import Captioner

    captioner = Captioner(inputs.matcher.model, inputs.matcher.tokenizer)

    def describe(part: EvalBatch) -> list[CaptionedImage]:
        texts = captioner.caption(part.images, options, part.keys)
        captions = [of_image[0].text if of_image else "" for of_image in texts]
        return list(map(CaptionedImage, part.rows, part.keys, captions, part.captions))

    parts = per_batch(inputs, describe, lambda part: list(map(bool, part.captions)), "no caption")
    return [one for part in parts for one in part]


def existing(source: Source, table: CaptionTable, skipped: list[Skipped]) -> Iterator[CaptionedImage]:
    """A table's captions; images without captions in the data or in the table are appended to `skipped`."""
    matched = False
    for row in range(len(source)):
        name = f"row {row}"
        try:
            name = key_of(source, row)
            caption = table.first(name)
            matched |= caption is not None
            references = captions_at(source, row)
        except BadSample as error:
            skipped.append(Skipped(row, name, str(error)))
            continue
        if caption is None or not references:
            skipped.append(Skipped(row, name, "no caption" if not references else "not in the table of captions"))
        else:
            yield CaptionedImage(row, name, caption, references)
    if not matched:
        raise ValueError(
            f"{table.path} has captions for none of the images of {source.name}: its keys are such as "
            f"{table.first_key!r}. Write the images' keys into the column `key`."
        )
