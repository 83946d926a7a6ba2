"""Images of a probe as frozen features: computed once, cached on disk if asked for, and drawn by class."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from kiloword.distributed.sharing import gathered, is_first
from kiloword.evaluation.features import labelled
from kiloword.evaluation.task import Inputs
from kiloword.files import write_atomic
from kiloword.model.encoding import join
from kiloword.randomness import key
from kiloword.types import Features, Skipped, Source

if TYPE_CHECKING:
    from kiloword.model.model import Model

FORMAT = "kiloword-probe-1"
log = logging.getLogger(__name__)


@dataclass
class Split:
    """All labelled images of a source, on the CPU."""

    features: dict[str, Tensor]  # "vec" [N, D], and "pooled" [N, W] where the model has it; float32
    labels: Tensor  # [N] int64
    rows: Tensor  # [N] int64, of the source
    skipped: list[Skipped]


def split(inputs: Inputs, cache: Path | None) -> Split:
    """Features of a source without augmentation, read from a file in the folder `cache` or written to it.

    The name of the file depends on the weights, their precision, the data's fingerprint and the size of images.
    """
    if cache is None:
        return encoded(inputs)
    path = cache / f"{_name(inputs.matcher.model, inputs.source)}.probe"
    stored = _read(path)
    lacking = any(gathered(stored is None))  # on any rank: then all encode
    if stored is None or lacking:
        stored = encoded(inputs)
        if is_first():
            _write(path, stored)
    return stored


def encoded(inputs: Inputs) -> Split:
    """Encode every image once. Raises: ValueError for data without classes, or with several per image."""
    inputs = replace(inputs, skipped=[])
    features: list[Features] = []
    labels, rows = [], []
    with before_projection(inputs.matcher.model) as caught:

        def encode(images: Tensor) -> Features:
            caught.clear()
            return _with_pooled(inputs.matcher.encode_image(images, inputs.batch), caught)

        for part in labelled(inputs, encode):
            if part.labels.ndim != 1:
                raise ValueError(f"{inputs.source.name} has many labels an image: a probe needs one class each")
            features.append({n: part.images[n].float().cpu() for n in ("vec", "pooled") if n in part.images})
            labels.append(part.labels.cpu())
            rows += part.rows
    return Split(join(features), torch.cat(labels), torch.tensor(rows), inputs.skipped)


def _with_pooled(images: Features, caught: Sequence[Tensor]) -> Features:
    """Features with what was caught while their batch was encoded."""
    if all(x.ndim == 2 for x in caught) and sum(map(len, caught)) == len(images["vec"]):
        return {**images, "pooled": torch.cat(list(caught))}
    return images


@contextmanager
def before_projection(model: Model) -> Iterator[list[Tensor]]:
    """A list that collects the inputs [I, W] of the projection to the embedding whenever images are encoded.

    Poolings of several vectors project their sum last; without a projection it collects what the pooling returns.
    """
    pooling: Any = getattr(model.head, "pooling", None)
    caught: list[Tensor] = []
    layer = next((x for name in ("image_projection", "out") if (x := getattr(pooling, name, None)) is not None), None)
    if isinstance(layer, nn.Module):
        hook = layer.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    elif isinstance(pool := getattr(pooling, "image_pool", None), nn.Module):
        hook = pool.register_forward_hook(lambda _, inputs, out: caught.append(out))
    else:
        yield caught
        return
    try:
        yield caught
    finally:
        hook.remove()


def _name(model: Model, source: Source) -> str:
    """Name of the cached file: a digest of what features depend on."""
    digest = hashlib.blake2b(digest_size=16)
    parts = (FORMAT, model.config, source.fingerprint, len(source))
    digest.update(repr(parts).encode())
    digest.update(model.precision.encode() if model.precision != "fp32" else b"")
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _write(path: Path, encoded: Split) -> None:
    """One line of JSON, then tensors: readers see all of it or nothing."""
    body = save({**encoded.features, "labels": encoded.labels, "rows": encoded.rows})
    head = {"format": FORMAT, "checksum": _checksum(body), "skipped": [astuple(row) for row in encoded.skipped]}
    write_atomic(path, json.dumps(head).encode() + b"\n" + body)


def _read(path: Path) -> Split | None:
    """None where there is no file, or, with a warning, a damaged one."""
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        header = json.loads(head)
        if _checksum(body) != header["checksum"]:
            raise ValueError("its checksum differs")
        tensors = load(body)
        labels, rows = tensors.pop("labels"), tensors.pop("rows")
        return Split(tensors, labels, rows, [Skipped(*row) for row in header["skipped"]])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        log.warning("%s is damaged (%s): the features are computed again.", path, error)
        return None


def _checksum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def order(encoded: Split, fingerprint: str, seed: int) -> list[list[int]]:
    """Places in the split by class, [C][n_c], each class shuffled by the seed.

    The order depends on the rows alone: the first k of a class are the same for any larger k.
    """
    drawn = [key(fingerprint, seed, "probe rows", row) for row in encoded.rows.tolist()]
    by_class: list[list[int]] = [[] for _ in range(int(encoded.labels.max()) + 1)]
    for place in sorted(range(len(drawn)), key=drawn.__getitem__):
        by_class[int(encoded.labels[place])].append(place)
    return by_class


def shots(by_class: Sequence[Sequence[int]], k: int, names: Sequence[str]) -> list[list[int]]:
    """The first k places of each class that occurs. Raises: ValueError where a class has fewer."""
    few = next((c for c, places in enumerate(by_class) if 0 < len(places) < k), None)
    if few is not None:
        raise ValueError(
            f"the class {names[few]!r} has {len(by_class[few])} labelled training images, but --probe.shots is {k}: "
            "expected at least as many in every class."
        )
    return [list(places[:k]) for places in by_class]


def held_out(by_class: Sequence[Sequence[int]], share: float) -> tuple[list[int], list[int]]:
    """Places to fit on, and places to choose on: the last `share` of each class, at least one, but not its only one.

    Raises: ValueError where no class has two.
    """
    fitted: list[int] = []
    chosen: list[int] = []
    for places in by_class:
        count = min(max(1, round(share * len(places))), len(places) - 1) if len(places) > 1 else 0
        fitted += places[: len(places) - count]
        chosen += places[len(places) - count :]
    if not chosen:
        raise ValueError(
            "one training image a class leaves none to choose a weight decay on: give --val, --probe.weight-decay, "
            "or --probe.shots 2 and more."
        )
    return fitted, chosen
