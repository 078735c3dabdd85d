"""The mover of a simulated engine: copies take time and arrive in portions.

Like a network card it works by itself: a posted write arrives while its sender is stopped, and
may arrive after its sender was killed. A write to an agent that has ended arrives nowhere, also
if another agent has its address. A write to a live agent arrives wherever the writer says. A
read is made by the card as well, or by the reader when it polls: a reader that was stopped then
reads what is there when it resumes.
"""

import asyncio
import contextvars
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.runtime.claim_cells import Cell
from dynamo_lite.transfer.block_map import Descriptors
from tests.simulation.engine.model import SimKvMemory

#: Address on the transfer's own side, address at the peer, length.
Copy = tuple[int, int, int]


#: Why a transfer fails whose peer was removed.
REMOVED = "its peer was removed"


class LocalTransfer:
    """What the transfers of one process have in common. held: whether it stays under way."""

    def __init__(self, peer: str):
        self.peer, self.ended, self.held = peer, False, False
        self.failure: str | None = None

    @property
    def over(self) -> bool:
        return self.ended or self.failure is not None

    def done(self) -> bool:
        self.ended = self.ended or (self.failure is None and not self.held and self.poll())
        if self.failure is not None and not self.ended:
            raise TransferError(self.peer, self.failure)
        return self.ended

    def poll(self) -> bool:
        raise NotImplementedError

    def fail(self, why: str) -> None:
        self.failure = why


class LocalMover:
    """What the movers of one process have in common. agents: by their metadata."""

    def __init__(self, agents: Mapping[bytes, Any]):
        self._agents = agents
        self._peers: dict[str, bytes] = {}
        self.transfers: list[Any] = []
        self.inbox: list[bytes] = []
        self.closed = False

    def covers(self, address: int, length: int) -> bool:
        """Whether this range of its memory is registered."""
        raise NotImplementedError

    def add_peer(self, peer: str, metadata: bytes) -> None:
        self._peers[peer] = metadata

    def remove_peer(self, peer: str) -> None:
        """As with NIXL, transfers in flight fail at once, and what they have posted lands later."""
        self._peers.pop(peer, None)
        for transfer in self.transfers:
            if transfer.peer == peer and not transfer.ended:
                transfer.failure = REMOVED

    def notices(self) -> list[bytes]:
        arrived, self.inbox = self.inbox, []
        return arrived

    def match(self, peer: str, local: Descriptors, remote: Descriptors) -> tuple[Any, list[Copy]]:
        """The peer, and the copies. Raises TransferError."""
        target = self._agents.get(self._peers.get(peer, b""))
        if target is None:
            raise TransferError(peer, "no such peer")
        if not len(local) or local[:, 1].tolist() != remote[:, 1].tolist():
            raise TransferError(peer, "not started: the two sides differ or are empty")
        copies: list[Copy] = []
        for (here, length, _), (there, _, _) in zip(local.tolist(), remote.tolist(), strict=True):
            if not (self.covers(here, length) and target.covers(there, length)):
                raise TransferError(peer, "not started: memory is not registered")
            copies.append((here, there, length))
        return target, copies


#: A write's descriptors land in at most this many portions.
_PORTIONS = 3


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Durations of transfers, in seconds.

    Every portion of a write or read arrives between `fastest_s` and `slowest_s` after its start.
    For writes, `slowest_s` must be below the grace that a ledger gives a lost writer.
    notice_s: from the sender's poll of a finished write to its notification. dead_s: until a
    write to a dead peer fails.
    """

    fastest_s: float = 0.001
    slowest_s: float = 0.02
    notice_s: float = 0.001
    dead_s: float = 1.0


@dataclass(frozen=True)
class Landing:
    """A copy into or from blocks, that an attempt's writer has under way, arrives now, or is
    read.

    address: of the first byte in the target's memory.
    """

    attempt: str
    sender: str
    target: "SimMover"
    address: int
    length: int


@dataclass
class Fabric:
    """Connects the movers of a simulation.

    It is made outside of any simulated process, so that its timers run while processes are
    stopped. on_landing: called just before each copy arrives. on_read: called before each copy
    is read. on_notice: called when a notification has arrived. joined: whether two agents' hosts
    reach each other now.
    """

    rng: random.Random
    wire: Wire = field(default_factory=Wire)
    on_landing: Callable[[Landing], None] = lambda landing: None
    on_read: Callable[["SimMover", Landing], None] = lambda reader, landing: None
    on_notice: Callable[["SimMover", bytes], None] = lambda target, notice: None
    joined: Callable[[str, str], bool] = lambda here, there: True
    agents: dict[bytes, "SimMover"] = field(default_factory=dict[bytes, "SimMover"])
    _context: contextvars.Context = field(default_factory=contextvars.copy_context)

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(delay_s, call, context=self._context)


class SimWrite(LocalTransfer):
    """Implements Transfer."""

    def __init__(
        self, sender: "SimMover", peer: str, target: "SimMover", copies: list[Copy], notice: bytes
    ):
        super().__init__(peer)
        self._sender, self._target = sender, target
        self._attempt, self._notice = sender.attempt, notice
        fabric, wire = sender.fabric, sender.fabric.wire
        fabric.rng.shuffle(copies)
        step = -(-len(copies) // fabric.rng.randint(1, _PORTIONS))
        self._portions = [copies[at : at + step] for at in range(0, len(copies), step)]
        if sender.unreached(target):
            fabric.later(wire.dead_s, lambda: self.fail("the peer does not answer"))
            return
        for portion in self._portions:
            delay_s = fabric.rng.uniform(wire.fastest_s, wire.slowest_s)
            fabric.later(delay_s, lambda portion=portion: self._land(portion))

    def poll(self) -> bool:
        if self._portions:
            return False
        if self._notice:
            # Sent when the sender has seen the end of its write, not before.
            fabric = self._sender.fabric
            fabric.later(fabric.wire.notice_s, self._notify)
        return True

    def hurry(self) -> None:
        """Everything in flight arrives now."""
        for portion in list(self._portions):
            self._land(portion)

    def _land(self, portion: list[Copy]) -> None:
        if portion not in self._portions:
            return
        sender, target = self._sender, self._target
        if sender.dead and sender.fabric.rng.random() < 0.5:
            return self.fail("the sender died")
        if why := sender.unreached(target):
            return self.fail(why)
        self._portions.remove(portion)
        for source, destination, length in portion:
            landing = Landing(self._attempt, sender.address, target, destination, length)
            sender.fabric.on_landing(landing)
            written = sender.memory.bytes_at(source, length)
            target.memory.bytes_at(destination, length)[:] = written

    def fail(self, why: str) -> None:
        self._portions.clear()
        super().fail(why)

    def _notify(self) -> None:
        if not self._sender.unreached(self._target):
            self._target.inbox.append(self._notice)
            self._sender.fabric.on_notice(self._target, self._notice)


class SimRead(LocalTransfer):
    """Implements Transfer."""

    def __init__(self, reader: "SimMover", peer: str, target: "SimMover", copies: list[Copy]):
        super().__init__(peer)
        self._reader, self._target, self._copies = reader, target, copies
        self._attempt, self._due = reader.attempt, False
        fabric, wire = reader.fabric, reader.fabric.wire
        if reader.unreached(target):
            fabric.later(wire.dead_s, lambda: self.fail("the peer does not answer"))
            return
        by_itself = fabric.rng.random() < 0.5
        delay_s = fabric.rng.uniform(wire.fastest_s, wire.slowest_s)
        fabric.later(delay_s, self._land if by_itself else self._fall_due)

    def poll(self) -> bool:
        if self._due:
            self._land()
        return not self._copies

    def _fall_due(self) -> None:
        self._due = True

    def _land(self) -> None:
        self._due = False
        reader, target = self._reader, self._target
        if why := reader.unreached(target):
            return self.fail(why)
        copies, self._copies = self._copies, []
        for here, there, length in copies:
            landing = Landing(self._attempt, reader.address, target, there, length)
            reader.fabric.on_read(reader, landing)
            reader.memory.bytes_at(here, length)[:] = target.memory.bytes_at(there, length)


class SimMover(LocalMover):
    """Implements Mover. One per engine, with one memory.

    name: unique per engine incarnation. address: its host. attempt: of the write
    that is being started, for the fabric's callbacks.
    """

    def __init__(self, fabric: Fabric, name: str, address: str, memory: SimKvMemory):
        self.fabric, self.name, self.address, self.memory = fabric, name, address, memory
        super().__init__(fabric.agents)
        self.attempt = ""
        #: Of the claims under which attempts are read.
        self.cells: dict[str, Cell] = {}
        self.dead = False
        fabric.agents[self.metadata()] = self

    def unreached(self, target: "SimMover") -> str:
        """Why nothing arrives there now; empty if it does."""
        if target.closed:
            return "the peer is gone"
        return "" if self.fabric.joined(self.address, target.address) else "the peer is cut off"

    def covers(self, address: int, length: int) -> bool:
        return self.memory.covers(address, length)

    def register(self, spans: Sequence[tuple[int, int]], memory: str, device: int) -> None: ...

    def metadata(self) -> bytes:
        """ADDRESS/NAME."""
        return f"{self.address}/{self.name}".encode()

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        *,
        memory: tuple[str, str],
        notice: bytes = b"",
    ) -> SimWrite:
        target, copies = self.match(peer, local, remote)
        self.transfers.append(write := SimWrite(self, peer, target, copies, notice))
        return write

    def read(
        self, peer: str, local: Descriptors, remote: Descriptors, *, memory: tuple[str, str]
    ) -> SimRead:
        self.transfers.append(read := SimRead(self, peer, *self.match(peer, local, remote)))
        return read

    def close(self) -> None:
        """The engine leaves in order."""
        self.closed = True

    def die(self) -> None:
        """Its process was killed: its posted writes may arrive or not."""
        self.dead = True
        self.close()

    def hurry(self) -> None:
        """All writes in flight arrive now: the engine does nothing but wait for them."""
        for write in self.transfers:
            if isinstance(write, SimWrite):
                write.hurry()
