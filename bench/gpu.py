"""Everything that wants a GPU, in calls of under ten minutes each: `bench/gpu.sh PART` finds a Python and calls this.

    ten-minutes  what one needs to know of a card first: results against the CPU, waits, killed runs, steps, a real run
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
which otherwise is omitted. `--dry` makes the runs of ten-minutes on a CPU at size debug; `--list` prints commands.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sessions

ROOT = Path(__file__).resolve().parents[1]
CODE = ("bench", "kiloword", "research", ":!*.jsonl")  # what runs are made of; figures are no code
SHORTEST = 10  # seconds: with less left, a run is not begun
Row = dict[str, Any]

# Part -> runs: the limit in seconds, then a script of bench/, `kiloword` or `research.NAME` with its arguments. Checks
# and figures that are quoted come first, so that a slow machine loses only the others. `Here` fills in braces.
TABLE = """
ten-minutes
150 device_check --size b32 --batch 8 --ways fp32 bf16 "bf16, selective checkpointing" "bf16, compiled towers"
90  syncs
60  device_check --methods all --ways fp32 bf16
100 kill --ranks 1 --kills 4 --torchrun 0 --method llip --precision bf16
60  step --size b32 --batch 1024 {timed}
60  step --size b16 --batch 512 {timed}
70  step --size l14 --batch 256 {timed}
120 kiloword train clip --size b32 --data {large} --steps 100 --batch 1024 --out {scratch}/first
60  llip --images 1024 --repeat 1 --texts 1024 4096 16384
200 step --size b32 --batch 1024 {timed} --compile

ten-minutes-dry
150 device_check --size debug --batch 8 --ways fp32 bf16 "bf16, selective checkpointing"
90  syncs --dry
150 device_check --size debug --batch 4 --methods all --ways fp32 bf16
100 kill --ranks 1 --kills 2 --torchrun 0 --method llip --precision bf16
60  step --size debug --batch 4 --dtype bf16 --steps 1 --warmup 1 --alone
60  step --size debug --batch 4 --dtype bf16 --steps 1 --warmup 1 --alone --captions 2
120 kiloword train clip --size debug --data scenes --steps 2 --batch 8 --out {scratch}/first
60  llip --images 8 --repeat 1 --memory 8 16 --texts 16 32

steps
150 step --size b32 --batch 1024 {timed}
150 step --size b32 --batch 1024 {timed} --compile
150 step --size b16 --batch 512 {timed}
150 step --size l14 --batch 256 {timed}
150 step --size b32 --batch 256 {timed} --captions 6
200 kiloword train siglip --size s16 --data {train} --val {dev} --epochs 30 --out {trained}
60  kiloword eval retrieval {s16} --data {dev} --json {out}/s16-retrieval.json
150 step --size b16 --batch 512 {timed} --compile
150 step --size l14 --batch 256 {timed} --compile
150 step --size b32 --batch 256 {timed} --captions 6 --compile
150 step --size b32 --batch 256 {timed}
150 step --size b32 --batch 32 {timed}
150 step --size b16 --batch 1024 {timed}
150 step --size l14 --batch 512 {timed}

llip
150 llip --images 1024 --texts 1024 4096 16384 32768
100 llip --images 1024 --k 64 --texts 1024 4096 16384
100 tokens --size b32 --batch 512 --dtype bf16
100 captions --size b32 --batch 256 --dtype bf16
100 captions --size b16 --batch 128 --dtype bf16

scenes
10000 research.llip --steps 3000
10000 research.clip_c --steps 3000 --scenes inner
10000 research.fff --steps 3000
10000 research.shortcut --steps 2000 --seeds 0

photos
10000 research.flickr --data {train} --val {dev} --mined --seeds 0 1 2 --batch 256 --steps 700

prolip
100 prolip --size b32 --batch 512 --dtype bf16 --steps 15
120 prolip --size b16 --batch 256 --dtype bf16 --steps 15
100 prolip_pairs --pairs 1024 2048 4096 8192 16384 --chunk 0 1024 --repeat 10
10000 research.prolip_photos --data {train} --val {dev} --chains {chains} --seeds 0 1 2 --batch 256 --steps 1500
10000 research.prolip --seeds 0 1 2 --steps 3000

sycoca
150 sycoca --size b32 --batch 256 --dtype bf16
150 sycoca --size b32 --batch 64 --captions 5 --dtype bf16
100 coca --batch 256 --steps 15 --dtype bf16
60  words --time --repeat 10 --dtype bf16
10000 research.sycoca_photos --data {train} --val {dev} --seeds 0 --batch 256 --steps 3000
10000 research.sycoca --seeds 0 1 2 --steps 3000

engines
120 device_check --size tiny --batch 32
200 device_check --size b32 --batch 8
240 device_check --size b32 --batch 32 --profile
150 device_check --size b32 --batch 32 --ways fp32 bf16 "bf16, CUDA graph"
150 torch.distributed.run --size b32 --batch 128 --dtype bf16 --steps 10
150 torch.distributed.run --size l14 --batch 128 --dtype bf16 --steps 10

loss
200 loss --images 1024 --texts 4096 8192 16384 32768 65536
200 loss --images 1024 --texts 4096 16384 --head gaussian contextual --loss softmax sigmoid matching

plan
400 plan
150 save --sizes b32 l14
"""
PARTS = {name: lines.splitlines() for name, _, lines in (p.partition("\n") for p in TABLE.strip().split("\n\n"))}


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
    """Where a part runs. Args: data: holds flickr8k and others; scratch: of this call; commit: of the code."""

    data: Path
    out: Path
    scratch: Path
    workers: int
    theirs: bool  # open_clip is installed
    device: str = "cuda"
    commit: str | None = None

    def runs(self, part: str) -> Iterator[Run]:
        """The runs of a part; those of finished models are looked for when the runs before them have ended."""
        for line in PARTS[part]:
            limit, words = line.split(maxsplit=1)
            yield self.run(int(limit), words)
        if part == "sycoca":
            dev = self.data / "flickr8k" / "dev"
            yield from self.pages("sycoca_photos", f"{dev}")
            yield from self.inside("sycoca_photos", dev / "0.tar")
            yield from self.pages("sycoca", "scenes:test?n=500&captions=5")

    def run(self, limit: int, line: str) -> Run:
        """The run of a line of the table, whose text is its name."""
        train, large = (self.data / name / "train" for name in ("flickr8k", "flickr8k_224"))
        paths = {"train": train, "dev": train.with_name("dev"), "chains": self.data / "coco_hier" / "dev"}
        paths["s16"] = self.out / f"s16-{self.commit}" / "model"  # other code trains again
        data = next((f"{path}" for path in (large, train) if path.exists()), "scenes")
        timed = "--dtype bf16 --steps 20 --warmup 5" + ("" if self.theirs else " --alone")
        filled = {**paths, "large": data, "out": self.out, "scratch": self.scratch, "trained": paths["s16"].parent}
        quoted = {name: shlex.quote(f"{value}") for name, value in filled.items()}
        script, *words = shlex.split(line.format(**quoted, timed=timed))
        needs = tuple(path for name, path in paths.items() if f"{{{name}}}" in line)
        words += ["--device", self.device]
        if script == "kiloword":
            metrics = Path(words[words.index("--out") + 1]) / "metrics.jsonl" if words[0] == "train" else None
            return Run(line, limit, ["-m", script, *words], metrics, needs=needs)
        if script.startswith("research."):
            out = self.out / script.removeprefix("research.")
            words += ["--out", f"{out}", "--size", "s16", "--jobs", "2", "--workers", f"{self.workers // 2}"]
            return Run(line, limit, ["-m", script, *words], again=True, needs=needs)
        if script == "torch.distributed.run":
            words = ["--standalone", "--nproc-per-node", "gpu", "bench/engines.py", *words]
            return Run(line, limit, ["-m", script, *words])
        return Run(line, limit, [f"bench/{script}.py", *words])

    def pages(self, experiment: str, data: str) -> Iterator[Run]:
        """What the finished models of an experiment write and paint."""
        for model in sorted((self.out / experiment).glob("*coca-0-*/model")):
            for kind in ["caption", "reconstruction"] if model.parent.name.startswith("sycoca") else ["caption"]:
                page = f"{self.out / experiment / model.parent.name}-{kind}"
                words = ["eval", kind, f"{model}", "--data", data, "--html", f"{page}.html", "--json", f"{page}.json"]
                yield self.run(120, shlex.join(["kiloword", *words]))

    def inside(self, experiment: str, shard: Path) -> Iterator[Run]:
        """What the decoders of a finished model do with three photos and one caption of each."""
        for model in sorted((self.out / experiment).glob("sycoca-0-*/model"))[:1] if shard.exists() else ():
            with tarfile.open(shard) as tar:
                names = [name for name in tar.getnames() if not name.endswith(".txt")][:3]
                captions = [name.rpartition(".")[0] + ".txt" for name in names]
                tar.extractall(self.scratch, [tar.getmember(name) for name in (*names, *captions)], filter="data")
            texts = [(self.scratch / name).read_text().splitlines()[0] for name in captions]
            words = ["score", f"{model}", "--images", *(f"{self.scratch / name}" for name in names), "--texts", *texts]
            explain = ["--explain", f"{self.out / experiment / 'inside'}", "--device", self.device]
            yield Run(f"inside {experiment}", 60, ["-m", "kiloword", *words, *explain])


@dataclass
class Results:
    """Rows of one part's file. Args: commit: of the code; a run of other code is made again."""

    file: Path
    commit: str | None
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        mine = (row for row in rows_of(self.file) if row.get("status") == 0 and row.get("commit") == self.commit)
        self.done |= {row["run"] for row in mine if not row.get("again")}

    def add(self, row: Row) -> None:
        """Append a row with the commit, also behind a line that was cut, and print its first 2000 characters."""
        line = json.dumps({**row, "commit": self.commit})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        whole = not self.file.exists() or self.file.read_bytes()[-1:] in (b"", b"\n")
        with self.file.open("a") as file:
            file.write(("" if whole else "\n") + line + "\n")
        print(line[:2000], flush=True)


def rows_of(file: Path) -> list[Row]:
    """Its rows, none where there is no file; lines that a kill has cut are left out."""
    rows = []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def commit_of(given: str | None) -> str | None:
    """As given, or git's; where files of CODE are changed or new, "+" and a hash of them follow; None without git."""
    if given:
        return given
    git = ["git", "-c", "safe.directory=*", "-C", f"{ROOT}"]
    edits, others = "diff --binary --no-ext-diff HEAD --", "ls-files -z --others --exclude-standard --"
    asked = (["rev-parse", "HEAD"], [*edits.split(), *CODE], [*others.split(), *CODE])
    try:
        head, changed, new = (subprocess.run([*git, *words], capture_output=True, check=True).stdout for words in asked)
    except (OSError, subprocess.CalledProcessError):
        return None
    for name in filter(None, new.split(b"\0")):
        path = ROOT / os.fsdecode(name)
        content = path.read_bytes() if path.is_file() else b""
        changed += b"%s\0%d\0%s" % (name, len(content), content)
    return head.decode().strip() + (f"+{hashlib.sha256(changed).hexdigest()[:8]}" if changed else "")


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
    return {"card": card.name, "memory_gib": memory, "cudnn": torch.backends.cudnn.version(), **about}  # type: ignore[no-untyped-call]


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
    """Runs it for at most `limit` seconds: its row. All that it has started ends with it, also at an interrupt."""
    path = [f"{ROOT}", f"{packages}", *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    began = time.time()
    status, printed, errors = sessions.run([sys.executable, *run.command], limit, settings, ROOT)
    row: Row = {"run": run.name, "seconds": round(time.time() - began), "status": status}
    row["result"] = result(run, printed, began)
    if run.again:
        row["again"] = True
    if status:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        row["error"] = "ran out of time" if status == sessions.LATE else (lines or ["no message"])[-1][:500]
    return row


def result(run: Run, printed: str, began: float) -> Any:
    """The last JSON object printed, or the metrics' last training row since `began` (s since 1970), or None."""
    if run.metrics is not None:
        rows = [row for row in rows_of(run.metrics) if "pairs_per_s" in row and row.get("time", 0) >= began]
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
    """Make a part. Returns: 0, also without a card and when runs were skipped; 1 when one failed or ran out of time."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as at Ctrl-C, the run is ended first
    args = arguments()
    about = machine(args.dry)
    if about is None and not args.list:
        print("skipped: no GPU that torch can use")  # an answer, not a failure: the caller may try this on any machine
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    packages = args.out.resolve() / "packages"
    theirs = not args.dry and has_open_clip(args.wheels, packages)
    with tempfile.TemporaryDirectory() as scratch:
        device = "cpu" if args.dry else "cuda"
        data, out, commit = args.data.resolve(), args.out.resolve(), commit_of(args.commit)
        here = Here(data, out, Path(scratch), args.workers, theirs, device, commit)
        part = f"{args.part}{'-dry' if args.dry else ''}"
        if args.list:
            print(*(shlex.join(["python", *run.command]) for run in here.runs(part)), sep="\n")
            return 0
        results = Results(args.out / f"gpu-{part}.jsonl", commit)
        results.add(about or {})
        if args.dry:  # limits are for a card, and a test shares its cores with others
            os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            args.seconds *= 10
        good = go(here.runs(part), results, args.seconds, packages, 10 if args.dry else 1)
    print(f"results: {results.file}")
    return 0 if good else 1


def arguments() -> argparse.Namespace:
    """Of the command line. Raises: SystemExit (2) for unknown ones and for --dry with a part other than ten-minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = [name for name in PARTS if not name.endswith("-dry")]
    parser.add_argument("part", choices=parts, nargs="?", default="steps")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="holds flickr8k, coco_hier")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="kept from call to call")
    parser.add_argument("--seconds", type=float, default=540, help="of all runs of this call")
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
