"""Everything that wants a GPU, in calls of under ten minutes each: `bench/gpu.sh PART` finds a Python and calls this.

    ten-minutes  what one needs to know of a card first: results against the CPU, waits for the GPU, steps, a real run
    steps        steps against open_clip, eager and compiled, then a training run
    llip         Llip's score to 32k texts, steps with mixture tokens and with six captions
    scenes       the papers' claims on drawn scenes at s16
    photos       the presets on Flickr8k at s16
    prolip       what Gaussians cost, then ProLIP on scenes and on photos at s16
    sycoca       what captions and masked images cost, SyCoCa on photos and on scenes at s16, pages to look at
    engines      a GPU against the CPU (varlen attention, checkpointing, compiling), engines, profile of a step
    loss         peak memory of the pair loss alone, to 64k texts, in blocks and all at once
    plan         what `kiloword plan` says of memory against the allocator, and how long training stands for a save

Results are lines of OUT/gpu-PART.jsonl: one for the machine at each call, then one a run. A run that succeeded with the
same code is not made again, so the same call goes on where the last one ended. Nothing is downloaded. Git and the
extras are optional: `--commit` names the code where there is no git, `--wheels` is a folder of wheels for open_clip,
which otherwise is left out. `--dry` makes the runs of ten-minutes on a CPU at size debug; `--list` prints commands.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHORTEST = 10  # seconds: with less left, a run is not begun
Row = dict[str, Any]


@dataclass
class Run:
    """One command of a part. Its result is the last JSON object that it prints, or the last row of `metrics`."""

    name: str
    limit: int  # seconds
    command: list[str]  # behind the interpreter
    metrics: Path | None = None
    again: bool = False  # goes on where it stopped, so that success is not its end
    needs: tuple[Path, ...] = ()


@dataclass
class Here:
    """Where a part runs. Args: data: holds flickr8k and others; scratch: of this call; dry: on a CPU, small."""

    data: Path
    out: Path
    scratch: Path
    workers: int
    theirs: bool  # open_clip is installed
    dry: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def step(self, size: str, batch: int, *flags: str, limit: int = 150) -> Run:
        flags = (*flags, *(() if self.theirs and not self.dry else ("--alone",)))
        name = " ".join(["step", size, str(batch), *flags])
        length = ("--steps", "20", "--warmup", "5")
        if self.dry:
            size, batch, length = "debug", 4, ("--steps", "1", "--warmup", "1")
        return self.bench(
            name, limit, "step", "--size", size, "--batch", str(batch), "--dtype", "bf16", *length, *flags
        )

    def bench(self, name: str, limit: int, script: str, *flags: str) -> Run:
        return Run(name, limit, [f"bench/{script}.py", "--device", self.device, *flags])

    def kiloword(self, name: str, limit: int, *words: str, **more: Any) -> Run:
        return Run(name, limit, ["-m", "kiloword", *words], **more)

    def experiment(self, name: str, *flags: str, needs: tuple[Path, ...] = ()) -> Run:
        words = ["--out", f"{self.out / name}", "--size", "s16", "--device", self.device, "--jobs", "2"]
        workers = ["--workers", str(self.workers // 2)]
        command = ["-m", f"research.{name}", *words, *workers, *flags]
        return Run(f"experiment {name}", 10_000, command, again=True, needs=needs)

    @property
    def photos(self) -> tuple[Path, Path]:
        return self.data / "flickr8k" / "train", self.data / "flickr8k" / "dev"

    def has(self, *paths: Path) -> bool:
        return all(path.exists() for path in paths)


Part = Callable[[Here], Iterator[Run]]


def ten_minutes(here: Here) -> Iterator[Run]:
    size, dry = ("debug", ["--dry"]) if here.dry else ("b32", [])
    ways = ["--ways", "fp32", "bf16", "bf16, selective checkpointing"] if here.dry else []  # compiling takes minutes
    yield here.bench("device against CPU", 150, "device_check", "--size", size, "--batch", "8", *ways)
    yield here.bench("waits for the GPU", 90, "syncs", *dry)
    yield here.step("b32", 1024, limit=60)
    yield here.step("b16", 512, limit=60)
    yield here.step("l14", 256, limit=70)
    yield here.step("b32", 1024, "--compile", limit=120) if not here.dry else here.step("b32", 1024, "--captions", "2")
    yield first_minute(here)
    texts, images = (["16", "32"], "8") if here.dry else (["1024", "4096", "16384"], "1024")
    peak = ["--memory", "8", "16"] if here.dry else []
    yield here.bench("llip pair loss", 60, "llip", "--images", images, "--repeat", "1", *peak, "--texts", *texts)


def first_minute(here: Here) -> Run:
    """A run as a user would start it, with the defaults for the device: how long it waits for data."""
    train, _ = here.photos
    large = here.data / "flickr8k_224" / "train"  # at the size of b32
    data = "scenes" if here.dry else next((f"{path}" for path in (large, train) if path.exists()), "scenes")
    length = ["--steps", "2", "--batch", "8"] if here.dry else ["--steps", "100", "--batch", "1024"]
    words = ["train", "clip", "--size", "debug" if here.dry else "b32", "--data", data, *length]
    out = here.scratch / "first"
    return here.kiloword(
        "first minute", 120, *words, "--device", here.device, "--out", f"{out}", metrics=out / "metrics.jsonl"
    )


def steps(here: Here) -> Iterator[Run]:
    # The figures that are quoted come first, so that a slow machine loses only the others.
    yield here.step("b32", 1024)
    yield here.step("b32", 1024, "--compile")
    yield here.step("b16", 512)
    yield here.step("l14", 256)
    yield here.step("b32", 256, "--captions", "6")
    yield from _trained(here)
    yield here.step("b32", 1024, "--cudagraphs")
    yield here.step("b16", 512, "--compile")
    yield here.step("l14", 256, "--compile")
    yield here.step("b32", 256, "--captions", "6", "--compile")
    yield here.step("b32", 256)
    yield here.step("b32", 32)
    yield here.step("b16", 1024)
    yield here.step("l14", 512)


def _trained(here: Here) -> Iterator[Run]:
    (train, dev), out = here.photos, here.out / "s16"
    words = ["train", "siglip", "--size", "s16", "--data", f"{train}", "--val", f"{dev}", "--epochs", "30"]
    yield here.kiloword(
        "train siglip s16 30 epochs", 200, *words, "--out", f"{out}", metrics=out / "metrics.jsonl", needs=(train, dev)
    )
    if here.has(out / "model", dev):
        words = ["eval", "retrieval", f"{out / 'model'}", "--data", f"{dev}"]
        yield here.kiloword("eval s16 retrieval", 60, *words, "--json", f"{here.out / 's16-retrieval.json'}")


def llip(here: Here) -> Iterator[Run]:
    texts = ["--texts", "1024", "4096", "16384"]
    yield here.bench("llip pair loss to 32k", 150, "llip", "--images", "1024", *texts, "32768")
    yield here.bench("llip pair loss K 64", 100, "llip", "--images", "1024", "--k", "64", *texts)
    half = ("--dtype", "bf16")
    yield here.bench("tokens b32", 100, "tokens", "--size", "b32", "--batch", "512", *half)
    yield here.bench("six captions b32", 100, "captions", "--size", "b32", "--batch", "256", *half)
    yield here.bench("six captions b16", 100, "captions", "--size", "b16", "--batch", "128", *half)


def loss(here: Here) -> Iterator[Run]:
    texts = ["4096", "8192", "16384", "32768", "65536"]
    yield here.bench("loss memory", 200, "loss", "--images", "1024", "--texts", *texts)
    every = ["--head", "gaussian", "contextual", "--loss", "softmax", "sigmoid", "matching"]
    yield here.bench("loss memory, heads", 200, "loss", "--images", "1024", "--texts", "4096", "16384", *every)


def plan(here: Here) -> Iterator[Run]:
    yield here.bench("plan", 400, "plan")
    yield here.bench("save", 150, "save", "--sizes", "b32", "l14")


def scenes(here: Here) -> Iterator[Run]:
    yield here.experiment("llip", "--steps", "3000")
    yield here.experiment("clip_c", "--steps", "3000", "--scenes", "inner")
    yield here.experiment("fff", "--steps", "3000")
    yield here.experiment("shortcut", "--steps", "2000", "--seeds", "0")


def photos(here: Here) -> Iterator[Run]:
    words = ["--mined", "--seeds", "0", "1", "2", "--batch", "256", "--steps", "700"]
    yield here.experiment("flickr", *_data(here), *words, needs=here.photos)


def _data(here: Here) -> list[str]:
    train, dev = here.photos
    return ["--data", f"{train}", "--val", f"{dev}"]


def prolip(here: Here) -> Iterator[Run]:
    cost = ["--dtype", "bf16", "--steps", "15"]
    yield here.bench("prolip step b32", 100, "prolip", "--size", "b32", "--batch", "512", *cost)
    yield here.bench("prolip step b16", 120, "prolip", "--size", "b16", "--batch", "256", *cost)
    pairs = ["--pairs", "1024", "2048", "4096", "8192", "16384", "--chunk", "0", "1024", "--repeat", "10"]
    yield here.bench("prolip pair loss", 100, "prolip_pairs", *pairs)
    chains = here.data / "coco_hier" / "dev"
    words = ["--chains", f"{chains}", "--seeds", "0", "1", "2", "--batch", "256", "--steps", "1500"]
    yield here.experiment("prolip_photos", *_data(here), *words, needs=(*here.photos, chains))
    yield here.experiment("prolip", "--seeds", "0", "1", "2", "--steps", "3000")


def sycoca(here: Here) -> Iterator[Run]:
    half = ("--dtype", "bf16")
    yield here.bench("sycoca steps b32", 150, "sycoca", "--size", "b32", "--batch", "256", *half)
    five = ["--batch", "64", "--captions", "5"]
    yield here.bench("sycoca steps b32, five captions", 150, "sycoca", "--size", "b32", *five, *half)
    yield here.bench("coca step b32 against open_clip", 100, "coca", "--batch", "256", "--steps", "15", *half)
    yield here.bench("caption loss", 60, "words", "--time", "--repeat", "10", *half)
    words = ["--seeds", "0", "--batch", "256", "--steps", "3000"]
    yield here.experiment("sycoca_photos", *_data(here), *words, needs=here.photos)
    if here.has(*here.photos):
        dev = here.photos[1]
        yield from _pages(here, "sycoca_photos", f"{dev}")
        yield from _inside(here, "sycoca_photos", dev / "0.tar")
    yield here.experiment("sycoca", "--seeds", "0", "1", "2", "--steps", "3000")
    yield from _pages(here, "sycoca", "scenes:test?n=500&captions=5")


def _pages(here: Here, experiment: str, data: str) -> Iterator[Run]:
    """What the finished models of an experiment write and paint."""
    for model in sorted((here.out / experiment).glob("*coca-0-*/model")):
        kinds = ["caption", "reconstruction"] if model.parent.name.startswith("sycoca") else ["caption"]
        for kind in kinds:
            page = here.out / experiment / f"{model.parent.name}-{kind}"
            words = ["eval", kind, f"{model}", "--data", data, "--device", here.device]
            yield here.kiloword(f"{kind} {page}", 120, *words, "--html", f"{page}.html", "--json", f"{page}.json")


def _inside(here: Here, experiment: str, shard: Path) -> Iterator[Run]:
    """What the decoders of a finished model do with three photos and one caption of each."""
    for model in sorted((here.out / experiment).glob("sycoca-0-*/model"))[:1]:
        with tarfile.open(shard) as tar:
            names = [name for name in tar.getnames() if not name.endswith(".txt")][:3]
            captions = [name.rpartition(".")[0] + ".txt" for name in names]
            tar.extractall(here.scratch, [tar.getmember(name) for name in (*names, *captions)], filter="data")
        texts = [(here.scratch / name).read_text().splitlines()[0] for name in captions]
        words = ["score", f"{model}", "--images", *(f"{here.scratch / name}" for name in names), "--texts", *texts]
        out = here.out / experiment / "inside"
        yield here.kiloword(f"inside {experiment}", 60, *words, "--explain", f"{out}", "--device", here.device)


def engines(here: Here) -> Iterator[Run]:
    check = ["--batch", "32"]
    yield here.bench("device against CPU, tiny", 120, "device_check", "--size", "tiny", *check)
    yield here.bench("device against CPU, b32", 240, "device_check", "--size", "b32", *check, "--profile")
    ways = ["--ways", "fp32", "bf16", "bf16, CUDA graph"]
    yield here.bench("CUDA graph against CPU", 150, "device_check", "--size", "b32", *check, *ways)
    for size in ("b32", "l14"):
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu", "bench/engines.py"]
        more = ["--device", here.device, "--dtype", "bf16", "--size", size, "--batch", "128", "--steps", "10"]
        yield Run(f"engines {size}", 150, [*words, *more])


PARTS: dict[str, Part] = {
    part.__name__.replace("_", "-"): part
    for part in (ten_minutes, steps, llip, scenes, photos, prolip, sycoca, engines, loss, plan)
}


@dataclass
class Results:
    """Rows of one part's file. Args: commit: of the code; a run of other code is made again."""

    file: Path
    commit: str | None
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            row = json.loads(line)
            if row.get("status") == 0 and row.get("commit") == self.commit and not row.get("again"):
                self.done.add(row["run"])

    def add(self, row: Row) -> None:
        line = json.dumps({**row, "commit": self.commit})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(line + "\n")
        print(line[:2000], flush=True)


def commit_of(given: str | None) -> str | None:
    """As given, or git's; with "+" behind it where files were changed; None without git."""
    if given:
        return given
    git = ["git", "-c", "safe.directory=*", "-C", f"{ROOT}"]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def machine(dry: bool) -> Row | None:
    """The card, or None where torch can use none."""
    try:
        import torch
    except ImportError:
        return None
    about = {"torch": torch.__version__, "cuda": torch.version.cuda, "cores": len(os.sched_getaffinity(0))}
    if dry:
        return {"card": None, **about}
    if not torch.cuda.is_available():
        return None
    card = torch.cuda.get_device_properties(0)
    memory = round(card.total_memory / 2**30, 1)
    return {"card": card.name, "memory_gib": memory, "cudnn": torch.backends.cudnn.version(), **about}


def has_open_clip(wheels: Path | None, into: Path) -> bool:
    """Whether open_clip can be imported by what is run; from `wheels` it is installed into the folder `into`."""
    if find_spec("open_clip") or (into / "open_clip").is_dir():
        return True
    if wheels is None:
        print("open_clip is not installed: steps are timed without it. To compare, carry a folder of its wheels:")
        print("  pip download open_clip_torch --dest wheels    # where there is a network; then: --wheels wheels")
        return False
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", "--target", f"{into}"]
    found = [f"{wheel}" for wheel in sorted(wheels.glob("*.whl")) if not find_spec(wheel.name.split("-")[0].lower())]
    return subprocess.run([*pip, *found]).returncode == 0 and (into / "open_clip").is_dir()


def make(run: Run, limit: float, packages: Path) -> Row:
    """Runs it for at most `limit` seconds: its row."""
    path = [f"{ROOT}", f"{packages}", *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, *run.command], capture_output=True, text=True, timeout=limit, env=settings, cwd=ROOT
        )
        status, out, error = ended.returncode, ended.stdout, ended.stderr
    except subprocess.TimeoutExpired as late:
        status, out, error = 124, _text(late.stdout), _text(late.stderr)
    row: Row = {
        "run": run.name,
        "seconds": round(time.monotonic() - began),
        "status": status,
        "result": result(run, out),
    }
    if run.again:
        row["again"] = True
    if status:
        lines = [line.strip() for line in error.splitlines() if line.strip()]
        row["error"] = "ran out of time" if status == 124 else (lines or ["no message"])[-1][:500]
    return row


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def result(run: Run, printed: str) -> Any:
    """The last JSON object that was printed, or the last training row of the run's metrics; None without one."""
    if run.metrics is not None:
        lines = run.metrics.read_text().splitlines() if run.metrics.exists() else []
        rows = [row for row in map(json.loads, lines) if "pairs_per_s" in row]
        return rows[-1] if rows else None
    lines = printed.splitlines(keepends=True)
    for start in (n for n in reversed(range(len(lines))) if lines[n].startswith("{")):
        try:
            return json.JSONDecoder().raw_decode("".join(lines[start:]))[0]
        except ValueError:
            continue
    return None


def go(runs: Iterator[Run], results: Results, seconds: float, packages: Path, patience: int = 1) -> bool:
    """Makes what is not yet done, as long as there is time. Returns: whether nothing failed.

    Args: patience: times its limit that a run may take.
    """
    end, good = time.monotonic() + seconds, True
    for run in runs:
        left = end - time.monotonic()
        missing = [f"{path}" for path in run.needs if not path.exists()]
        if run.name in results.done:
            print(f"done before: {run.name}")
        elif missing:
            print(f"skipped: {run.name}: there is no {', '.join(missing)}; set --data")
        elif left < SHORTEST:
            print(f"skipped: {run.name}: the {seconds:.0f} seconds are used up; the same call goes on")
        else:
            limit = min(run.limit * patience, left)
            print(f"== {run.name} (at most {limit:.0f} s)", flush=True)
            row = make(run, limit, packages)
            results.add(row)
            good &= row["status"] == 0
    return good


def main() -> int:
    args = arguments()
    about = machine(args.dry)
    if about is None and not args.list:
        print("skipped: no GPU that torch can use")  # an answer, not a failure: the caller may try this on any machine
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    packages = args.out.resolve() / "packages"
    theirs = not args.dry and has_open_clip(args.wheels, packages)
    with tempfile.TemporaryDirectory() as scratch:
        here = Here(args.data.resolve(), args.out.resolve(), Path(scratch), args.workers, theirs, args.dry)
        if args.list:
            for run in PARTS[args.part](here):
                print(f"{run.name}: {shlex.join(['python', *run.command])}")
            return 0
        name = f"gpu-{args.part}{'-dry' if args.dry else ''}.jsonl"
        results = Results(args.out / name, commit_of(args.commit))
        results.add(about or {})
        if args.dry:  # limits are for a card, and a test shares its cores with others
            os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            args.seconds *= 10
        good = go(PARTS[args.part](here), results, args.seconds, packages, 10 if args.dry else 1)
    print(f"results: {results.file}")
    return 0 if good else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS, nargs="?", default="steps")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="holds flickr8k, coco_hier")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="kept from call to call")
    parser.add_argument("--seconds", type=float, default=560, help="of all runs of this call")
    parser.add_argument("--workers", type=int, default=max(0, len(os.sched_getaffinity(0)) - 2), help="of experiments")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels: open_clip's and those that it needs")
    parser.add_argument("--commit", help="names the code where there is no git")
    parser.add_argument("--dry", action="store_true", help="ten-minutes on a CPU at size debug, to see that it works")
    parser.add_argument("--list", action="store_true", help="print the commands of the part, and end")
    args = parser.parse_args()
    if args.dry and args.part != "ten-minutes":
        parser.error("--dry is for ten-minutes; --list prints the commands of any part")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
