"""Encode a data set, judge its pairs, and write tables, a keep-list and a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from kiloword.api import Matcher
from kiloword.apps.audit.findings import FINDING, AuditedData, Finding, findings_of, keep_list, table_of
from kiloword.apps.audit.pairs import fits
from kiloword.config.recipes import DataConfig
from kiloword.data.images.decode import decode
from kiloword.data.joins import check_keys
from kiloword.data.open import open_data
from kiloword.data.reading import left_out, name_of, read_image
from kiloword.distributed.device import choose
from kiloword.errors import naming_truncated
from kiloword.evaluation.command import opened
from kiloword.evaluation.features import seen, tile
from kiloword.evaluation.task import Inputs
from kiloword.files import Lock, atomic, write_json
from kiloword.model.encoding import join
from kiloword.model.prefix import keep_prefix_
from kiloword.report import Block, Gallery, Page, Pixels, Table, Text, distributions, made_by, say_blocks, write_page
from kiloword.stores.features import FeatureStore
from kiloword.stores.runs import reading_tokens
from kiloword.stores.teachers import open_teacher, prefix_fingerprint
from kiloword.terminal import say, warn
from kiloword.terminal.progress import showing
from kiloword.types import BadSample, Skipped, Source

if TYPE_CHECKING:
    from kiloword.apps.audit.command import Audit

NAMES = {
    "mismatch": "pairs that do not match",
    "generic": "captions of many images",
    "duplicate-image": "near-duplicate images",
    "duplicate-caption": "repeated captions",
    "label": "labels that look wrong",
    "unreadable": "unreadable samples",
}
GALLERY = 24  # examples of each finding on the page
ABOUT = "These are suggestions to look, no verdicts: the model may be weak, or trained on this data."


@naming_truncated()
def audit(options: Audit) -> None:
    """Run and print `kiloword audit`."""
    execution, out = replace(options.execution, device=choose(options.execution.device)), options.out
    matcher, workers = opened(options.model, execution)
    config = DataConfig(sources=options.data, extra_captions=options.extra_captions)
    source = plain = open_data(config, matcher.model.config.image.size)
    check_keys(source, "a keep-list")
    if execution.image_features or execution.text_features:
        folders = execution.image_features, execution.text_features
        source, tokenizer = reading_tokens(matcher.model, matcher.tokenizer, source, *folders, augmented=True)
        matcher = Matcher(matcher.model, tokenizer, matcher.method)

    def pixels(row: int) -> Pixels | None:
        """The image of a row, of at least 64 pixels a side where it has them."""
        try:
            return decode(read_image(plain, row).image, at_least=64)
        except BadSample:
            return None

    with Lock(out, "auditing"), showing():
        inputs, fit = Inputs(matcher, source, execution.batch, workers), None
        data = _encoded(inputs) if options.features is None else _stored(inputs, options.model, options.features)
        if data.flat:
            owner, score = torch.from_numpy(data.owner), (matcher.score, matcher.score_pairs)
            fit = fits(*score, data.images, data.texts, owner, options.target_precision)
        findings = list(findings_of(data, fit, pixels, getattr(source, "classnames", None)))
        keep = keep_list(data, findings, fit, plain, options.drop)
        for name, table in (("findings", table_of(findings, FINDING, pa.float64())), ("keep", keep)):
            with atomic(out / f"{name}.parquet") as file:
                pq.write_table(table, file)
        counts, reasons = Counter(one["kind"] for one in findings), Counter(keep["reason"].to_pylist())
        found = [[name, counts[kind], reasons[kind]] for kind, name in NAMES.items()]
        about = f"{len(data.keys):,} images, {len(data.flat):,} captions"
        short: list[Block] = [Table(found, ["finding", "found", "captions that the keep-list omits"], about)]
        if fit is not None:
            plot = distributions({"annotated": fit.annotated, "random": fit.random}, "fit of a pair", 0.05)
            short += [Text(str(fit.rule)), plot]
        facts, kept = made_by([options.model], " ".join(options.data)), reasons[""]
        summary = {
            "images": len(data.keys),
            "captions": len(data.flat),
            "findings": {kind: counts[kind] for kind in NAMES},
            "rule": fit and asdict(fit.rule),
            "keep": {"rows": len(keep), "kept": kept, "omitted": len(keep) - kept},
        }
        write_json(out / "audit.json", {**facts, **summary})
        sections = {"In short": short, **dict(_examples(findings, plain))}
        write_page(out / "report.html", Page("Audit", f"{plain.name}. {ABOUT}", sections, facts))
    warn(*left_out(data.skipped).lines())
    say_blocks(short)
    say(f"keep-list: {out / 'keep.parquet'} omits {len(keep) - kept:,} of {len(keep):,}; page: {out / 'report.html'}")


def _encoded(inputs: Inputs) -> AuditedData:
    """All readable images of a source with their captions."""
    parts, texts, labels = list(seen(inputs)), [], list[Tensor]()
    for part in parts:
        captions = [caption for of_image in part.captions for caption in of_image]
        texts += [inputs.matcher.encode_text(captions, progress=False)] if captions else []
        labels.append(part.labels.cpu() if part.labels.ndim == 1 else torch.full((len(part.rows),), -1))
    images, of_texts = join([part.images for part in parts]), join(texts) if texts else {}
    rows, keys, captions_of = ([x for p in parts for x in getattr(p, name)] for name in ("rows", "keys", "captions"))
    return AuditedData(rows, keys, captions_of, torch.cat(labels), images, of_texts, inputs.skipped)


def _stored(inputs: Inputs, model: str, folder: Path) -> AuditedData:
    """The data by features of a store, without labels. Raises: ValueError for a store of another model or data."""
    store, source, matcher = FeatureStore(folder), inputs.source, inputs.matcher
    whole, text = open_teacher(model, "cpu").fingerprint, matcher.encode_text(["a"])
    one_vector = {*text, *matcher.encode_image([np.zeros((32, 32, 3), np.uint8)])} == {"vec"}
    if store.file.weights not in (whole, prefix_fingerprint(whole, store.dim)) or not one_vector:
        raise ValueError(f"{folder}: expected features of {model}, and that it has one vector per image and text.")
    if store.dim > (dim := text["vec"].shape[1]):
        raise ValueError(f"{folder} has features of {store.dim} numbers, and --dim asks for {dim}: omit --dim.")
    keep_prefix_(matcher.model, store.dim)
    places = store.places(source)  # [n]
    rows, starts, device = np.flatnonzero(places >= 0), store.starts, matcher.model.device
    bad = np.flatnonzero(places < 0).tolist()
    inputs.skipped.extend(Skipped(row, name_of(source, row), "not in the feature store") for row in bad)
    captions_of = [range(starts[place], starts[place + 1]) for place in places[rows]]
    images = torch.from_numpy(store.images()[places[rows]]).float().to(device)
    texts = torch.from_numpy(store.texts()[[t for texts in captions_of for t in texts]]).float().to(device)
    keys, captions = (
        [store.keys[place] for place in places[rows]],
        [[store.captions[t] for t in x] for x in captions_of],
    )
    none = torch.full((len(rows),), -1)
    return AuditedData(rows.tolist(), keys, captions, none, {"vec": images}, {"vec": texts}, inputs.skipped)


def _examples(findings: Sequence[Finding], source: Source) -> Iterator[tuple[str, list[Block]]]:
    """The first findings of each kind: their images."""
    for kind, name in NAMES.items():
        every = [one for one in findings if one["kind"] == kind]
        lines = [filter(None, (one["key"], one["caption"], one["detail"], one["other"])) for one in every[:GALLERY]]
        tiles = [tile(source, one["row"], *texts, side=224) for one, texts in zip(every, lines, strict=False)]
        if tiles:
            yield name, [Gallery(tiles, f"{len(tiles):,} of {len(every):,}; findings.parquet has all.", 4)]
