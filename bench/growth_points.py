"""What `bench/growth.py` measures: work of a kind and an amount, made ready, and then the call that is timed."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import context
import llip
import loss
import save
import startup
import tokens
from kiloword.apps.mine import analyses, search as mining
from kiloword.apps.mine.corpus import Corpus
from kiloword.apps.search import library as libraries
from kiloword.apps.search.library import FILE, Library, LibraryFile, publish
from kiloword.apps.search.rank import find
from kiloword.config.recipes import DataConfig, TextConfig, sizes
from kiloword.data import loader, open as sources, sampler
from kiloword.data.edits import MixtureSource
from kiloword.data.reading import captions_of
from kiloword.data.tar import open_tars as open_all
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.data.transforms.mix import Compose
from kiloword.data.transforms.settings import ComposeSettings
from kiloword.losses.pertext import choose
from kiloword.methods.fff import Mined
from kiloword.randomness import Draw
from step import alone, given, our_side, step

Call = Callable[[], Mapping[str, float] | None]
"""The measured call. What it returns is written beside its time: "work", where that is not the amount, "disk_mb"."""
Ready = Callable[[int, Path], Call]
"""Amount, folder that all points share -> the call."""

IMAGES = 1024  # of the pair loss
DIM = 64  # of features that are mined and searched
SAMPLES = 10_000  # of a tar
LINKS = 30_000  # names of one file; ext4 allows 65,000
TOWERS = ("debug", "tiny", "s16")
_TURN = itertools.count()  # a new epoch, seed or cache for every call


class Series(NamedTuple):
    """Kind of work, the amounts, and the exponents that time and memory must not exceed. None: not asked."""

    what: str
    unit: str
    amounts: tuple[int, ...]
    time: float
    memory: float
    ready: Ready


def doubled(first: int, last: int) -> tuple[int, ...]:
    return tuple(first << n for n in range((last // first).bit_length()))


def tenfold(first: int, last: int) -> tuple[int, ...]:
    return tuple(first * 10**n for n in range(len(str(last // first))))


def pair_loss(name: str, square: bool = False) -> Ready:
    """Forward and backward of a pair loss, D 512: IMAGES images and n texts, or n of both."""

    def ready(n: int, folder: Path) -> Call:
        args = argparse.Namespace(images=n if square else IMAGES, texts_now=n, dim=512, device="cpu")
        return quiet(loss.in_blocks(loss.LOSSES[name], *loss.make(args, "single"), 0))

    return ready


def captions(n: int, folder: Path) -> Call:
    """A step of clip, `tiny`, 16 images with n captions each."""
    args = argparse.Namespace(size="tiny", device="cpu", dtype="fp32", compile=False)
    model, side = alone(args)
    batch = given(model, 16, n, 0, "cpu")
    return quiet(lambda: step(side, batch, args))


def llip_pairs(n: int, folder: Path) -> Call:
    """Llip's pair loss, 64 images and 512 texts, D 512, 8 heads, K = n, in the form that it chooses."""
    args = argparse.Namespace(k=n, dim=512, heads=8, device="cpu")
    return quiet(llip.make(args, 64, 512, torch.float32, choose((n, 8, 64), 512)))


def llip_step(n: int, folder: Path) -> Call:
    """A step of llip, `tiny`, 16 images with a caption each, K = n."""
    args = argparse.Namespace(size="tiny", k=n, device="cpu", dtype="fp32")
    side, batch = tokens.Side(args, "contextual"), tokens.batch(sizes()["tiny"], 16, 0, "cpu")
    return quiet(lambda: side.step(batch))


def long_captions(n: int, folder: Path) -> Call:
    """A step of clip, `tiny`, 16 images, captions of n tokens each, at context 512."""
    args = argparse.Namespace(size="tiny", batch=16, context=512, device="cpu", dtype="fp32")
    args.compile = False
    side, batch = our_side(context.models(args)[512], args), context.captions(args, [n] * 16)
    return quiet(lambda: step(side, batch, args))


def tars(rows: int, folder: Path) -> Path:
    """A set of tars of SAMPLES samples, as links to a few of them."""
    out = folder / f"tars-{rows}"
    for n in range(0, max(1, rows // SAMPLES), LINKS):
        if not (part := out / f"{n:06d}").exists():
            startup.make(part, min(LINKS, max(1, rows // SAMPLES) - n), SAMPLES)
    return out


def parts_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.tar"))


def open_tars(warm: bool) -> Ready:
    """Open a set of n rows in tars: the first time, or with the file of rows that this leaves."""

    def ready(n: int, folder: Path) -> Call:
        paths, cache = parts_of(tars(n, folder)), folder / f"cache-{n}"
        os.environ["KILOWORD_CACHE"] = str(cache)
        if warm and not cache.exists():
            open_all("tars", paths)

        def call() -> None:
            if not warm:
                shutil.rmtree(cache, ignore_errors=True)
            open_all("tars", paths)

        return call

    return ready


def before_first_step(n: int, folder: Path) -> Call:
    """What follows on opening: 1,000 captions for the vocabulary, order and first batch."""
    os.environ["KILOWORD_CACHE"] = str(folder / f"cache-{n}")
    source = open_all("tars", parts_of(tars(n, folder)))
    words, data = Tokenizer.train(["a caption"], 262), DataConfig(sources=(str(folder),))

    def call() -> None:
        deque(itertools.islice(captions_of(source), 1_000), 0)
        order = sampler.Order(n, 256, next(_TURN))
        loader.Loader(source, order, data, TextConfig(vocab=262), 32, words).batch(0)

    return call


def order(n: int, folder: Path) -> Call:
    """The rows of a batch of 256 in a new epoch of n rows."""
    return quiet(lambda: sampler.Order(n, 256).batch_rows(next(_TURN) * (n // 256)))


def subset(n: int, folder: Path) -> Call:
    """The rows of a batch of 256 from a fixed subset of 10,000 of n rows (`--rows`)."""

    def call() -> None:
        sampler.subset.cache_clear()
        sampler.Order(10_000, 256, of=n).batch_rows(0)

    return call


def mixture(n: int, folder: Path) -> Call:
    """A new epoch of a mixture that takes half of n rows."""
    source: Any = PretendedRows(n)
    made = MixtureSource([source], [0.5])
    return quiet(lambda: made.at(1 + next(_TURN)))


class PretendedRows:
    """A source of n rows that has nothing else."""

    def __init__(self, n: int) -> None:
        self.n, self.name, self.fingerprint = n, "rows", str(n)

    def __len__(self) -> int:
        return self.n


def partner(n: int, folder: Path) -> Call:
    """The partner of a row, fixed by the seed, among n rows."""
    chooser, random = Compose(ComposeSettings(partner="fixed")), np.random.default_rng(0)
    return quiet(lambda: chooser.partner(7, n, Draw(next(_TURN), 0, 7), random))


def table(n: int, folder: Path) -> Call:
    """Open a parquet table of n images and captions."""
    path = folder / f"{n}.parquet"
    if not path.exists():
        names = [f"{row}.jpg" for row in range(n)]
        pq.write_table(pa.table({"image": names, "caption": names}), path)
    return quiet(lambda: sources.open_source(str(path)))


def scenes(n: int, folder: Path) -> Call:
    """The first of n drawn scenes."""
    return quiet(lambda: sources.open_source(f"scenes?n={n}&seed={next(_TURN)}").record(0))


def corpus(captions: int, images: int = 0) -> Corpus:
    """Random features; five captions an image."""
    images = images or captions // 5
    random = torch.Generator().manual_seed(0)
    sides = [
        torch.nn.functional.normalize(torch.randn(n, DIM, generator=random), dim=1).half().numpy()
        for n in (images, captions)
    ]
    starts = np.arange(images + 1) * 5
    names = [f"a caption {n}" for n in range(captions)]
    return Corpus([str(n) for n in range(images)], names, starts, *sides)


def mine(n: int, folder: Path) -> Call:
    """The search among all pairs of n captions and n / 5 images."""
    made = corpus(n)
    return quiet(lambda: mining.search(made, Mined()))


def mine_share(n: int, folder: Path) -> Call:
    """The same for 256 of the images alone, a block: what one of many ranks does."""
    made = corpus(n)
    mining.in_turns = lambda parts, do: map(do, parts[:1])
    return quiet(lambda: mining.search(made, Mined(), chunk=256))


def mine_rest(n: int, folder: Path) -> Call:
    """Calibration and analyses of n captions."""
    made = corpus(n)

    def call() -> None:
        mining.calibrate(made.annotated(), mining.random_pairs(made, 0)[0], Mined())
        analyses.analysed(made, 1024, 0)

    return call


def vectors(n: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(n, DIM, generator=torch.Generator().manual_seed(0)), dim=1)


def index(n: int, folder: Path) -> Call:
    """Write a library of n photos, without encoding them."""
    vec = vectors(n)

    def call() -> Mapping[str, float]:
        out = Path(tempfile.mkdtemp(dir=folder))
        names = [f"{n:07}.jpg" for n in range(len(vec))]
        rows = pa.table(dict.fromkeys(libraries.ROWS.names, names)).cast(libraries.ROWS)
        publish(out, LibraryFile(folder="."), rows, {"vec": vec.numpy()}, None, np.zeros(0, np.int64))
        size = sum(path.stat().st_size for path in out.iterdir()) / 1e6
        if not (folder / f"library-{n}").exists():
            out.rename(folder / f"library-{n}")
        return {"disk_mb": round(size, 2)}

    return call


def library(n: int, folder: Path) -> Path:
    if not (folder / f"library-{n}" / FILE).exists():
        index(n, folder)()
    return folder / f"library-{n}"


def open_library(n: int, folder: Path) -> Call:
    """Open a library of n photos."""
    path = library(n, folder)
    return quiet(lambda: Library(path))


def search(n: int, folder: Path) -> Call:
    """The ten best of n photos for a vector, all of them scored, once their vectors are read."""
    opened, query = Library(library(n, folder)), vectors(1)[0].numpy()
    parts, nothing = [(query, 1.0)], cast(Any, None)  # a vector needs no model
    find(opened, nothing, parts, 10)
    return quiet(lambda: find(opened, nothing, parts, 10))


def checkpoint(which: int, folder: Path) -> Call:
    """Save a state of siglip with EMA, of a size in TOWERS; the amount of work is its parameters."""
    run = save.ready(TOWERS[which], "cpu", Path(tempfile.mkdtemp(dir=folder)) / "run")
    parameters = sum(p.numel() for p in run.learner.parameters())

    def call() -> Mapping[str, float]:
        with save.saves(run) as state_saver:
            state_saver.save()
        state = (path for path in (run.out / "state").rglob("*") if path.is_file())
        return {"work": parameters, "disk_mb": round(sum(path.stat().st_size for path in state) / 1e6, 3)}

    return call


def quiet(do: Callable[[], object]) -> Call:
    def call() -> None:
        do()

    return call


ROWS, TEXTS, LIBRARY = tenfold(10_000, 10**9), doubled(1024, 65536), (10_000, 30_000, 100_000, 300_000, 1_000_000)
SERIES = {
    "softmax": Series("pair loss, softmax, 1024 images", "texts", TEXTS, 1, 1, pair_loss("softmax")),
    "sigmoid": Series("pair loss, sigmoid, 1024 images", "texts", TEXTS, 1, 1, pair_loss("sigmoid")),
    "batch": Series(
        "pair loss, softmax, as many images", "texts", doubled(512, 32768), 2, 1, pair_loss("softmax", square=True)
    ),
    "captions": Series("a step, 16 images", "captions an image", doubled(1, 16), 1, 1, captions),
    "llip-pairs": Series("Llip's pair loss", "K", doubled(1, 128), 1, 1, llip_pairs),
    "llip-step": Series("a step of llip", "K", doubled(1, 128), 2, 1, llip_step),
    "tokens": Series("a step, 16 captions", "tokens a caption", (10, 32, 64, 128, 256, 512), 2, 1, long_captions),
    "open-first": Series("open tars, the first time", "rows", ROWS, 1, 1, open_tars(warm=False)),
    "open": Series("open tars, later", "rows", ROWS, 1, 1, open_tars(warm=True)),
    "first-batch": Series("digest, vocabulary, first batch", "rows", ROWS, 0, 1, before_first_step),
    "order": Series("order of an epoch", "rows", ROWS, 1, 1, order),
    "subset": Series("10,000 rows of all", "rows", ROWS, 0, 0, subset),
    "mixture": Series("half of the rows an epoch", "rows", ROWS, 1, 1, mixture),
    "partner": Series("fixed partners", "rows", ROWS, 0, 0, partner),
    "table": Series("open a parquet table", "rows", tenfold(10_000, 10**7), 1, 1, table),
    "scenes": Series("draw scenes", "rows", tenfold(10_000, 10**6), 1, 1, scenes),
    "mine": Series("mine all pairs, 5 captions an image", "captions", doubled(2500, 1_280_000), 2, 1, mine),
    "mine-share": Series("mine the pairs of 256 images", "captions", LIBRARY, 1, 1, mine_share),
    "mine-rest": Series("calibrate and analyse", "captions", LIBRARY, 1, 1, mine_rest),
    "index": Series("write a library", "photos", LIBRARY, 1, 1, index),
    "open-library": Series("open a library", "photos", LIBRARY, 1, 1, open_library),
    "search": Series("a search, all photos scored", "photos", LIBRARY, 1, 1, search),
    "checkpoint": Series("save a state", "parameters", (0, 1, 2), 1, 1, checkpoint),
}
