"""The verb `audit`: encode a data set once, judge its pairs, write a page, tables and a keep-list."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kiloword.apps.audit import AuditOptions
from kiloword.apps.audit.findings import (
    Audit,
    AuditedData,
    Finding,
    as_json,
    duplicate_captions,
    duplicate_images,
    findings_table,
    generic,
    keep_list,
    label_findings,
    mismatches,
    unreadable,
    write_table,
)
from kiloword.apps.audit.labels import wrong_labels
from kiloword.apps.audit.outliers import OutlierRule, rule
from kiloword.apps.audit.page import page
from kiloword.apps.audit.pairs import Fits, fits
from kiloword.apps.audit.resume import FOLDER, SavedRows, encoded
from kiloword.apps.audit.similar import Pixels, groups, near_duplicates, repeated
from kiloword.apps.search.index import fingerprint
from kiloword.config.recipes import DataConfig
from kiloword.data.images.decode import decode
from kiloword.data.joins import check_keys, sampled
from kiloword.data.open import open_data
from kiloword.data.reading import advice, left_out, name_of
from kiloword.data.source import key_of, texts_of
from kiloword.distributed.device import choose
from kiloword.errors import count, naming_truncated
from kiloword.evaluation.command import Execution, opened
from kiloword.evaluation.task import Inputs
from kiloword.files import Lock, write_json
from kiloword.model.prefix import keep_prefix_
from kiloword.report import made_by, signed, write
from kiloword.stores.features import FeatureStore
from kiloword.stores.teachers import open_teacher, prefix_fingerprint
from kiloword.terminal import say, warn
from kiloword.terminal.progress import showing
from kiloword.types import BadSample, Example, Features, NoCaption, Skipped, Source

if TYPE_CHECKING:
    from kiloword.api import Matcher

KEEP, FINDINGS, SUMMARY, REPORT = "keep.parquet", "findings.parquet", "audit.json", "report.html"
FORMAT = "kiloword-audit-1"  # of encoded rows


@naming_truncated()
def main(
    sources: Sequence[str],
    model: str,
    out: Path,
    options: AuditOptions,
    execution: Execution,
    extra_captions: Sequence[str] = (),
    raw_captions: bool = True,
    features: Path | None = None,
) -> None:
    """Run and print `kiloword audit`. Errors: ValueError for data, a model or stores that cannot be used."""
    options.check()
    if features is not None and (execution.image_features or execution.text_features):
        raise ValueError("--features replaces --image-features and --text-features: omit them, or --features.")
    execution = replace(execution, device=choose(execution.device))
    matcher, workers = opened(model, execution)
    size = matcher.model.config.image.size
    data = DataConfig(sources=tuple(sources), extra_captions=tuple(extra_captions), raw_captions=raw_captions)
    source = plain = open_data(data, size)
    check_keys(plain, "a keep-list")
    if execution.image_features or execution.text_features:
        matcher, source = _on_tokens(matcher, source, execution)
    with Lock(out, "auditing"), showing():
        inputs = Inputs(matcher, source, execution.batch, workers)
        stored = features or execution.image_features or execution.text_features
        saved = None if stored else SavedRows(out / FOLDER, identity_of(inputs))
        audit = audit_of(
            inputs, options, encoded(inputs, saved) if features is None else _stored(inputs, model, features)
        )
        keep = keep_list(audit, plain, options)
        facts = made_by([model], " ".join(sources))
        write_table(out / FINDINGS, findings_table(audit.findings))
        write_json(out / SUMMARY, as_json(audit, keep, facts))
        write_table(out / KEEP, keep)
        training = training_on(data, out / KEEP)
        html = page(audit, keep, plain.name, options, partial(_pixels, plain), training)
        write(out / REPORT, signed(html, facts))
        if saved is not None:
            saved.clear()
    _print(audit, keep.column("keep").to_numpy(), out, training)


def training_on(data: DataConfig, keep: Path) -> str:
    """The command that trains on what a keep-list keeps of the same data."""
    extra = ["--extra-captions", *data.extra_captions] if data.extra_captions else []
    raw = [] if data.raw_captions else ["--no-raw-captions"]
    return shlex.join(
        ["kiloword", "train", "METHOD", "--data", *data.sources, *extra, *raw, "--keep", str(keep), "--out", "DIR"]
    )


def identity_of(inputs: Inputs) -> dict[str, str]:
    """What the features of an audit are computed from."""
    model = inputs.matcher.model
    return {
        "format": FORMAT,
        "model": fingerprint(inputs.matcher),
        "precision": str(model.precision),
        "data": f"{inputs.source.fingerprint} {sampled(inputs.source)}",
    }


def _one_vector(matcher: Matcher) -> bool:
    """Whether the scores of a model need no more than a vector for each image and text."""
    return {*matcher.encode_text(["a"]), *matcher.encode_image([np.zeros((32, 32, 3), np.uint8)])} == {"vec"}


def _on_tokens(matcher: Matcher, source: Source, execution: Execution) -> tuple[Matcher, Source]:
    from kiloword.api import Matcher
    from kiloword.stores.runs import reading_tokens

    folders = execution.image_features, execution.text_features
    source, tokenizer = reading_tokens(matcher.model, matcher.tokenizer, source, *folders, augmented=True)
    return Matcher(matcher.model, tokenizer, matcher.method), source


def audit_of(inputs: Inputs, options: AuditOptions, read: tuple[AuditedData, Features]) -> Audit:
    """Find what is wrong with a source. Args: read: its rows, and the features of their captions [T, ...]."""
    corpus, features = read
    source, matcher = inputs.source, inputs.matcher
    findings: list[Finding] = []
    fit: Fits | None = None
    limit: OutlierRule | None = None
    if texts := corpus.texts:
        owner = torch.from_numpy(corpus.owner)
        fit = fits(matcher.score, matcher.score_pairs, corpus.images, features, owner, options.chunk, options.seed)
        limit = rule(fit.annotated, fit.random, options.target_precision)
        findings += [*mismatches(corpus, fit, limit), *generic(corpus, fit, limit)]
        findings += duplicate_captions(corpus, repeated(texts))
    look = partial(_pixels, source, at_least=64)
    vectors = corpus.images["vec"].float().cpu()
    same = near_duplicates(vectors, lambda image: look(corpus.rows[image]), options.chunk)
    findings += duplicate_images(corpus, same, groups(same))
    names = getattr(source, "classnames", None)
    findings += label_findings(corpus, wrong_labels(vectors, corpus.labels), names)
    findings += unreadable(corpus.skipped)
    return Audit(corpus, findings, fit, limit, names)


def _stored(inputs: Inputs, model: str, folder: Path) -> tuple[AuditedData, Features]:
    """The data by features that are stored, without labels, and the features of its captions.

    Raises: ValueError for a store of another model or of other data, and for a model whose scores need more.
    """
    store, source, matcher = FeatureStore(folder), inputs.source, inputs.matcher
    features = store.of(source)
    if not _one_vector(matcher):
        raise ValueError(f"--features: the scores of {model} need more than one vector per image: omit it.")
    whole, dim, size = open_teacher(model, "cpu").fingerprint, store.dim, matcher.model.config.head.dim
    if store.file.weights not in (whole, prefix_fingerprint(whole, dim)):
        raise ValueError(f"{folder} has features of another model ({store.file.model}) than {model}.")
    if dim > size:
        raise ValueError(f"{folder} has features of {dim} numbers, and --dim asks for {size}: omit it.")
    if dim < size:
        keep_prefix_(matcher.model, dim)
    data = AuditedData([], [], [], torch.empty(0, dtype=torch.int64), {}, inputs.skipped)
    vectors, texts = list[Tensor](), list[Tensor]()
    for row in range(len(source)):
        try:
            example = Example(key_of(source, row), row, torch.empty(0), texts_of(source, row))
            features(example, source)
        except BadSample as error:
            data.skipped.append(Skipped(row, name_of(source, row), str(error)))
            continue
        if not bool(example.image_features[store.name].any()):
            data.skipped.append(Skipped(row, example.key, "not in the feature store"))
            continue
        data.rows.append(row)
        data.keys.append(example.key)
        data.captions.append(example.captions)
        vectors.append(example.image_features[store.name])
        texts.append(example.text_features[store.name])
    device = matcher.model.device
    data.images, data.labels = {"vec": torch.stack(vectors).to(device)}, torch.full((len(vectors),), -1)
    return data, {"vec": torch.cat(texts).to(device)}


def _pixels(source: Source, row: int, at_least: int = 224) -> Pixels | None:
    """The image of a row; None where it cannot be read."""
    try:
        record = source.record(row)
    except NoCaption as error:
        record = error.record
    except BadSample:
        return None
    try:
        return decode(record.image, at_least=at_least)
    except BadSample:
        return None


def _print(audit: Audit, kept: np.ndarray, out: Path, training: str) -> None:
    corpus, counts = audit.corpus, audit.counts
    if corpus.skipped:
        *lines, last = left_out(corpus.skipped).lines()
        warn(*lines, f"{last}{advice(corpus.skipped)}")
    say(f"{count(len(corpus.keys), 'image')}, {count(len(corpus.texts), 'caption')}")
    if audit.rule is not None:
        say(f"pairs that do not match   {describe(audit.rule)}")
    say(
        f"near-duplicate images     {counts['duplicate-image']:,}",
        f"repeated captions         {counts['duplicate-caption']:,}",
        f"captions of many images   {counts['generic']:,}",
    )
    if bool((corpus.labels >= 0).any()):
        say(f"labels that look wrong    {counts['label']:,}")
    say(f"keep-list: {out / KEEP} omits {int((~kept).sum()):,} of {len(kept):,}; page: {out / REPORT}")
    if not kept.all():
        say(f"train without them: {training}")


def describe(rule: OutlierRule) -> str:
    """A rule in words."""
    share = f"about {rule.share:.1%} of all by estimate"
    if rule.precision is None:
        return f"none is flagged at this precision ({share})"
    return (
        f"{rule.flagged:,} flagged below a fit of {rule.threshold:.2f}: estimated precision {rule.precision:.2f}, "
        f"recall {rule.recall:.2f} ({share})"
    )
