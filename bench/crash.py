"""Kill a command at each of its file operations, run it again, compare with the command that nothing interrupts.

A command is killed before every operation that changes a file or folder (open to write, write, truncate, fsync, rename,
unlink, mkdir, rmdir), and once more in the middle of every write. The same command then has to end well, and to leave
the same files with the same bytes and nothing beside them; in the cache folder, temporary files and rows of single tars
may be left. Commands are forked from here, where torch is loaded.

    python bench/crash.py [embed caption index index-in-cache library mine audit suite sweep import train] [--every 5]

The printed number is of the points at which the command was killed; --every 5 tries each fifth.
"""

from __future__ import annotations

import argparse
import builtins
import io
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from PIL import Image

import kiloword.generation.command
import kiloword.stores.embed
from kill import TIMED
from kiloword.cli import main as cli
from kiloword.config.recipes import ModelFile
from kiloword.data.text.tokenizer import Tokenizer, clip_tokenizer
from kiloword.interop import folder as imports
from kiloword.interop.folder import Imported
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.runs.rows import read_metrics

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
WITH_TIMES = (".lock", "metrics.jsonl", "history.jsonl", "report.html")  # of a run, and of each start
AUDITED = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod")


class Kill:
    """Ends this process at the `at`-th operation on files below a folder, as SIGKILL does; 0: never."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.at, self.count = f"{folder}/", at, 0

    def concerns(self, path: Any, dir_fd: int = -1) -> bool:
        """Args: path: a path, perhaps below an open folder, or the number of an open file."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd >= 0 else "", os.fsdecode(path))
        return os.path.abspath(path).startswith(self.folder)

    def point(self) -> None:
        """An operation is about to be made."""
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Hook of `sys.addaudithook`."""
        if event == "open" and isinstance(args[2], int) and args[2] & WRITING and self.concerns(args[0]):
            self.point()
        elif event in AUDITED:
            dir_fd = args[-1] if event in ("os.remove", "os.mkdir", "os.rmdir") else -1
            there = dir_fd >= 0 or isinstance(args[0], int) or os.path.lexists(args[0])
            if self.concerns(args[0], dir_fd) and there != (event == "os.mkdir"):  # else nothing would change
                self.point()

    def on_descriptors(self, name: str) -> Callable[..., Any]:
        """A function of `os` that takes an open file first."""
        real = getattr(os, name)

        def killing(fd: int, *args: Any) -> Any:
            if self.concerns(fd):
                self.point()
            return real(fd, *args)

        return killing

    def install(self) -> None:
        """From here on; a process can do this once."""
        sys.addaudithook(self.audit)
        for name in ("fsync", "write", "pwrite", "posix_fallocate"):
            setattr(os, name, self.on_descriptors(name))
        io.open = builtins.open = self.opened  # type: ignore[assignment]

    def opened(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any) -> Any:
        """As `open`."""
        if "b" in mode and set(mode) & set("wax+"):
            raw = _Raw(file, mode.replace("b", ""), *rest[3:], **more)
            raw.kill = self
            return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if set(mode) & set("wax+"):
            encoding = rest[0] if rest else more.pop("encoding", None)
            return io.TextIOWrapper(self.opened(file, mode.replace("t", "") + "b"), encoding=encoding)
        return _open(file, mode, buffering, *rest, **more)


_open = io.open


class _Raw(io.FileIO):
    """A file that is killed before and within a write."""

    kill: Kill

    def write(self, data: Any) -> int:
        if not self.kill.concerns(self.fileno()):
            return super().write(data)
        self.kill.point()
        view = memoryview(data).cast("B")
        self.kill.count += 1
        if self.kill.count == self.kill.at:
            super().write(view[: len(view) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(view)

    def truncate(self, size: int | None = None) -> int:
        if self.kill.concerns(self.fileno()):
            self.kill.point()
        return super().truncate(size)


@dataclass(frozen=True)
class Case:
    """A command in a folder of its own, of which `place` makes the beginning."""

    command: Callable[[Path], None]
    place: Callable[[Path], object] = lambda folder: folder.mkdir()
    free: tuple[str, ...] = ()  # names of files whose bytes tell times
    twice: tuple[int, ...] = (0,)  # exit codes of the second command


def verb(*words: object) -> None:
    cli.main([str(word) for word in words])


def import_(base: Path, folder: Path) -> None:
    """What `kiloword import` does when it has read its weights."""
    made: Imported = torch.load(base / "imported.pt", weights_only=False)
    imports.write(made, base / "weights.safetensors", folder / "model", "debug")


def cases(base: Path) -> dict[str, Case]:
    model, photos = base / "coca", base / "photos"
    features, scenes = base / "features", "scenes?n=24&captions=2"
    run = f"train siglip --data {scenes} --size debug --batch 8 --steps 4 --save-every 2 --log-every 3 --keep-states 1"

    def copied(folder: Path, mode: int = 0o755) -> None:
        shutil.copytree(photos, folder / "photos", ignore=shutil.ignore_patterns("*.arrow"))
        (folder / "photos").chmod(mode)

    return {
        "embed": Case(lambda f: verb("embed", model, "--data", photos, "--out", f / "t", "--batch", 2)),
        "caption": Case(lambda f: verb("caption", model, "--data", photos, "--out", f / "c.parquet", "--batch", 2)),
        "index": Case(lambda f: verb("data", "index", f / "photos"), copied),
        "index-in-cache": Case(lambda f: verb("data", "index", f / "photos"), lambda f: copied(f, 0o555)),
        "mine": Case(
            lambda f: verb("mine", scenes, "--features", features, "--out", f / "mined"),
            free=("mine.json", "report.html"),
        ),
        "library": Case(
            lambda f: verb("index", base / "images", "--model", model, "--out", f / "library", "--batch", 2)
        ),
        "audit": Case(lambda f: verb("audit", scenes, "--model", model, "--out", f / "audit"), free=("report.html",)),
        "suite": Case(
            lambda f: verb(
                "eval", "suite", base / "two.toml", model, "--data", base, "--out", f / "done", "--json", f / "s.json"
            )
        ),
        "sweep": Case(
            lambda f: verb("sweep", *run.split()[1:], "--vary", "optim.lr=1e-3,1e-4", "--out", f / "sweep"),
            free=(*WITH_TIMES, "sweep.html"),
        ),
        "import": Case(lambda f: import_(base, f), twice=(0, 2)),  # 2: it is there already
        "train": Case(lambda f: verb(*run.split(), "--out", f / "run"), free=WITH_TIMES),
    }


def prepare(base: Path, verbs: Collection[str]) -> None:
    """What commands read: a model, tars, features of scenes."""
    recipe = default_recipe("coca", "debug", ("scenes",))
    words = Tokenizer.train([f"a {colour} square of {n} things" for colour in ("red", "blue") for n in range(9)], 300)
    text = replace(recipe.model.text, vocab=words.vocab, special=words.roles.ids())
    config = replace(recipe.model, text=text)
    model = build(config, preset("coca"), seed=0)
    save_model(base / "coca", model, words, ModelFile(method="coca", settings={}, model=config))
    for shard in range(3):
        tar_of(base / "photos" / f"{shard}.tar", range(4 * shard, 4 * shard + 4))
    (base / "images").mkdir()
    for row in range(9):
        Image.new("RGB", (32, 32), (20 * row, 99, 255 - 20 * row)).save(base / "images" / f"{row}.png")
    data_set = '[[dataset]]\nname = "{0}"\ndata = ["{1}"]\ntask = "retrieval"\nmetric = "mean_recall@1"\n'
    (base / "two.toml").write_text(
        data_set.format("some", "scenes:test?n=8") + data_set.format("more", "scenes:test?n=12")
    )
    if "mine" in verbs:
        verb("embed", base / "coca", "--data", "scenes?n=24&captions=2", "--out", base / "features")
    if "import" not in verbs:
        return
    clip = replace(config, text=replace(text, vocab=imports.CLIP_VOCAB))
    state = build(clip, preset("clip"), seed=1).state_dict()
    torch.save(Imported(clip, "clip", state), base / "imported.pt")


def tar_of(path: Path, rows: range) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for row in rows:
            image = io.BytesIO()
            Image.new("RGB", (32, 32), (20 * row, 99, 255 - 20 * row)).save(image, "PNG")
            for suffix, data in (("png", image.getvalue()), ("txt", f"a red square of {row} things".encode())):
                info = tarfile.TarInfo(f"{row:03d}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def forked(work: Callable[[], object], log: Path) -> int:
    """The exit code of a command in a process of its own, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        code = 70
        try:
            work()
            code = 0
        except SystemExit as e:
            code = int(e.code or 0)
        except BaseException as e:
            code = 2 if isinstance(e, ValueError) else code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def files(folder: Path, free: tuple[str, ...]) -> dict[str, Any]:
    """Everything below a folder by its path; of a log, what does not tell times."""
    out: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.startswith("cache/") and (path.suffix != ".arrow" or path.parent.name == "rows"):
            continue
        if path.name == "metrics.jsonl":
            out[name] = [{k: v for k, v in row.items() if k not in TIMED} for row in read_metrics(path)]
        else:
            out[name] = "" if path.is_dir() or path.name in free else path.read_bytes()
    return out


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    names = {**found, **expected}
    kinds = {n: "left" if n not in expected else "missing" if n not in found else "differs" for n in names}
    return [f"{name} {kinds[name]}" for name in names if found.get(name) != expected.get(name)]


def crash(name: str, case: Case, base: Path, every: int, offset: int) -> int:
    """Kill at each point, go on, compare. Returns: the number of points. Raises: SystemExit for what went wrong."""
    folder, log, wrong = base / f"{name}-killed", base / f"{name}.log", []
    os.environ["KILOWORD_CACHE"] = str(folder / "cache")

    def again(at: int = 0) -> int:
        kill = Kill(folder, at)
        return forked(lambda: (kill.install() if at else None, case.command(folder)), log)

    case.place(folder)
    if again():
        raise SystemExit(f"{name}: {log.read_text()[-2000:]}")
    whole, points, at = files(folder, case.free), 0, offset
    while True:
        shutil.rmtree(folder)
        case.place(folder)
        if again(at) != -signal.SIGKILL:
            break
        points += 1
        log.unlink()
        if (code := again()) not in case.twice:
            wrong.append(f"killed at {at}: exit code {code}: {log.read_text().strip()[-200:]}")
        elif found := differences(files(folder, case.free), whole):
            wrong.append(f"killed at {at}: {', '.join(found)}")
        at += every
    if wrong:
        raise SystemExit("\n".join([f"{name}: {len(wrong)} of {points} points", *wrong]))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verbs", nargs="*")
    parser.add_argument("--every", type=int, default=1, help="try each n-th point")
    parser.add_argument("--offset", type=int, default=1, help="the first point")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kiloword.stores.embed.PART = kiloword.generation.command.PART = 6  # rows a part: two of them
    if "import" in (args.verbs or ["import"]):
        words = clip_tokenizer()  # once for all forks: it takes as long as all the rest
        imports.tokenizer = lambda *args: words
    base = Path(args.out or tempfile.mkdtemp(prefix="crash-"), "crash").absolute()
    base.mkdir(parents=True)
    os.environ["KILOWORD_CACHE"] = str(base / "cache")
    verb_of = cases(base)
    if forked(lambda: prepare(base, args.verbs or verb_of), base / "prepare.log"):
        raise SystemExit((base / "prepare.log").read_text())
    done, failed = {}, []
    for name in args.verbs or verb_of:
        try:
            done[name] = crash(name, verb_of[name], base, args.every, args.offset)
        except SystemExit as e:
            failed.append(str(e))
    print(json.dumps({"points": done}), flush=True)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
