"""What a model says of images against what people said: `kiloword eval caption MODEL`.

In place of a model there may be a parquet table of captions (key, captions), of any captioner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kiloword.data.reading import EvalBatch, captions_at
from kiloword.data.scenes.world import Scene
from kiloword.data.sources.extra_captions import CaptionTable
from kiloword.data.sources.optional import key_of
from kiloword.distributed.sharing import is_first
from kiloword.evaluation.caption import CaptionOptions, CaptionTaskOptions, java
from kiloword.evaluation.caption.metrics import Scored, check_programs, score, variety
from kiloword.evaluation.caption.page import CaptionPageData, Told
from kiloword.evaluation.caption.truth import elsewhere, judge_caption, summary
from kiloword.evaluation.features import batches_in_turns
from kiloword.evaluation.task import Inputs, Values
from kiloword.generation.options import GenerationOptions
from kiloword.terminal import warn
from kiloword.types import BadSample, Skipped, Source


def run(inputs: Inputs, options: CaptionTaskOptions) -> Values:
    """Describe every readable image that has captions of its own, and yield what `score_source` does.

    Errors: ValueError for a model that cannot write, a table without a caption of these images, images without
    captions, and for what `judge` asks for and is not there. Of ranks that share the work the first one scores.
    """
    source, bad, captions, judge = inputs.source, inputs.skipped, options.captions, options.judge
    judge.check()
    check_programs(judge.tokenizer, judge.spice)
    if captions is not None and options.generate != GenerationOptions():
        raise ValueError(f"generate says how a model writes, but the captions of {captions} are there: leave it out.")
    if captions is not None:
        told = list(existing(source, CaptionTable(captions), bad))
    elif inputs.model is not None:
        told = list(generated(inputs, options.generate))
    else:
        raise ValueError("there is neither a model to write captions nor a table of captions to judge.")
    if not is_first():
        return
    if not told:
        why = f", the first because: {bad[0].reason}" if bad else ""
        raise ValueError(f"{source.name}: none of its {len(source)} images can be judged{why}.")
    yield from score_source(source, told, judge, inputs.shown)


def score_source(
    source: Source, told: Sequence[Told], judge: CaptionOptions, shown: dict[str, Any] | None = None
) -> Values:
    """What `score_captions` gives of one caption an image, and for scenes what `judge` and `elsewhere` give."""
    scored = score(
        [one.caption for one in told],
        [one.references for one in told],
        tokenizer=judge.tokenizer,
        spice=judge.spice,
        limit=judge.limit,
    )
    yield from scored.values.items()
    if judge.meteor:
        yield from _meteor(scored, judge.limit)
    yield from variety(scored.captions.candidates).items()
    scenes, judged = _scenes(source, told), None
    if scenes is not None:
        captions = [one.caption for one in told]
        judged = [judge_caption(caption, scene) for caption, scene in zip(captions, scenes, strict=True)]
        yield from summary(judged).items()
        yield from elsewhere(captions, scenes).items()
    if shown is not None:
        shown["captions"] = CaptionPageData(source, told, scored.cider, judged)


def _scenes(source: Source, told: Sequence[Told]) -> list[Scene] | None:
    """What each image shows, None where the source does not know."""
    scene = getattr(source, "scene", None)
    return None if scene is None else [scene(one.row) for one in told]


def generated(inputs: Inputs, options: GenerationOptions) -> Iterator[Told]:
    """A model's captions; images that cannot be read or have no captions are named in `skipped`."""
    from kiloword.generation.captioner import Captioner

    matcher, skipped = inputs.matcher, inputs.skipped
    captioner = Captioner(matcher.model, matcher.tokenizer)

    def describe(part: EvalBatch) -> tuple[list[Told], list[Skipped]]:
        pairs = list(zip(part.rows, part.keys, strict=True))
        bare = [Skipped(*pair, "no caption") for pair, own in zip(pairs, part.captions, strict=True) if not own]
        kept = [i for i, own in enumerate(part.captions) if own]
        if not kept:
            return [], bare
        found = captioner.caption(part.images[kept], options, [part.keys[i] for i in kept])
        captions = [texts[0].text if texts else "" for texts in found]
        return [Told(*pairs[i], said, part.captions[i]) for i, said in zip(kept, captions, strict=True)], bare

    for made, bad in batches_in_turns(matcher, inputs.source, inputs.batch, inputs.workers, describe):
        skipped += bad
        if made is not None:
            skipped += made[1]
            yield from made[0]


def existing(source: Source, table: CaptionTable, skipped: list[Skipped]) -> Iterator[Told]:
    """A table's captions; images without captions, of their own or in the table, are named in `skipped`."""
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
            yield Told(row, name, caption, references)
    if not matched:
        raise ValueError(
            f"{table.path} has captions for none of the images of {source.name}: its keys are such as "
            f"{table.first_key!r}. Write the images' keys into the column `key`."
        )


def _meteor(scored: Scored, limit: float) -> Values:
    """METEOR, or a line that says why not: it is the one metric that nothing else of ours computes."""
    try:
        yield "meteor", java.meteor(scored.captions.candidates, scored.captions.references, limit)[0]
    except ValueError as error:
        warn(f"meteor is left out: {error}")


def printed(name: str) -> bool:
    """Whether a value belongs on a screen."""
    return not name.startswith(("bleu_2", "bleu_3"))
