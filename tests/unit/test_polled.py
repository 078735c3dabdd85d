"""The thread that moves transfers on: when it polls, when it sleeps, and how it ends."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo_lite.runtime.clock import boottime
from dynamo_lite.transfer import polled
from dynamo_lite.transfer.base import PollLimit
from dynamo_lite.transfer.polled import PolledMover

WAIT_S = 10.0
DRAM = ("DRAM", "DRAM")
ROW = np.array([[0, 1, 0]], np.uint64)


def eventually(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


class Wire:
    """A mover whose transfers end when they have been polled `polls` times. It notices
    calls at the same time."""

    def __init__(self, polls: int = 3):
        self.polls = polls
        self.transfers: list[WireTransfer] = []
        self.arrived: list[bytes] = []
        self.looks = 0
        self.broken: Exception | None = None
        self.closed = False
        self.overlaps = 0
        self._inside = threading.Lock()

    def __enter__(self) -> None:
        if not self._inside.acquire(blocking=False):
            self.overlaps += 1
            self._inside.acquire()
        time.sleep(0)  # lets another thread in, if nothing keeps it out

    def __exit__(self, *_: object) -> None:
        self._inside.release()

    def write(self, peer, local, remote, *, memory, notice=b"") -> "WireTransfer":
        with self:
            self.transfers.append(WireTransfer(self, peer))
            return self.transfers[-1]

    def read(self, peer, local, remote, *, memory) -> "WireTransfer":
        return self.write(peer, local, remote, memory=memory)

    def notices(self) -> list[bytes]:
        with self:
            self.looks += 1
            if self.broken is not None:
                raise self.broken
            arrived, self.arrived = self.arrived, []
            return arrived

    def register(self, spans, memory, device) -> None: ...
    def metadata(self) -> bytes:
        return b""

    def add_peer(self, peer, metadata) -> None: ...
    def remove_peer(self, peer) -> None: ...
    def close(self) -> None:
        self.closed = True


class WireTransfer:
    def __init__(self, wire: Wire, peer: str):
        self._wire, self._peer = wire, peer
        self.polled = 0
        self.failure: Exception | None = None

    def done(self) -> bool:
        with self._wire:
            self.polled += 1
            if self.failure is not None:
                raise self.failure
            return self.polled >= self._wire.polls


@pytest.fixture
def open_mover():
    """Makes movers and closes them."""
    made: list[PolledMover] = []

    def open_mover(wire: Wire, **options: Any) -> PolledMover:
        made.append(PolledMover(wire, **options))
        return made[-1]

    yield open_mover
    for mover in made:
        mover.close()


def write(mover: PolledMover, peer: str = "d"):
    return mover.write(peer, ROW, ROW, memory=DRAM)


def asleep(mover: PolledMover) -> bool:
    """Whether the thread waits for work, or is just about to."""
    return not mover._has_work() and bool(mover._wake._cond._waiters)  # type: ignore[attr-defined]


def switches(mover: PolledMover) -> int:
    """How often the thread has gone to sleep so far."""
    status = Path(f"/proc/self/task/{mover.thread.native_id}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("voluntary"))
    return int(line.split()[1])


class Limit(PollLimit):
    """left: how many looks find the limit ahead; the others find that it has passed."""

    def __init__(self, left: float):
        self.left = left

    @property
    def until(self) -> float:  # type: ignore[override]
        self.left -= 1
        return math.inf if self.left >= 0 else 0.0


def test_the_limit_is_a_time_of_the_clock_that_goes_on_while_the_host_is_suspended(
    open_mover, monkeypatch
):
    suspended, looks = [0.0], [0]

    def clock() -> float:
        looks[0] += 1
        return boottime() + suspended[0]

    def looked_again() -> None:
        seen = looks[0]
        eventually(lambda: looks[0] > seen + 2, "the thread has looked at the clock")

    monkeypatch.setattr(polled, "boottime", clock)
    wire = Wire(polls=1 << 30)
    write(open_mover(wire, limit=PollLimit(boottime() + 60.0)))
    eventually(lambda: wire.transfers[0].polled > 0, "the thread polls it")
    suspended[0] = 61.0
    looked_again()
    polled_before = wire.transfers[0].polled
    looked_again()
    assert wire.transfers[0].polled == polled_before
    suspended[0] = 0.0
    eventually(lambda: wire.transfers[0].polled > polled_before, "it polls again")


def test_each_call_has_a_look_at_the_limit_of_its_own(open_mover):
    """It passes between two transfers of one round."""
    wire, limit = Wire(polls=1 << 30), Limit(0)
    mover = open_mover(wire, limit=limit)
    for _ in range(4):
        write(mover)
    limit.left = 2
    eventually(lambda: limit.left < -2, "the thread has found that it has passed")
    assert sum(transfer.polled for transfer in wire.transfers) == 2


def test_there_is_no_wake_up_while_nothing_is_in_flight(open_mover):
    wire = Wire()
    mover = open_mover(wire, listen_s=0)
    transfer = write(mover)
    eventually(lambda: transfer.over and asleep(mover), "the thread sleeps")
    before, looks = switches(mover), wire.transfers[0].polled
    time.sleep(0.3)
    assert switches(mover) - before <= 1, "once, if it was just about to sleep"
    assert wire.transfers[0].polled == looks
    write(mover)
    eventually(lambda: wire.transfers[1].polled >= wire.polls, "the next write wakes it")


def test_notices_are_read_while_their_owner_awaits_them(open_mover):
    wire = Wire()
    mover = open_mover(wire, listen_s=3600.0)
    assert mover.notices() == []
    wire.arrived = [b"one", b"two"]
    eventually(lambda: not wire.arrived, "the thread has read them")
    wire.arrived = [b"three"]
    eventually(lambda: not wire.arrived, "the thread has read them")
    assert mover.notices() == [b"one", b"two", b"three"]
    assert mover.notices() == []


def test_the_thread_stops_reading_notices_when_none_were_asked_for_a_while(open_mover):
    wire = Wire()
    mover = open_mover(wire, listen_s=0.02)
    mover.notices()
    eventually(lambda: asleep(mover), "the thread sleeps")
    wire.arrived = [b"late"]
    assert mover.notices() == [b"late"], "the owner's own call reads it"


def test_owner_and_thread_are_never_in_the_wrapped_mover_at_once(open_mover):
    wire = Wire(polls=200)
    mover = open_mover(wire)
    transfers = [write(mover) for _ in range(8)]
    while not all([transfer.done() for transfer in transfers]):
        mover.notices()
    assert wire.overlaps == 0
    assert all(transfer.polled >= 200 for transfer in wire.transfers)


def cannot_enter(wire: Wire) -> None:
    raise RuntimeError("no such device")


def cannot_read_notices(wire: Wire) -> None:
    wire.broken = RuntimeError("out of handles")


@pytest.mark.parametrize(
    ("enter", "why"), [(cannot_enter, "no such device"), (cannot_read_notices, "out of handles")]
)
def test_the_process_ends_with_its_thread(open_mover, caplog, enter, why):
    """Without it writes would stand still, and notifications wait for the engine's steps."""
    ended, wire = threading.Event(), Wire(polls=1 << 30)
    mover = open_mover(wire, enter=lambda: enter(wire), end_process=ended.set)
    transfer = write(mover)
    mover._listen_until = time.monotonic() + 60
    mover.thread.join(WAIT_S)
    assert ended.is_set() and not transfer.over
    assert why in caplog.text and "exit code 70" in caplog.text


def test_closing_ends_the_thread_and_then_the_mover():
    wire = Wire(polls=1 << 30)
    mover = PolledMover(wire)
    transfer = write(mover)
    mover.close()
    assert not mover.thread.is_alive() and wire.closed
    mover.close()
    wire.polls = 1
    assert transfer.done(), "the owner's calls go on without a thread"


def test_stopping_leaves_what_is_in_flight_untouched():
    wire = Wire(polls=1 << 30)
    mover = PolledMover(wire)
    transfer = write(mover)
    assert mover.stop() and not mover.thread.is_alive()
    assert not wire.closed and not transfer.over


def test_a_thread_that_does_not_end_keeps_its_mover_open(monkeypatch, caplog):
    """To take down an agent under a call of it would crash the process."""
    monkeypatch.setattr(polled, "CLOSE_S", 0.05)
    inside, let_go = threading.Event(), threading.Event()

    class Stuck(PollLimit):
        @property
        def until(self) -> float:  # type: ignore[override]
            inside.set()
            assert let_go.wait(WAIT_S)
            return 0.0

        @until.setter
        def until(self, _value: float) -> None: ...

    wire = Wire()
    mover = PolledMover(wire, limit=Stuck())
    write(mover)
    assert inside.wait(WAIT_S)
    started = time.monotonic()
    mover.close()
    assert time.monotonic() - started < 2
    assert not wire.closed
    assert "has not ended within 0.05 s" in caplog.text
    let_go.set()
    mover.close()
    assert wire.closed
