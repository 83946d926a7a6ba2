"""`bench/gpu.sh`: its commands exist, it goes on where it stopped, it needs neither git nor a card to say so."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from commands import module_at

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return module_at(ROOT / "bench" / "gpu.py", "gpu_script")


def here(gpu: ModuleType, tmp_path: Path, **more: Any) -> Any:
    """A place with data and finished models, so that parts name all of their runs."""
    for name in ("flickr8k/train", "flickr8k/dev", "coco_hier/dev"):
        (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
    for name in ("s16-abc/model", "sycoca/sycoca-0-1/model", "sycoca/coca-0-1/model"):
        (tmp_path / "out" / name).mkdir(parents=True, exist_ok=True)
    return gpu.Here(tmp_path / "data", tmp_path / "out", tmp_path / "scratch", 4, True, **more)


def test_commands_of_every_part_exist(gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kiloword.cli.main import main

    place, names = here(gpu, tmp_path, commit="abc"), set()
    for part in gpu.PARTS:
        for run in place.runs(part):
            names.add(run.name)
            first, second, *words = run.command
            if first.startswith("bench/"):
                text = (ROOT / first).read_text()
                assert all(f'"{word}"' in text for word in run.command if word.startswith("--")), run.command
            elif second == "kiloword":
                with pytest.raises(SystemExit):
                    main([*words, "--no-such-flag"])
                assert "Unrecognized options: --no-such-flag " in capsys.readouterr().err, words
            elif second != "torch.distributed.run":
                assert importlib.util.find_spec(second), run.command
    assert len(names) > 40
    assert "step --size b32 --batch 1024 {timed}" in names
    assert sum("eval reconstruction" in name for name in names) == 1  # a coca paints nothing
    assert sum("eval caption" in name for name in names) == 2


def row(file: Path) -> dict[str, Any]:
    last: dict[str, Any] = json.loads(file.read_text().splitlines()[-1])
    return last


def runs_of(gpu: ModuleType, *code: str, **more: Any) -> Any:
    return (gpu.Run(f"run {n}", 60, ["-c", text], **more) for n, text in enumerate(code))


def test_the_same_call_goes_on(gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, code = tmp_path / "rows.jsonl", ("print('so far')\nprint('{\"a\": [1,\\n2]}')", "raise SystemExit('no card')")
    assert not gpu.go(runs_of(gpu, *code), gpu.Results(file, "abc"), 100, tmp_path)
    assert row(file)["error"] == "no card"
    first = json.loads(file.read_text().splitlines()[0])
    assert (first["run"], first["status"], first["result"], first["commit"]) == ("run 0", 0, {"a": [1, 2]}, "abc")
    capsys.readouterr()
    assert gpu.go(runs_of(gpu, code[0], "pass"), gpu.Results(file, "abc"), 100, tmp_path)
    assert "done before: run 0" in capsys.readouterr().out
    assert len(file.read_text().splitlines()) == 3  # what failed was made again, what succeeded was not
    assert gpu.go(runs_of(gpu, code[0]), gpu.Results(file, "def"), 100, tmp_path)  # of other code, so again
    assert row(file)["commit"] == "def"
    for lines in (5, 6):  # an experiment goes on by itself: it is called again
        assert gpu.go(runs_of(gpu, "pass", again=True), gpu.Results(file, "ghi"), 100, tmp_path)
        assert len(file.read_text().splitlines()) == lines


def test_what_cannot_be_run_is_skipped(gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = gpu.Results(tmp_path / "rows", None)
    assert gpu.go(runs_of(gpu, "pass", needs=(tmp_path / "photos",)), results, 100, tmp_path)
    assert f"skipped: run 0: there is no {tmp_path / 'photos'}" in capsys.readouterr().out
    assert gpu.go(runs_of(gpu, "pass"), results, 9, tmp_path)
    assert "9 seconds" in capsys.readouterr().out
    assert not results.file.exists()


FAMILY = """
import subprocess, sys, time
rest = "import time; print('up', file=open(sys.argv[1], 'w'), flush=True); time.sleep(300)"
saved = "(time.sleep(1), open(sys.argv[1], 'w').write('saved'), sys.exit())"
saves = f"import signal; signal.signal(signal.SIGTERM, lambda *_: {saved})"
kinds = {"same": {}, "group": {"process_group": 0}, "session": {"start_new_session": True}}
for name, how in kinds.items():
    code = f"import sys, time; {saves if name == 'same' else ''}\\n{rest}"
    pid = subprocess.Popen([sys.executable, "-c", code, f"{sys.argv[1]}/{name}"], **how).pid
    print(pid, file=open(f"{sys.argv[1]}/{name}.pid", "w"), flush=True)
print("{}", flush=True)
time.sleep(300)
"""  # as an experiment's runs, kill.py's forks and torchrun's ranks; the first saves its state


def begun(folder: Path) -> list[int]:
    """Waits until FAMILY stands: the ids of its grandchildren."""
    names = ("same", "group", "session")
    until = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < until
        time.sleep(0.02)
    return [int((folder / f"{name}.pid").read_text()) for name in names]


def living(pids: list[int]) -> list[int]:
    """Those that run still; they are ended, so that a test that fails leaves nothing."""
    found = []
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                os.kill(pid, signal.SIGKILL)
                found.append(pid)
    return found


@pytest.mark.slow
def test_a_run_that_takes_too_long_ends_with_all_it_started(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sessions.GRACE_S", 3.0)
    made = gpu.make(gpu.Run("slow", 60, ["-c", FAMILY, f"{tmp_path}"]), 5, tmp_path)
    assert (made["status"], made["error"], made["result"]) == (124, "ran out of time", {})
    assert living(begun(tmp_path)) == []
    assert (tmp_path / "same").read_text() == "saved"


def test_rows_of_a_training_run(gpu: ModuleType, tmp_path: Path) -> None:
    """Those that it has written itself: its folder may hold a run that other code has finished."""
    metrics = tmp_path / "metrics.jsonl"
    run = gpu.Run("train", 60, [], metrics=metrics)
    assert gpu.result(run, "{}", 100.0) is None
    metrics.write_text('{"step": 1, "pairs_per_s": 5, "time": 99.5}\n{"step": 2, "pairs_per_s": 6}\n')
    assert gpu.result(run, "{}", 100.0) is None
    with metrics.open("a") as file:
        file.write('{"step": 3, "pairs_per_s": 7, "time": 100.5}\n{"step": 3, "val/accuracy": 1, "time": 100.6}\n')
    assert gpu.result(run, "{}", 100.0) == {"step": 3, "pairs_per_s": 7, "time": 100.5}
    with metrics.open("a") as file:
        file.write('{"step": 4, "pairs_p')  # SIGKILL at the limit
    assert gpu.result(run, "{}", 100.0)["step"] == 3


@pytest.mark.slow
def test_without_a_card_nothing_fails(tmp_path: Path) -> None:
    command = ["bash", f"{ROOT / 'bench' / 'gpu.sh'}", "steps", "--out", f"{tmp_path / 'out'}"]
    settings = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "skipped: no GPU that torch can use\n"), done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_minutes_on_a_cpu(tmp_path: Path) -> None:
    """In a copy without git, data beside it, or open_clip; a second call makes nothing again."""
    for name in ("kiloword", "bench"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    command = ["bash", "bench/gpu.sh", "ten-minutes", "--dry", "--out", f"{tmp_path / 'out'}"]
    settings = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path / "copy", env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    file = tmp_path / "out" / "gpu-ten-minutes-dry.jsonl"
    machine, *rows = map(json.loads, file.read_text().splitlines())
    assert machine["commit"] is None
    assert len(rows) == 8
    assert all(row["status"] == 0 and row["result"] for row in rows)
    again = subprocess.run(command, cwd=tmp_path / "copy", env=settings, capture_output=True, text=True)
    assert again.stdout.count("done before: ") == 8
    assert len(file.read_text().splitlines()) == 10  # the machine once more
