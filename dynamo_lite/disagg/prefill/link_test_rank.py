"""The worker half of link tests: a prefill rank tests its links to decode ranks.

It writes a pattern into scratch memory of every rank that it gives KV to, and reads it
back, twice: the first round connects, the second measures a round trip. No call blocks. As
for all writes, nothing is started or polled while the fence is closed.
"""

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

import numpy as np

from dynamo_lite.disagg.messages import LinkTestOrder, RankLink
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRank, RemoteRanks
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.transfer.base import Mover, Transfer
from dynamo_lite.transfer.block_map import Descriptors
from dynamo_lite.transfer.scratch import ScratchMemory, pattern, pick_slots

#: Timeout of a test. A peer in a long step answers late; with a dead one a transfer fails earlier.
LIMIT_S = 20.0
#: Slots to try: another writer may be using the same slot at the same time.
_TRIES = 3
_ROUNDS = 2


@dataclass
class _Exchange:
    """The part of a test with one rank."""

    peer: RemoteRank
    name: str
    #: The peer's slots, one for each try.
    slots: list[int]
    #: This rank's slots, to write from and to read into; None until two are free.
    own: tuple[int, int] | None = None
    #: In flight: a read if `reading`, else a write.
    transfer: Transfer | None = None
    reading: bool = False
    #: The pattern that was written.
    expected: bytes = b""
    tries: int = 0
    round: int = 0
    #: Monotonic time of the start of the round.
    began: float = 0.0
    #: Duration of each finished round.
    seconds: list[float] = field(default_factory=list[float])
    over: bool = False


@dataclass
class _Open:
    """A test that has not ended."""

    order: LinkTestOrder
    #: Monotonic time of the start.
    began: float
    exchanges: list[_Exchange] = field(default_factory=list[_Exchange])
    failure: str | None = None


class LinkTestRank:
    """own: this rank's memory. rank: its index. scratch: None if it has no scratch memory. used:
    the engines with other transfers in flight."""

    def __init__(
        self,
        mover: Mover,
        own: RankMetadata,
        rank: int,
        scratch: ScratchMemory | None,
        peers: RemoteRanks,
        alive: Callable[[], bool],
        used: Callable[[], Set[str]],
        now: Callable[[], float],
    ):
        self._used = used
        self._mover, self._own, self._rank, self._peers = mover, own, rank, peers
        self._scratch, self._alive, self._now = scratch, alive, now
        self._free = deque(range(scratch.region.slots)) if scratch is not None else deque[int]()
        self._open: list[_Open] = []
        #: Exchanges of ended tests with a transfer in flight: their slots are in use.
        self._late: list[_Exchange] = []
        self._ended: dict[str, RankLink] = {}

    def __bool__(self) -> bool:
        """Whether any transfer is in flight or any test open."""
        return bool(self._open or self._late)

    @property
    def engines(self) -> set[str]:
        """The engines whose links are being tested."""
        return {opened.order.target_engine for opened in self._open}

    def start(self, order: LinkTestOrder) -> None:
        opened = _Open(order, self._now())
        self._open.append(opened)
        opened.failure = self._peers.ensure_connected(order.target_engine)
        if opened.failure is not None:
            return
        try:
            peers = self._peers.of(order.target_engine)
        except TransferError as exc:
            opened.failure = str(exc)
            return
        for peer in peers:
            if peer.scratch is None or self._scratch is None:
                opened.failure = f"{_rank(peer.name)}, or this one, has no scratch memory"
                return
            name = f"{order.order}/{self._rank}/{peer.name}"
            slots = pick_slots(name, peer.scratch, _TRIES)
            opened.exchanges.append(_Exchange(peer, name, slots, began=opened.began))

    def poll(self) -> None:
        """Continues open tests, and ends those that are over or have timed out."""
        alive = self._alive()
        if alive:
            self._late = [exchange for exchange in self._late if not self._is_over(exchange)]
        for opened in list(self._open):
            if alive and opened.failure is None:
                self._advance(opened)
            if opened.failure is None and self._now() - opened.began > LIMIT_S:
                self._time_out(opened, alive=alive)
            if opened.failure is not None or all(e.over for e in opened.exchanges):
                self._open.remove(opened)
                self._end(opened)

    def take(self) -> dict[str, RankLink]:
        """Returns the results of the tests that ended since the last call, by order."""
        ended, self._ended = self._ended, {}
        return ended

    def _advance(self, opened: _Open) -> None:
        for exchange in opened.exchanges:
            try:
                self._advance_exchange(exchange)
            except TransferError as exc:
                self._release(exchange)
                self._disconnect(opened.order.target_engine, exc.peer)
                opened.failure = f"{_rank(exc.peer)}: {exc.detail}"
                return
            except (ValueError, LookupError) as exc:
                self._release(exchange)
                opened.failure = f"{_rank(exchange.peer.name)}: {exc}"
                return

    def _advance_exchange(self, exchange: _Exchange) -> None:
        """Raises TransferError, and ValueError or LookupError if the memory does not fit."""
        if exchange.over:
            return
        if exchange.own is None:
            if len(self._free) < 2:
                return
            exchange.own = self._free.popleft(), self._free.popleft()
            self._write(exchange)
        while not exchange.over and exchange.transfer is not None and exchange.transfer.done():
            if exchange.reading:
                self._compare(exchange)
            else:
                self._read(exchange)

    def _write(self, exchange: _Exchange) -> None:
        assert self._scratch is not None and exchange.own is not None
        assert exchange.peer.scratch is not None
        length = min(self._scratch.region.slot_bytes, exchange.peer.scratch.slot_bytes)
        text = f"{exchange.name}/{exchange.tries}/{exchange.round}"
        exchange.expected, exchange.reading = pattern(text, length), False
        self._scratch.fill(exchange.own[0], exchange.expected)
        here, there = self._sides(exchange, exchange.own[0])
        memory = self._own.memory, exchange.peer.memory
        exchange.transfer = self._mover.write(exchange.peer.name, here, there, memory=memory)

    def _read(self, exchange: _Exchange) -> None:
        assert exchange.own is not None
        exchange.reading = True
        here, there = self._sides(exchange, exchange.own[1])
        memory = self._own.memory, exchange.peer.memory
        exchange.transfer = self._mover.read(exchange.peer.name, here, there, memory=memory)

    def _compare(self, exchange: _Exchange) -> None:
        """Raises TransferError if other bytes came back from every slot that was tried."""
        assert self._scratch is not None and exchange.own is not None
        back = self._scratch.read(exchange.own[1], len(exchange.expected))
        if back != exchange.expected:
            exchange.tries += 1
            if exchange.tries == len(exchange.slots):
                wrong = sum(a != b for a, b in zip(back, exchange.expected, strict=True))
                raise TransferError(
                    exchange.peer.name,
                    f"{wrong} of {len(back)} bytes of a pattern came back changed,"
                    f" in each of {exchange.tries} slots",
                )
            self._write(exchange)
            return
        now = self._now()
        exchange.seconds.append(now - exchange.began)
        exchange.began, exchange.round = now, exchange.round + 1
        if exchange.round < _ROUNDS:
            self._write(exchange)
        else:
            exchange.over = True
            self._release(exchange)

    def _sides(self, exchange: _Exchange, slot: int) -> tuple[Descriptors, Descriptors]:
        """The descriptors of both sides for the mover."""
        assert self._scratch is not None and exchange.peer.scratch is not None
        here, there = self._scratch.region, exchange.peer.scratch
        length = len(exchange.expected)
        at = there.base + exchange.slots[exchange.tries] * there.slot_bytes
        return (
            np.array([[here.base + slot * here.slot_bytes, length, self._own.device]], np.uint64),
            np.array([[at, length, exchange.peer.device]], np.uint64),
        )

    def _time_out(self, opened: _Open, *, alive: bool) -> None:
        waited = [e.peer.name for e in opened.exchanges if not e.over]
        opened.failure = (
            f"no answer of {', '.join(map(_rank, waited))} within {LIMIT_S:g} s"
            if alive
            else f"this worker's lease was not certain for {LIMIT_S:g} s"
        )
        if alive:
            for name in waited:
                self._disconnect(opened.order.target_engine, name)

    def _disconnect(self, engine_id: str, name: str) -> None:
        """Removing a peer ends its transfers as failed, but NIXL may still deliver what they have
        posted. The decode engine would use the blocks again. So it stays while it is used."""
        if engine_id not in self._used():
            self._peers.failed(engine_id, name)

    def _end(self, opened: _Open) -> None:
        """Keeps the slots of exchanges with a transfer in flight: it may still use them."""
        for exchange in opened.exchanges:
            if exchange.own is not None and not exchange.over:
                self._late.append(exchange)
        contact, again = (
            max((e.seconds[at] for e in opened.exchanges if len(e.seconds) > at), default=0.0)
            for at in range(_ROUNDS)
        )
        lanes = len(opened.exchanges)
        self._ended[opened.order.order] = RankLink(opened.failure, lanes, contact, again)

    def _is_over(self, exchange: _Exchange) -> bool:
        """Whether the transfer of a timed-out exchange has ended; frees its slots then."""
        assert exchange.transfer is not None
        try:
            if not exchange.transfer.done():
                return False
        except TransferError:
            pass  # it has ended, too
        self._release(exchange)
        return True

    def _release(self, exchange: _Exchange) -> None:
        if exchange.own is not None:
            self._free.extend(exchange.own)
            exchange.own = None


def _rank(peer: str) -> str:
    """The rank in a text that names the engine already. peer: ENGINE/INDEX."""
    return f"rank {peer.rpartition('/')[2]}"
