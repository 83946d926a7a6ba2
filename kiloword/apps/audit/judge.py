"""Encode a data set, judge its pairs, and write tables, a keep-list and a page."""

from __future__ import annotations

import io
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from kiloword.api import Matcher
from kiloword.apps.audit.findings import AuditedData, Finding, findings_of, findings_table, keep_list
from kiloword.apps.audit.outliers import OutlierRule, rule
from kiloword.apps.audit.pairs import Fits, fits
from kiloword.config.recipes import DataConfig
from kiloword.data.images.decode import decode
from kiloword.data.joins import check_keys
from kiloword.data.open import open_data
from kiloword.data.reading import advice, left_out, name_of, read_image
from kiloword.data.source import key_of, texts_of
from kiloword.distributed.device import choose
from kiloword.errors import count, naming_truncated
from kiloword.evaluation.command import opened
from kiloword.evaluation.features import seen, tile
from kiloword.evaluation.task import Inputs
from kiloword.files import Lock, write_atomic, write_json
from kiloword.model.encoding import join
from kiloword.model.prefix import keep_prefix_
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
    write_page,
)
from kiloword.stores.features import FeatureStore
from kiloword.stores.runs import reading_tokens
from kiloword.stores.teachers import open_teacher, prefix_fingerprint
from kiloword.terminal import say, warn
from kiloword.terminal.progress import showing
from kiloword.types import BadSample, Example, Skipped, Source

if TYPE_CHECKING:
    from kiloword.apps.audit.command import Audit

KINDS = ("mismatch", "unreadable", "duplicate-image", "duplicate-caption", "generic", "label")
NAMES = {
    "mismatch": "pairs that do not match",
    "generic": "captions of many images",
    "duplicate-image": "near-duplicate images",
    "duplicate-caption": "repeated captions",
    "label": "labels that look wrong",
    "unreadable": "unreadable samples",
}


@naming_truncated()
def audit(options: Audit) -> None:
    """Run and print `kiloword audit`."""
    execution = replace(options.execution, device=choose(options.execution.device))
    matcher, workers = opened(options.model, execution)
    config = DataConfig(sources=options.data, extra_captions=options.extra_captions, raw_captions=options.raw_captions)
    source = plain = open_data(config, matcher.model.config.image.size)
    check_keys(source, "a keep-list")
    if execution.image_features or execution.text_features:
        folders = execution.image_features, execution.text_features
        source, tokenizer = reading_tokens(matcher.model, matcher.tokenizer, source, *folders, augmented=True)
        matcher = Matcher(matcher.model, tokenizer, matcher.method)
    with Lock(options.out, "auditing"), showing():
        inputs = Inputs(matcher, source, execution.batch, workers)
        data = _encoded(inputs) if options.features is None else _stored(inputs, options.model, options.features)
        fit = limit = None
        if data.flat:
            score, owner = (matcher.score, matcher.score_pairs), torch.from_numpy(data.owner)
            fit = fits(*score, data.images, data.texts, owner, options.chunk, options.seed)
            limit = rule(fit.annotated, fit.random, options.target_precision)
        names = getattr(source, "classnames", None)
        findings = list(findings_of(data, fit, limit, lambda row: pixels_of(plain, row), names, options.chunk))
        keep = keep_list(data, findings, fit, plain, options.drop)
        judged = Judged(data, findings, fit, limit, keep)
        for name, table in {"findings.parquet": findings_table(findings), "keep.parquet": keep}.items():
            buffer = io.BytesIO()
            pq.write_table(table, buffer)
            write_atomic(options.out / name, buffer.getvalue())
        facts = made_by([options.model], " ".join(options.data))
        write_json(options.out / "audit.json", {**facts, **_summary(judged)})
        blocks = dict(_sections(judged, options, plain))
        intro = (
            f"{plain.name}. These are suggestions to look, no verdicts: the model may be weak, or trained on this data."
        )
        write_page(options.out / "report.html", Page("Audit", intro, blocks, facts))
    if data.skipped:
        *lines, last = left_out(data.skipped).lines()
        warn(*lines, f"{last}{advice(data.skipped)}")
    counts, omitted = Counter(one.kind for one in findings), len(keep) - int(keep["keep"].to_numpy().sum())
    say(f"{count(len(data.keys), 'image')}, {count(len(data.flat), 'caption')}")
    say(*(f"{name:26}{counts[kind]:,}" for kind, name in NAMES.items() if kind != "unreadable"))
    say(*([] if limit is None else [described(limit)]))
    path, page = options.out / "keep.parquet", options.out / "report.html"
    say(f"keep-list: {path} omits {omitted:,} of {len(keep):,}; page: {page}")
    if omitted:
        say(f"to train without them: kiloword train ... --keep {shlex.quote(str(path))}")


def _encoded(inputs: Inputs) -> AuditedData:
    """All readable images of a source with their captions."""
    parts, texts, labels = list(seen(inputs)), [], list[Tensor]()
    for part in parts:
        captions = [caption for of_image in part.captions for caption in of_image]
        texts += [inputs.matcher.encode_text(captions, progress=False)] if captions else []
        labels.append(part.labels.cpu() if part.labels.ndim == 1 else torch.full((len(part.rows),), -1))
    rows = [(row, key, captions) for p in parts for row, key, captions in zip(p.rows, p.keys, p.captions, strict=True)]
    images = join([part.images for part in parts])
    return AuditedData(rows, torch.cat(labels), images, join(texts) if texts else {}, inputs.skipped)


def _stored(inputs: Inputs, model: str, folder: Path) -> AuditedData:
    """The data by features of a store, without labels.

    Raises: ValueError for a store of another model or of other data, and for a model whose scores need more.
    """
    store, source, matcher = FeatureStore(folder), inputs.source, inputs.matcher
    features, whole = store.of(source), open_teacher(model, "cpu").fingerprint
    text = matcher.encode_text(["a"])
    if {*text, *matcher.encode_image([np.zeros((32, 32, 3), np.uint8)])} != {"vec"}:
        raise ValueError(f"--features: the scores of {model} need more than one vector per image: omit it.")
    if store.file.weights not in (whole, prefix_fingerprint(whole, store.dim)):
        raise ValueError(f"{folder} has features of another model ({store.file.model}) than {model}.")
    if store.dim > (dim := text["vec"].shape[1]):
        raise ValueError(f"{folder} has features of {store.dim} numbers, and --dim asks for {dim}: omit --dim.")
    keep_prefix_(matcher.model, store.dim)
    examples = list[Example]()
    for row in range(len(source)):
        try:
            example = Example(key_of(source, row), row, torch.empty(0), texts_of(source, row))
            features(example, source)
            if not bool(example.image_features[store.name].any()):
                raise BadSample("not in the feature store")
            examples.append(example)
        except BadSample as error:
            inputs.skipped.append(Skipped(row, name_of(source, row), str(error)))
    images = torch.stack([one.image_features[store.name] for one in examples]).to(matcher.model.device)
    texts = torch.cat([one.text_features[store.name] for one in examples]).to(matcher.model.device)
    rows = [(one.row, one.key, one.captions) for one in examples]
    return AuditedData(rows, torch.full((len(rows),), -1), {"vec": images}, {"vec": texts}, inputs.skipped)


def pixels_of(source: Source, row: int) -> Pixels | None:
    """The image of a row, of at least 64 pixels a side where it has them; None where it cannot be read."""
    try:
        return decode(read_image(source, row).image, at_least=64)
    except BadSample:
        return None


@dataclass(frozen=True)
class Judged:
    """All results of an audit."""

    data: AuditedData
    findings: list[Finding]
    fit: Fits | None  # None: no captions
    limit: OutlierRule | None
    keep: pa.Table


def _summary(found: Judged) -> dict[str, Any]:
    """What audit.json holds."""
    data, fit, limit, keep = found.data, found.fit, found.limit, found.keep
    counts, kept = Counter(one.kind for one in found.findings), keep.filter(keep["keep"])
    return {
        "images": len(data.keys),
        "captions": len(data.flat),
        "findings": {kind: counts[kind] for kind in KINDS},
        "rule": None if limit is None else asdict(limit) | ({} if limit.flagged else {"threshold": None}),
        "weights": {} if fit is None else fit.weights,
        "keep": {
            "rows": len(keep),
            "kept": len(kept),
            "omitted": len(keep) - len(kept),
            "keys": len(kept["key"].unique()),
        },
    }


def described(rule: OutlierRule) -> str:
    """A rule in words."""
    share = f"by estimate {rule.share:.1%} of the pairs do not match"
    if rule.precision is None:
        return f"{share}; none is flagged at this precision"
    recall = f"estimated precision {rule.precision:.2f}, recall {rule.recall:.2f}"
    return f"{share}; {rule.flagged:,} are flagged below a fit of {rule.threshold:.2f}: {recall}"


def _sections(judged: Judged, options: Audit, source: Source) -> Iterator[tuple[str, list[Block]]]:
    """The page: headings and blocks."""
    data, findings, fit, limit = judged.data, judged.findings, judged.fit, judged.limit
    counts, omitted = Counter(one.kind for one in findings), Counter(judged.keep["reason"].to_pylist())
    found = [[name, counts[kind], omitted[kind]] for kind, name in NAMES.items() if counts[kind]]
    short: list[Block] = [Table(found, ["finding", "found", "captions that the keep-list omits"])]
    if fit is not None and limit is not None:
        plot = distributions({"annotated": fit.annotated, "random": fit.random}, "fit of a pair", 0.05)
        short += [Text(described(limit)), plot]
    yield "In short", short
    for kind, name in NAMES.items():
        every = [one for one in findings if one.kind == kind]
        shown, tiles = every[: options.gallery], list[Tile]()
        for one in shown if kind != "duplicate-caption" else ():
            for image, lines in ((one.image, [one.caption, one.detail]), (one.other_image, ["the first one"])):
                if image >= 0:
                    tiles.append(tile(source, data.rows[image], data.keys[image], *filter(None, lines), side=224))
        rows = [[one.key, one.caption, one.detail, one.other] for one in shown]
        examples = Gallery(tiles, columns=4) if tiles else Table(rows, ["key", "caption", "why", "first image"])
        if shown:
            yield name, [examples, Text(f"{len(shown):,} of {len(every):,}; findings.parquet has all.")]
