"""A prefill rank in a process of its own, to be stopped by `test_zombie_writer.py`.

Usage: python -m tests.contract.zombie_peer CELLS. It says when it is ready. Every
line that comes in is an order: an attempt to write, whose first block is written at
once. Before the others may be started this process says that it waits, and reads
another line: there it is to be stopped. How the attempt ended is said in the end. If it
ended this process, as the engine that the rank stands for, that was the last order.
NIXL prints on the same stream: the reader skips what is not JSON.
"""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dynamo_lite.disagg.messages import BlockWrite, PrefillStep, WritingAttempt
from dynamo_lite.disagg.metrics import SECONDS
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.records import KvRegion, RankMetadata
from dynamo_lite.runtime.claim_cells import Cell, CellReader, ClaimCells
from dynamo_lite.runtime.clock import boottime
from dynamo_lite.transfer.nixl import NixlMover
from tests.builders import always_held

BLOCKS, BLOCK_BYTES = 8, 1 << 16

#: For how long the writes in flight go on after the end of their claim.
MOVE_S = 0.5

#: Long enough for whatever comes before the claim is let run out.
_CLAIM_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """metadata: of the target engine, in hexadecimal digits. blocks: ids on both sides.

    claim: its id. checked: whether the rank looks at its cell. claim_s: for how long it
    holds once the first block is written. pause: "queued", between two steps, with the
    writes in the queue; "pumping", inside the step that starts them; "flying", before that step and
    when they are in flight: over TCP none ends while the target is not polled; or "never".
    """

    attempt: str
    engine_id: str
    metadata: str
    blocks: list[int]
    claim: int
    checked: bool = True
    claim_s: float = _CLAIM_S
    pause: str = "never"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """counted: the rank's counts since the first block was written. error: what ended the engine;
    empty if nothing did."""

    sent: list[str]
    failures: dict[str, str]
    counted: dict[str, object]
    error: str = ""


def register_memory(mover: NixlMover, pattern: np.ndarray) -> RankMetadata:
    """The blocks (one row each) as a rank's KV memory."""
    base = pattern.__array_interface__["data"][0]
    mover.register([(base, pattern.nbytes)], "DRAM", 0)
    region = KvRegion(layer="0", base=base, stride_bytes=BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    return RankMetadata(agent=mover.metadata(), memory="DRAM", device=0, regions=(region,))


def source_memory() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def _wait() -> None:
    _say(waits=True)
    sys.stdin.readline()


class _Gate:
    """Whether the step that computes the blocks has ended; "pumping": waits when asked."""

    def __init__(self, pause: str):
        self._waits = pause == "pumping"
        self.opened = pause in ("never", "flying")

    def __call__(self) -> bool:
        if self._waits and not self.opened:
            _wait()
            self.opened = True
        return self.opened


def _writes(order: Order, cell: Cell) -> Iterable[BlockWrite]:
    of = WritingAttempt(order.attempt, order.engine_id, len(order.blocks), cell)
    for block in order.blocks:
        yield BlockWrite(of, [block], [block], last=block == order.blocks[-1])


def carry_out(order: Order, rank: PrefillRank, cells: ClaimCells) -> Ended:
    opened = cells.open(order.claim)
    first, *others = _writes(order, opened.cell)
    opened.hold_until(boottime() + order.claim_s)
    targets = {order.engine_id: bytes.fromhex(order.metadata)}
    rank.step(PrefillStep(writes=[first], targets=targets), ready=lambda: True)
    while SECONDS not in rank.stats.data:
        opened.hold_until(boottime() + order.claim_s)
        rank.results()
    rank.stats.take()

    if order.pause == "flying":
        _wait()
    opened.hold_until(boottime() + order.claim_s)
    gate = _Gate(order.pause)
    ended = [(order.attempt, True)]
    rank.step(PrefillStep(writes=others, ended=ended), ready=gate)
    if order.pause in ("queued", "flying"):
        _wait()
        gate.opened = True
    sent: set[str] = set()
    while not sent:
        sent = rank.results().sent
    opened.free()
    report = rank.report()
    failures = report.failures if report is not None else {}
    return Ended(sent=sorted(sent), failures=failures, counted=rank.stats.take())


def main() -> None:
    cells = ClaimCells(1, Path(sys.argv[1]))
    reader = CellReader(Path(sys.argv[1]))
    memory = source_memory()
    mover = NixlMover("zombie")
    own = register_memory(mover, memory)
    _say(ready=True)
    for line in sys.stdin:
        order = Order(**json.loads(line))
        rank = PrefillRank(
            mover=mover,
            own=own,
            rank=0,
            until=reader.until if order.checked else always_held,
            move_s=MOVE_S,
        )
        try:
            ended = carry_out(order, rank, cells)
        except TransferError as exc:
            rank.close()
            ended = Ended(sent=[], failures={}, counted=rank.stats.take(), error=str(exc))
        _say(**asdict(ended))
        if ended.error:
            os._exit(1)


if __name__ == "__main__":
    main()
