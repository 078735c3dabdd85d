"""The mover's contract: NIXL, with and without a thread, and the in-process twin through the
same tests."""

import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import ClassVar

import numpy as np
import pytest

from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.transfer.base import Mover, Transfer
from dynamo_lite.transfer.nixl import NixlMover
from dynamo_lite.transfer.polled import PolledMover
from tests.contract.peers import PeerProcess
from tests.hostile import MESSAGES, listening_ports, tell
from tests.twins.mover import MemoryFabric, MemoryMover

SIZE = 4096
WAIT_S = 20.0
#: NIXL's library takes its time to load on a busy machine.
START_S = 60.0
DRAM = ("DRAM", "DRAM")


class Party:
    """A mover with one registered buffer. No two parties ever share a name."""

    made = 0
    all: ClassVar[list["Party"]] = []

    def __init__(self, make: Callable[[str], Mover], fill: int):
        Party.made += 1
        Party.all.append(self)
        self.mover = make(f"party-{Party.made}")
        self.buffer = np.full(SIZE, fill, np.uint8)
        self.base = self.buffer.__array_interface__["data"][0]
        self.mover.register([(self.base, SIZE)], "DRAM", 0)

    def at(self, *places: tuple[int, int]) -> np.ndarray:
        """Descriptors of (offset, length) places in the buffer."""
        rows = [(self.base + offset, length, 0) for offset, length in places]
        return np.array(rows, dtype=np.uint64).reshape(-1, 3)

    def write(
        self,
        target: "Party",
        here: tuple[int, int] = (0, SIZE),
        there: tuple[int, int] | None = None,
        *,
        peer: str = "target",
        notice: bytes = b"",
    ) -> Transfer:
        """One place; there: the same one."""
        places = self.at(here), target.at(there or here)
        return self.mover.write(peer, *places, memory=DRAM, notice=notice)


@pytest.fixture(autouse=True)
def closed_parties() -> Iterator[None]:
    yield
    while Party.all:
        Party.all.pop().mover.close()


def until(seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not seen():
        assert time.monotonic() < deadline


def finish(write: Transfer, target: Mover, *, notices: int = 0) -> list[bytes]:
    """Polls both sides until the write has ended and `notices` notices have come."""
    arrived: list[bytes] = []
    deadline = time.monotonic() + WAIT_S
    ended = False
    while not ended or len(arrived) < notices:
        assert time.monotonic() < deadline, f"ended: {ended}, notices: {arrived}"
        arrived += target.notices()
        ended = write.done()
    return arrived


def polled_nixl(name: str) -> Mover:
    return PolledMover(NixlMover(name))


@pytest.fixture(params=["memory", "polled memory", "nixl", "polled nixl"])
def make(request) -> Callable[[str], Mover]:
    fabric = MemoryFabric()
    movers: dict[str, Callable[[str], Mover]] = {
        "memory": lambda name: MemoryMover(fabric, name),
        "polled memory": lambda name: PolledMover(MemoryMover(fabric, name)),
        "nixl": NixlMover,
        "polled nixl": polled_nixl,
    }
    return movers[request.param]


@pytest.fixture
def parties(make) -> tuple[Party, Party]:
    """A source that knows a target as the peer "target"."""
    source, target = Party(make, 1), Party(make, 2)
    source.buffer[:] = np.arange(SIZE) % 251
    source.mover.add_peer("target", target.mover.metadata())
    return source, target


@pytest.mark.parametrize("operation", ["write", "read"])
def test_what_was_described_is_moved_and_nothing_else(parties, operation):
    source, target = parties
    target.buffer[:] = np.arange(SIZE) % 241
    start = getattr(source.mover, operation)
    ours, theirs = [(0, 64), (1000, 1), (2048, 512)], [(4096 - 64, 64), (7, 1), (100, 512)]
    changed, kept = (target, source) if operation == "write" else (source, target)
    to, of = (theirs, ours) if operation == "write" else (ours, theirs)
    expected, untouched = changed.buffer.copy(), kept.buffer.copy()
    for (there, length), (here, _) in zip(to, of, strict=True):
        expected[there : there + length] = kept.buffer[here : here + length]
    transfer = start("target", source.at(*ours), target.at(*theirs), memory=DRAM)
    assert finish(transfer, target.mover) == []
    np.testing.assert_array_equal(changed.buffer, expected)
    np.testing.assert_array_equal(kept.buffer, untouched)
    kept.buffer[:] = 9
    assert transfer.done() and transfer.done(), "it stays ended"
    np.testing.assert_array_equal(changed.buffer, expected)


def test_the_notice_comes_with_the_data_and_once(parties):
    source, target = parties
    write = source.write(target, notice=b"\x00done\xff")
    arrived: list[bytes] = []
    until(lambda: (write.done(), arrived.extend(target.mover.notices()), arrived)[-1])
    np.testing.assert_array_equal(target.buffer, source.buffer)
    assert arrived == [b"\x00done\xff"]
    assert finish(write, target.mover) == []
    assert source.mover.notices() == []


def test_a_write_after_a_notice_ends_though_its_peer_makes_no_progress(parties):
    """A decode engine may be in the middle of a long step when the next commit comes."""
    source, target = parties
    for number in range(4):
        notice = b"%d" % number
        write = source.write(target, (0, 64), notice=notice)
        if number > 1:  # the first two make the connection
            until(write.done)
        assert finish(write, target.mover, notices=1) == [notice]
        for _ in range(1000):
            # Both look for a while, as the engines' steps do between two jobs.
            target.mover.notices(), source.mover.notices()


def test_with_threads_a_write_and_its_notice_need_no_call_of_an_engine():
    """Not even the first contact: both engines may be in the middle of a long step."""
    source, target = Party(polled_nixl, 1), Party(polled_nixl, 2)
    assert isinstance(target.mover, PolledMover)
    source.mover.add_peer("target", target.mover.metadata())
    assert target.mover.notices() == []  # it awaits some from now on
    write = source.write(target, notice=b"came")
    inbox = target.mover._inbox
    until(lambda: inbox or time.sleep(0.001))
    assert (target.buffer == 1).all()
    assert target.mover.notices() == [b"came"]
    finish(write, target.mover)


@pytest.mark.parametrize(
    "wrong", ["local", "remote", "lengths", "counts", "empty", "past the end", "peer"]
)
@pytest.mark.parametrize("operation", ["write", "read"])
def test_what_cannot_be_is_refused_and_harms_nothing(parties, wrong, operation):
    source, target = parties
    local, remote, peer = source.at((0, 64)), target.at((0, 64)), "target"
    match wrong:
        case "local":
            local = target.at((0, 64))
        case "remote":
            remote = source.at((0, 64))
        case "lengths":
            remote = target.at((0, 32))
        case "counts":
            remote = target.at((0, 32), (32, 32))
        case "empty":
            local, remote = source.at(), target.at()
        case "past the end":
            remote = target.at((SIZE - 32, 64))
        case "peer":
            peer = "stranger"
    with pytest.raises(TransferError) as refusal:
        getattr(source.mover, operation)(peer, local, remote, memory=DRAM)
    assert refusal.value.peer == peer
    assert (source.buffer == np.arange(SIZE) % 251).all()
    write = source.write(target, (0, 64), notice=b"works")
    assert finish(write, target.mover, notices=1) == [b"works"]
    assert (target.buffer[64:] == 2).all()


@pytest.mark.parametrize("metadata", [b"", b"x", b"nixl" * 100, bytes(range(256)) * 4])
def test_garbage_is_not_a_peer(parties, metadata):
    source, target = parties
    with pytest.raises(TransferError) as refusal:
        source.mover.add_peer("garbage", metadata)
    assert refusal.value.peer == "garbage"
    with pytest.raises(TransferError):
        source.write(target, (0, 8), peer="garbage")


def test_a_removed_peer_is_unknown_until_it_is_added_again(parties):
    source, target = parties
    source.mover.remove_peer("stranger")
    for round in range(3):
        for _ in range(2):
            source.mover.remove_peer("target")
        with pytest.raises(TransferError):
            source.write(target, (0, 8))
        for _ in range(2):
            source.mover.add_peer("target", target.mover.metadata())
        notice = b"%d" % round
        assert finish(source.write(target, notice=notice), target.mover, notices=1) == [notice]


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the first contact needs the target's progress."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.mark.parametrize("make", ["memory", "nixl"], indirect=True)
@pytest.mark.parametrize("operation", ["write", "read"])
def test_what_a_removed_peer_has_in_flight_fails_at_once_and_lands_later(tcp, parties, operation):
    source, target = parties
    places, here, there = (source.at((0, 8)), target.at((0, 8))), source.buffer, target.buffer
    transfer = getattr(source.mover, operation)("target", *places, memory=DRAM)
    source.mover.remove_peer("target")
    with pytest.raises(TransferError):
        transfer.done()
    assert here[1] == 1 and there[1] == 2
    polled = source.mover, target.mover
    until(lambda: [each.notices() for each in polled] and (here[:8] == there[:8]).all())


def test_closing_forgets_peers_and_memory_and_spares_the_others(make, parties):
    source, target = parties
    third = Party(make, 3)
    third.mover.add_peer("target", target.mover.metadata())
    source.mover.close()
    with pytest.raises(TransferError):
        source.write(target, (0, 8))
    finish(third.write(target, (0, 8), (8, 8)), target.mover)
    assert target.buffer[6:17].tolist() == [2, 2, *[3] * 8, 2]
    third.mover.close()  # and once more at the end


class Victim(PeerProcess):
    """`nixl_peer.py` in a process that ends by kill -9."""

    def __init__(self, role: str, **env: str):
        super().__init__("tests.contract.nixl_peer", role, **env)
        self.buffer = self.said.get(timeout=START_S)

    def aim(self, party: Party) -> None:
        self.tell({"metadata": party.mover.metadata().hex(), "address": party.base})
        self.tell({"size": SIZE})


@pytest.fixture
def victim() -> Iterator[Callable[..., Victim]]:
    with contextlib.ExitStack() as stack:

        def start(role: str, **env: str) -> Victim:
            return stack.enter_context(Victim(role, **env))

        yield start


@pytest.mark.parametrize("make_target", [NixlMover, polled_nixl], ids=["plain", "polled"])
def test_a_target_survives_the_kill_of_its_writer(victim, make_target):
    target, next_writer = Party(make_target, 2), Party(NixlMover, 3)
    writer = victim("writer")
    writer.aim(target)
    arrived: list[bytes] = []
    until(lambda: arrived.extend(target.mover.notices()) or len(arrived) >= 5)
    assert set(arrived) == {b"wrote"}
    assert (target.buffer == 0xA5).all()
    writer.kill()
    while target.mover.notices():
        pass
    next_writer.mover.add_peer("target", target.mover.metadata())
    write = next_writer.write(target, notice=b"next")
    assert finish(write, target.mover, notices=1) == [b"next"]
    assert (target.buffer == 3).all()


@pytest.mark.parametrize(
    ("operation", "make_writer"),
    [("write", NixlMover), ("read", NixlMover), ("write", polled_nixl)],
    ids=["write", "read", "polled write"],
)
def test_a_writer_survives_the_kill_of_its_target(victim, operation, make_writer):
    writer, next_target = Party(make_writer, 1), Party(NixlMover, 2)
    target = victim("target")
    there = np.array([(target.buffer["address"], SIZE, 0)], dtype=np.uint64)
    writer.mover.add_peer("target", bytes.fromhex(target.buffer["metadata"]))

    def move_once() -> None:
        start = getattr(writer.mover, operation)
        until(start("target", writer.at((0, SIZE)), there, memory=DRAM).done)

    move_once()
    target.kill()
    with pytest.raises(TransferError) as failure:
        for _ in range(1000):
            move_once()
    assert failure.value.peer == "target"
    writer.mover.remove_peer("target")
    writer.buffer[:] = 1
    writer.mover.add_peer("next", next_target.mover.metadata())
    write = writer.write(next_target, peer="next", notice=b"next")
    assert finish(write, next_target.mover, notices=1) == [b"next"]
    assert (next_target.buffer == 1).all()


def test_a_stranger_at_the_ports_of_a_target_changes_nothing(victim):
    """Requests of all kinds, TLS, noise, and connections that say nothing. UCX takes only peers
    that begin with its number."""
    target = victim("target", UCX_TLS="tcp,self", UCX_NET_DEVICES="lo")
    there = np.array([(target.buffer["address"], SIZE, 0)], dtype=np.uint64)
    places = [("127.0.0.1", port) for port in listening_ports(target.process.pid)]
    assert places, "KV goes over TCP"
    noise = Random(7)
    messages = [*MESSAGES, *(noise.randbytes(size) for size in (1, 8, 5000, SIZE))]
    source = Party(NixlMover, 1)

    def round_trip(fill: int) -> None:
        for start, sent in ((source.mover.write, fill), (source.mover.read, 0)):
            source.buffer[:] = sent
            until(start("target", source.at((0, SIZE)), there, memory=DRAM).done)
        assert (source.buffer == fill).all()

    with contextlib.ExitStack() as stack:
        source.mover.add_peer("target", bytes.fromhex(target.buffer["metadata"]))
        round_trip(200)
        for place in places * 20:
            stack.enter_context(socket.create_connection(place, timeout=WAIT_S))
        pool = stack.enter_context(ThreadPoolExecutor(8))
        tries = [
            pool.submit(tell, place, message, tls=tls)
            for place, message, tls in itertools.product(places, messages, (False, True))
        ]
        rounds = itertools.count(1)
        while not all(one.done() for one in tries):
            round_trip(next(rounds) % 199)
        round_trip(200)
        assert {one.result() for one in tries} == {b""} and target.process.poll() is None
        for place in places:  # `tell` does not say whether anybody listens
            stack.enter_context(socket.create_connection(place, timeout=WAIT_S))
