"""Encode a data set, judge its pairs, and write tables, a keep-list and a page."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, get_args

import numpy as np
import pyarrow.parquet as pq
import torch

from kiloword.api import Matcher
from kiloword.apps.audit import Kind
from kiloword.apps.audit.findings import FINDING, AuditedData, findings_of, keep_list, table_of
from kiloword.apps.audit.pairs import cosines, cosines_of_pairs, fits
from kiloword.config.recipes import DataConfig
from kiloword.data.images.decode import decode
from kiloword.data.joins import check_keys
from kiloword.data.open import open_data
from kiloword.data.reading import left_out, name_of, read_image
from kiloword.distributed.device import choose
from kiloword.errors import naming_truncated
from kiloword.evaluation.command import opened
from kiloword.evaluation.features import Seen, seen, tile
from kiloword.evaluation.task import Inputs
from kiloword.files import Lock, atomic, write_json
from kiloword.model.encoding import join
from kiloword.report import (
    Block,
    Gallery,
    Page,
    Pixels,
    Table,
    Text,
    Tile,
    distributions,
    made_by,
    say_blocks,
    write_page,
)
from kiloword.stores.features import FeatureStore
from kiloword.stores.runs import reading_tokens
from kiloword.terminal import say, warn
from kiloword.terminal.progress import showing
from kiloword.types import Skipped, Source

if TYPE_CHECKING:
    from kiloword.apps.audit.command import Audit

KINDS = get_args(Kind)
GALLERY = 24  # examples of each finding on the page
ABOUT = "These are suggestions to look, no verdicts: the model may be weak, or have learned the faults of this data."


@naming_truncated()
def audit(options: Audit) -> None:
    """Run and print `kiloword audit`."""
    execution, out = replace(options.execution, device=choose(options.execution.device)), options.out
    config = DataConfig(sources=options.data, extra_captions=options.extra_captions)
    model, score, inputs, fit = options.model, (cosines, cosines_of_pairs), None, None
    if options.features is None:
        matcher, workers = opened(model, execution)
        if matcher.file and any(of.endswith(options.data) for of in matcher.file.data.split()):
            warn("this model was trained on this data, and has learned faults of it: another model finds more.")
        source = open_data(config, matcher.model.config.image.size)
        shown, tokenizer = reading_tokens(
            matcher.model, matcher.tokenizer, source, execution.image_features, execution.text_features, augmented=True
        )
        inputs = Inputs(Matcher(matcher.model, tokenizer, matcher.method), shown, execution.batch, workers)
        score = matcher.score, matcher.score_pairs
    else:
        store, source = FeatureStore(options.features), open_data(config)
        model = store.file.model
    check_keys(source, "a keep-list")

    def look(row: int) -> Pixels:
        """The image of a row, of at least 64 pixels a side where it has them."""
        return decode(read_image(source, row).image, at_least=64)

    with Lock(out, "auditing"), showing():
        data = _stored(store, source, execution.device) if inputs is None else _encoded(inputs)
        if data.texts:
            owner = torch.tensor([image for image, *_ in data.places])
            fit = fits(data.images, data.texts, owner, options.target_precision, *score)
        findings = list(findings_of(data, fit, look, getattr(source, "classnames", None)))
        keep = keep_list(data, findings, fit, source, options.drop)
        for name, table in (("findings", table_of(findings, FINDING)), ("keep", keep)):
            with atomic(out / f"{name}.parquet") as file:
                pq.write_table(table, file)
        counts, reasons = Counter(one["kind"] for one in findings), Counter(keep["reason"].to_pylist())
        images, captions, omitted = len(data.keys), len(data.places), len(keep) - reasons[""]
        facts, row_of = made_by([model], " ".join(options.data)), dict(zip(data.keys, data.rows, strict=True))
        summary = {
            "images": images,
            "captions": captions,
            "findings": {kind: counts[kind] for kind in KINDS},
            "rule": fit and asdict(fit.rule),
            "keep": {"rows": len(keep), "kept": reasons[""], "omitted": omitted},
        }
        write_json(out / "audit.json", {**facts, **summary})
        found = [[kind, counts[kind], reasons[kind]] for kind in KINDS]
        header = ["finding", "found", "captions that the keep-list omits"]
        short: list[Block] = [Table(found, header, f"{images:,} images, {captions:,} captions")]
        if fit is not None:
            plot = distributions({"annotated": fit.annotated, "random": fit.random}, "fit of a pair", 0.05)
            short += [Text(str(fit.rule)), plot]
        sections: dict[str, list[Block]] = {"In short": short}
        for kind in KINDS:
            first, tiles = [one for one in findings if one["kind"] == kind][:GALLERY], list[Tile]()
            for one in first:
                if kind == "duplicate-image":  # beside the one that it repeats
                    tiles.append(tile(source, row_of[one["other"]], one["other"], side=224))
                texts = filter(None, (one["key"], one["caption"], one["detail"], one["other"]))
                tiles.append(tile(source, one["row"], *texts, side=224))
            sections[kind] = [Gallery(tiles, f"{len(first):,} of {counts[kind]:,}; findings.parquet has all.", 4)]
        write_page(out / "report.html", Page("Audit", f"{source.name}. {ABOUT}", sections, facts))
    warn(*left_out(data.skipped).lines())
    say_blocks(short)
    say(f"keep-list: {out / 'keep.parquet'} omits {omitted:,} of {len(keep):,}; page: {out / 'report.html'}")


def _encoded(inputs: Inputs) -> AuditedData:
    """All readable images of a source with their captions."""
    parts, texts = list(seen(inputs)), []
    for part in parts:
        texts += [inputs.matcher.encode_text(part.texts, progress=False)] if part.texts else []
        if part.labels.ndim > 1:
            part.labels = torch.full((len(part.rows),), -1)
    data, of_texts = Seen.whole(parts), join(texts) if texts else {}
    return AuditedData(data.rows, data.keys, data.captions, data.labels, data.images, of_texts, inputs.skipped)


def _stored(store: FeatureStore, source: Source, device: str) -> AuditedData:
    """The data by features of a store, without labels. Raises: ValueError for a store of other data."""
    places = store.places(source)
    rows, bad = np.flatnonzero(places >= 0).tolist(), np.flatnonzero(places < 0).tolist()
    images, none = places[rows], torch.full((len(rows),), -1)
    texts = [range(*store.starts[image : image + 2].tolist()) for image in images.tolist()]
    every = [text for of_image in texts for text in of_image]
    of_images, of_texts = (
        {"vec": torch.from_numpy(vectors).float().to(device)} if len(vectors) else {}
        for vectors in (store.images()[images], store.texts()[every])
    )
    captions = [[store.captions[text] for text in of_image] for of_image in texts]
    skipped = [Skipped(row, name_of(source, row), "not in the feature store") for row in bad]
    return AuditedData(rows, [store.keys[n] for n in images], captions, none, of_images, of_texts, skipped)
