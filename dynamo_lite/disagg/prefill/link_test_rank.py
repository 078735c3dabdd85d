"""The worker half of preflights: a prefill rank tries its way into decode ranks.

Into scratch memory of every rank that this one gives KV to, a pattern is written and
read back, twice: the first time everything is connected, the second time shows what a
round trip takes. Each call does what can be done at once and returns. The rule of all
writes holds: behind a closed fence nothing is started or moved on.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dynamo_lite.disagg.messages import LinkTestOrder, RankLink
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRank, RemoteRanks
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.transfer.base import Mover, Transfer
from dynamo_lite.transfer.block_map import Descriptors
from dynamo_lite.transfer.scratch import ScratchMemory, pattern, pick_slots

#: A peer in a long step answers late; one that is dead makes its transfer fail earlier.
LIMIT_S = 20.0
#: A slot may be another writer's, too, at the moment.
_TRIES = 3
_ROUNDS = 2


@dataclass
class _Exchange:
    """With one rank. slots: of the peer, one for each try. own: of this rank, to write from
    and to read into; None until there are any."""

    peer: RemoteRank
    name: str
    slots: list[int]
    own: tuple[int, int] | None = None
    transfer: Transfer | None = None
    reading: bool = False
    expected: bytes = b""
    tries: int = 0
    round: int = 0
    began: float = 0.0
    seconds: list[float] = field(default_factory=list[float])
    over: bool = False


@dataclass
class _Open:
    """An order that has not ended. began: by the monotonic clock."""

    order: LinkTestOrder
    began: float
    exchanges: list[_Exchange] = field(default_factory=list[_Exchange])
    failure: str | None = None


class LinkTestRank:
    """own: this rank's memory, rank: its index, scratch: its scratch memory, if it has any."""

    def __init__(
        self,
        mover: Mover,
        own: RankMetadata,
        rank: int,
        scratch: ScratchMemory | None,
        peers: RemoteRanks,
        alive: Callable[[], bool],
        now: Callable[[], float],
    ):
        self._mover, self._own, self._rank, self._peers = mover, own, rank, peers
        self._scratch, self._alive, self._now = scratch, alive, now
        self._free = deque(range(scratch.region.slots)) if scratch is not None else deque[int]()
        self._open: list[_Open] = []
        self._late: list[_Exchange] = []
        self._ended: dict[str, RankLink] = {}

    def __bool__(self) -> bool:
        """Whether anything is under way."""
        return bool(self._open or self._late)

    @property
    def engines(self) -> set[str]:
        """Whose ways are being tried."""
        return {opened.order.target_engine for opened in self._open}

    def start(self, order: LinkTestOrder) -> None:
        opened = _Open(order, self._now())
        self._open.append(opened)
        opened.failure = self._peers.greet(order.target_engine)
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
        """Moves on what can be moved on, and ends what has ended."""
        alive = self._alive()
        if alive:
            self._late = [exchange for exchange in self._late if not self._is_over(exchange)]
        for opened in list(self._open):
            if alive and opened.failure is None:
                self._advance(opened)
            if opened.failure is None and self._now() - opened.began > LIMIT_S:
                self._give_up(opened, alive=alive)
            if opened.failure is not None or all(e.over for e in opened.exchanges):
                self._open.remove(opened)
                self._end(opened)

    def take(self) -> dict[str, RankLink]:
        """What has ended since the last call, by order."""
        ended, self._ended = self._ended, {}
        return ended

    def _advance(self, opened: _Open) -> None:
        for exchange in opened.exchanges:
            try:
                self._move_on(exchange)
            except TransferError as exc:
                self._release(exchange)
                self._peers.failed(opened.order.target_engine, exc.peer)
                opened.failure = f"{_rank(exc.peer)}: {exc.detail}"
                return
            except (ValueError, LookupError) as exc:
                self._release(exchange)
                opened.failure = f"{_rank(exchange.peer.name)}: {exc}"
                return

    def _move_on(self, exchange: _Exchange) -> None:
        """Raises TransferError, and ValueError or LookupError where memory does not fit."""
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
        """Raises TransferError when something else came back, also from other slots."""
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
        """Here and there, as the mover takes them."""
        assert self._scratch is not None and exchange.peer.scratch is not None
        here, there = self._scratch.region, exchange.peer.scratch
        length = len(exchange.expected)
        at = there.base + exchange.slots[exchange.tries] * there.slot_bytes
        return (
            np.array([[here.base + slot * here.slot_bytes, length, self._own.device]], np.uint64),
            np.array([[at, length, exchange.peer.device]], np.uint64),
        )

    def _give_up(self, opened: _Open, *, alive: bool) -> None:
        waited = [e.peer.name for e in opened.exchanges if not e.over]
        opened.failure = (
            f"no answer of {', '.join(map(_rank, waited))} within {LIMIT_S:g} s"
            if alive
            else f"this worker's lease was not certain for {LIMIT_S:g} s"
        )
        if alive:
            for name in waited:
                self._peers.failed(opened.order.target_engine, name)

    def _end(self, opened: _Open) -> None:
        """Slots that something may still be read into are not given away."""
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
        """Of one that was given up: whether its slots are free now."""
        assert exchange.transfer is not None
        try:
            if not exchange.transfer.done():
                return False
        except TransferError:
            pass  # nothing of it lands any more
        self._release(exchange)
        return True

    def _release(self, exchange: _Exchange) -> None:
        if exchange.own is not None:
            self._free.extend(exchange.own)
            exchange.own = None


def _rank(peer: str) -> str:
    """ENGINE/INDEX, to read beside the engine's name."""
    return f"rank {peer.rpartition('/')[2]}"
