"""A prefill writer that was stopped until its claim had run out writes nothing.

Two processes and NIXL between them: `zombie_peer.py` is stopped with SIGSTOP in the
middle of an attempt, after its first block, and told to go on before it is woken:
the writes that wait are the first thing it does. It keeps its claim's cell itself
and does not extend it, as a component that is stopped, too.
"""

import itertools
import os
import queue
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from dynamo_lite.disagg.messages import NOT_HELD
from dynamo_lite.disagg.metrics import BYTES, STOPPED
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.prefill import decode_written
from dynamo_lite.runtime.claim_cells import Cell, CellReader
from dynamo_lite.runtime.clock import boottime
from dynamo_lite.transfer.nixl import NixlMover
from tests.builders import engine_metadata
from tests.contract.peers import PeerProcess
from tests.contract.zombie_peer import (
    BLOCK_BYTES,
    BLOCKS,
    MOVE_S,
    Ended,
    Order,
    register_memory,
    source_memory,
)

WAIT_S = 30.0

#: NIXL's library takes its time to load on a busy machine.
START_S = 60.0

#: Longer than it takes to stop the writer, on a busy machine too.
SHORT_CLAIM_S = 1.0

#: Each order has a claim of its own, all in the one cell of the writer.
CLAIMS = itertools.count(1)


class Target:
    """A decode engine's memory, one block a row, and the notices it got: attempts."""

    made = 0

    def __init__(self):
        Target.made += 1
        self.engine_id = f"target-{Target.made}"
        self.mover = NixlMover(self.engine_id)
        self.memory = np.arange(BLOCKS * BLOCK_BYTES).reshape(BLOCKS, BLOCK_BYTES) % 251
        self.memory = self.memory.astype(np.uint8)
        self.expected = self.memory.copy()
        self._rank = register_memory(self.mover, self.memory)
        self.committed: list[str] = []

    def metadata(self) -> str:
        own = engine_metadata(
            self.engine_id, block_size_tokens=16, num_blocks=BLOCKS, ranks=(self._rank,)
        )
        return encode(own).hex()

    def poll(self) -> None:
        said = [decode_written(notice) for notice in self.mover.notices()]
        self.committed += [written.attempt for written in said if written.last]

    def expect(self, *blocks: int) -> None:
        """From now on these hold what the writer's blocks hold."""
        self.expected[list(blocks)] = source_memory()[list(blocks)]

    def check(self, *, committed: list[str]) -> None:
        """The memory is what is expected, byte for byte, and these notices have come."""
        self.check_notices(committed=committed)
        np.testing.assert_array_equal(self.memory, self.expected)

    def check_notices(self, *, committed: list[str]) -> None:
        deadline = time.monotonic() + WAIT_S
        while len(self.committed) < len(committed):
            assert time.monotonic() < deadline, f"notices: {self.committed}"
            self.poll()
        self.poll()
        assert self.committed == committed


class Writer(PeerProcess):
    """`zombie_peer.py`, and a look at the cell of its claim."""

    def __init__(self, directory: Path, **env: str):
        super().__init__("tests.contract.zombie_peer", str(directory / "claims"), **env)
        try:
            assert self.said.get(timeout=START_S) == {"ready": True}
            self._cells = CellReader(directory / "claims")
        except BaseException:
            self.kill()
            raise

    def start(self, order: Order, target: Target) -> None:
        """Gives the order, and waits until the writer waits in it."""
        self._cell = Cell(0, order.claim)
        self.tell(asdict(order))
        assert self._hear(target) == {"waits": True}

    def fly(self) -> None:
        """It starts its writes, which do not end: the target is not polled."""
        self.tell({})
        assert self.said.get(timeout=WAIT_S) == {"waits": True}

    def stop(self) -> None:
        """Returns when it is stopped; its claim still holds."""
        self.process.send_signal(signal.SIGSTOP)
        flags = os.WSTOPPED | os.WEXITED | os.WNOWAIT
        state = os.waitid(os.P_PID, self.process.pid, flags)
        assert state is not None and state.si_code == os.CLD_STOPPED
        assert self._holds()

    def outlive_claim(self, target: Target) -> None:
        """Waits until the claim has run out that the stopped writer left behind, and the time in
        which its writes may go on."""
        deadline = time.monotonic() + WAIT_S
        while self._holds(MOVE_S):
            assert time.monotonic() < deadline
            target.poll()
            time.sleep(0.01)

    def _holds(self, longer_s: float = 0.0) -> bool:
        return boottime() < self._cells.until(self._cell) + longer_s

    def wake(self, target: Target) -> Ended:
        """The order to continue is sent before it resumes. Returns how the attempt ended."""
        self.tell({})
        self.process.send_signal(signal.SIGCONT)
        return Ended(**self._hear(target))

    def write(self, order: Order, target: Target) -> Ended:
        """An attempt without a pause."""
        self.tell(asdict(order))
        return Ended(**self._hear(target))

    def _hear(self, target: Target) -> dict:
        """NIXL's first contact needs both sides: the target is polled meanwhile."""
        deadline = time.monotonic() + WAIT_S
        while True:
            target.poll()
            try:
                return self.said.get(timeout=0.001)
            except queue.Empty:
                assert self.process.poll() is None, "the writer has ended"
                assert time.monotonic() < deadline, "the writer says nothing"


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writer]:
    writer = Writer(tmp_path_factory.mktemp("zombie"))
    yield writer
    writer.kill()


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target()
    yield target
    target.mover.close()


def order(target: Target, attempt: str, blocks: list[int], **how) -> Order:
    return Order(
        attempt=attempt,
        engine_id=target.engine_id,
        metadata=target.metadata(),
        blocks=blocks,
        claim=next(CLAIMS),
        **how,
    )


PAUSES = pytest.mark.parametrize("pause", ["queued", "pumping"])


@PAUSES
def test_a_writer_that_outlived_its_claim_writes_nothing(writer, target, pause):
    zombie = order(target, "zombie", [0, 1, 2, 3], claim_s=SHORT_CLAIM_S, pause=pause)
    writer.start(zombie, target)
    target.expect(0)
    writer.stop()
    writer.outlive_claim(target)
    target.check(committed=[])

    ended = writer.wake(target)
    assert ended.sent == ["zombie"]
    assert ended.failures == {"zombie": NOT_HELD}
    assert ended.counted[STOPPED] > 0
    assert BYTES not in ended.counted
    target.check(committed=[])

    # What the same process writes later, under a claim that holds, is all that arrives.
    assert writer.write(order(target, "later", [5, 6]), target).failures == {}
    target.expect(5, 6)
    target.check(committed=["later"])


@PAUSES
def test_a_writer_that_wakes_while_its_claim_holds_goes_on(writer, target, pause):
    """So it is the claim that stops the other one, and the test above can fail."""
    writer.start(order(target, "late", [0, 1, 2, 3], pause=pause), target)
    target.expect(0)
    writer.stop()
    target.check(committed=[])

    ended = writer.wake(target)
    assert (ended.sent, ended.failures) == (["late"], {})
    assert STOPPED not in ended.counted
    target.expect(1, 2, 3)
    target.check(committed=["late"])


@pytest.mark.parametrize("checked", [True, False])
def test_a_writer_with_writes_in_flight_that_outlived_its_claim_moves_none_on(
    tmp_path, target, checked
):
    """Over TCP a write goes on when it is polled. A writer that does not look commits."""
    blocks, how = [0, 1, 2, 3], {"claim_s": SHORT_CLAIM_S, "pause": "flying", "checked": checked}
    writer = Writer(tmp_path, UCX_TLS="tcp")
    try:
        writer.start(order(target, "zombie", blocks, **how), target)
        writer.fly()
        writer.stop()
        writer.outlive_claim(target)
        target.check_notices(committed=[])
        ended = writer.wake(target)
        if checked:
            assert f"{MOVE_S:g} s after the end of its claim" in ended.error
            assert ended.sent == []
            writer.process.wait(WAIT_S)
            target.check_notices(committed=[])
        else:
            assert (ended.sent, ended.error) == (["zombie"], "")
            target.expect(*blocks)
            target.check(committed=["zombie"])
    finally:
        writer.kill()
