"""What ranks say to each other, by threads as ranks; and the group that a process joins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kiloword.distributed import collectives, heartbeat, launch, sharing
from threads import over_threads


def said() -> dict[str, Any]:
    rank = collectives.rank()
    x = torch.tensor([float(rank), 5.0 - rank], requires_grad=True)
    total = collectives.sum_over_ranks(x)
    extremes = {which: collectives.extreme_over_ranks(x, which) for which in ("most", "least")}  # type: ignore[arg-type]
    assert not any(y.requires_grad for y in (total, *extremes.values()))
    assert x.tolist() == [rank, 5.0 - rank]
    collectives.wait()
    return {
        "ranks": collectives.ranks(),
        "sum": total.tolist(),
        **{which: y.tolist() for which, y in extremes.items()},
        "any": collectives.any_rank(rank == 1, False, True),
        "whole": collectives.add_up(rank + 1),
        "items": collectives.all_lists([rank] * rank),
        "nothing": collectives.all_lists([]),
    }


@pytest.mark.parametrize("ranks", [1, 3])
def test_numbers_and_lists_of_all_ranks(ranks: int) -> None:
    last = ranks - 1
    expected = {
        "ranks": ranks,
        "sum": [sum(range(ranks)), sum(5.0 - r for r in range(ranks))],
        "most": [last, 5],
        "least": [0, 5 - last],
        "any": (ranks > 1, False, True),
        "whole": ranks * (ranks + 1) // 2,
        "items": [1, 2, 2] if ranks == 3 else [],
        "nothing": [],
    }
    assert over_threads(ranks, said) == [expected] * ranks


def test_a_process_alone_is_rank_0_of_1() -> None:
    assert said() == over_threads(1, said)[0]
    assert (collectives.rank(), collectives.ranks()) == (0, 1)


def shards(rows: int) -> tuple[list[list[float]], list[list[float]]]:
    """This rank's rows of a sharded table as `fill` and as torch cut them."""
    values, mesh = torch.arange(2.0 * rows).view(rows, 2), init_device_mesh("cpu", (collectives.ranks(),))
    sharded = [distribute_tensor(x, mesh, [Shard(0)]) for x in (torch.zeros_like(values), values)]
    collectives.fill(sharded[0], values)
    assert torch.equal(collectives.whole(sharded[0]), values)
    plain = torch.zeros_like(values)
    collectives.fill(plain, values)
    assert torch.equal(collectives.whole(plain), values)
    mine, torchs = (collectives.local(x).tolist() for x in sharded)
    return mine, torchs


@pytest.mark.parametrize("rows", [2, 4, 7])
def test_rows_of_a_sharded_table_are_those_that_torch_cuts(rows: int) -> None:
    """Ranks get none where rows are few."""
    found = over_threads(3, lambda: shards(rows))
    assert all(mine == torchs for mine, torchs in found)
    assert sum(len(mine) for mine, _ in found) == rows
    assert (found[2][0] == []) == (rows < 5)


class Met:
    """Stands for `Peers`."""

    rank, ranks, group_store, abrupt = 1, 2, "store", False

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def gather(self, timeout_s: float) -> None:
        self.calls.append(("gather", timeout_s))

    def ended(self, error: Exception) -> Exception:
        self.calls.append("ended")
        return RuntimeError(f"all: {error}")


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Met:
    made = Met()

    @contextmanager
    def meeting(timeout_s: float) -> Iterator[Met]:
        made.calls.append(("met", timeout_s))
        yield made

    def note(name: str) -> Any:
        return lambda *given, **named: made.calls.append((name, *given, *named.items()))

    monkeypatch.setattr(heartbeat, "monitored", meeting)
    monkeypatch.setattr(launch, "adopt", lambda: 2)
    names = ("init_process_group", "barrier", "destroy_process_group")
    monkeypatch.setattr(
        collectives, "dist", SimpleNamespace(is_initialized=lambda: False, **{n: note(n) for n in names})
    )
    monkeypatch.setattr(torch.cuda, "set_device", note("set_device"))
    return made


@pytest.mark.parametrize(
    ("device", "backend", "card", "more_s"), [("cpu", "gloo", None, 0), ("cuda", "cpu:gloo,cuda:nccl", 3, 60)]
)
def test_a_process_joins_and_leaves(
    met: Met, monkeypatch: pytest.MonkeyPatch, device: str, backend: str, card: int | None, more_s: int
) -> None:
    """NCCL, which aborts the process, waits longer than the ranks wait for each other."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    with collectives.process_group(device, 77):
        met.calls.append("inside")
    about = {"store": "store", "rank": 1, "world_size": 2, "timeout": timedelta(seconds=77 + more_s)}
    assert met.calls == [
        *([("set_device", card)] if card is not None else []),
        ("met", 77),
        ("gather", 77),
        ("init_process_group", backend, *about.items()),
        "inside",
        ("barrier",),
        ("destroy_process_group",),
    ]
    assert met.abrupt == (device == "cuda")


def test_an_error_is_reported_before_the_connections_close(met: Met) -> None:
    with pytest.raises(RuntimeError, match="all: one"), collectives.process_group():
        raise ValueError("one")
    assert met.calls[-2:] == ["ended", ("destroy_process_group",)]
    assert ("barrier",) not in met.calls


def test_a_single_process_and_one_that_has_joined_join_nothing(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(collectives.dist, "is_initialized", lambda: True)
        with collectives.process_group():
            pass
    monkeypatch.setattr(launch, "adopt", lambda: 1)
    with collectives.process_group("cuda"):
        pass
    assert met.calls == []


@pytest.mark.parametrize("rank", [0, 1])
def test_of_ranks_that_share_a_command_the_first_alone_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    calls: list[Any] = []

    @contextmanager
    def group(device: str) -> Iterator[None]:
        calls.append(device)
        yield

    monkeypatch.setattr(launch, "adopt", lambda: 2)
    monkeypatch.setattr(collectives, "process_group", group)
    monkeypatch.setattr(collectives, "rank", lambda: rank)
    monkeypatch.setattr(collectives, "ranks", lambda: 2)
    monkeypatch.setattr(heartbeat, "wait", calls.append)
    ascii_locale = partial(open, encoding="ascii")
    monkeypatch.setattr(sharing, "open", ascii_locale, raising=False)
    with sharing.together("cuda"):
        assert sharing.share() == (rank, 2)
        assert not sharing.lockstep()
        print("out \u00e9")
        sys.stderr.write("err")
    assert sharing.share() == (0, 1)
    assert calls == ["cuda", "at the end of the command"]
    assert tuple(capsys.readouterr()) == (("out \u00e9\n", "err") if rank == 0 else ("", ""))
    print("again")
    assert capsys.readouterr().out == "again\n"
    monkeypatch.setattr(launch, "adopt", lambda: 1)
    with sharing.together("cuda:1"):
        print("alone")
    assert capsys.readouterr().out == "alone\n"
    assert len(calls) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interruption_says_how_much_is_kept(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(collectives, "rank", lambda: rank)
    monkeypatch.setattr(collectives, "ranks", lambda: 2)
    todo = [range(2000, 2010), range(2010, 2013)]

    def cut() -> None:
        with sharing.sharing(), sharing.interruptible(todo, 3000) as written:
            written.append(todo[1])
            raise KeyboardInterrupt("typed")

    with pytest.raises(KeyboardInterrupt) as end:
        cut()
    said = "2,990 of 3,000 rows are kept, the same command goes on with the others."
    assert str(end.value) == ("typed" if rank else said)
    with sharing.interruptible(todo, 3000) as written:
        assert written == []
