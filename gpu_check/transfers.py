"""Parts `registration`, `write`, `events`, `posting`, `polling`, `context`: transfers between two
processes."""

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch

from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.disagg.messages import BlockWrite, PrefillStep, WritingAttempt
from dynamo_lite.disagg.metrics import BYTES
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.protocol.records import EngineMetadata, RankMetadata
from dynamo_lite.runtime.claim_cells import Cell
from dynamo_lite.transfer.base import PollLimit, Transfer
from dynamo_lite.transfer.block_map import BlockMap
from dynamo_lite.transfer.sharding import join
from dynamo_lite.vllm.engine import opened_rank
from dynamo_lite.vllm.engine.steps import step_ended
from gpu_check.bench import Bench
from gpu_check.memory import BLOCKS, TOKENS, WAIT_S, Pool, Shape, finish
from gpu_check.peer import Peer
from gpu_check.report import CheckFailed, Figures, Skip

_ROUNDS = 5
#: Layers, blocks, heads and tokens per block of an 8B model with 32k tokens, with small values.
_MODEL: Shape = (36, 512, 8, 64, 16)
#: A decode step of such a model takes about as long.
_MOST_POSTING_MS = 20.0
_DECODE = EngineConfig(
    namespace="gpu-check",
    engine_id="gpu-check",
    lease_id=1,
    lease_ttl_s=5.0,
    nats_url="",
    etcd_url="",
    role=DecodeEngineConfig(
        options=DisaggOptions(), prefill_component="PrefillWorker", queue=QueueConfig()
    ),
)
#: How long a kernel keeps the device busy (`events`) or the engine's thread (`polling`).
_BUSY_S = 0.4
#: At least the clock cycles of a GPU in that time.
_BUSY_CYCLES = int(_BUSY_S * 2e9)


class PoolLink:
    """Transfers between a pool and the peer's."""

    def __init__(self, pool: Pool, peer: RankMetadata):
        self._pool, self._peer = pool, peer
        mappings = join("peer", [pool.rank], [peer])[0, 0]
        pairs = [(mapping.local, mapping.remote) for mapping in mappings]
        self._map = BlockMap(pairs, (pool.rank.device, peer.device))
        pool.mover.add_peer("peer", peer.agent)

    def write(self, here: Sequence[int], there: Sequence[int], notice: bytes = b"") -> Transfer:
        local, remote = self._map.descriptors(here, there)
        memory = self._pool.rank.memory, self._peer.memory
        return self._pool.mover.write("peer", local, remote, memory=memory, notice=notice)

    def read(self, here: Sequence[int], there: Sequence[int]) -> Transfer:
        local, remote = self._map.descriptors(here, there)
        memory = self._pool.rank.memory, self._peer.memory
        return self._pool.mover.read("peer", local, remote, memory=memory)


def registration(bench: Bench) -> Figures:
    with Pool(_name(), bench.here) as pool:
        return {
            "memory": pool.rank.memory,
            "MiB": pool.bytes / (1 << 20),
            "ms": pool.registered_s * 1e3,
            "metadata bytes": len(pool.rank.agent),
        }


def write(bench: Bench) -> Figures:
    """Scattered blocks must arrive in their places, change no others, and be readable."""
    with Peer(bench.there) as peer, Pool(_name(), bench.here) as pool:
        pool.fill(seed=1)
        link = PoolLink(pool, peer.rank)
        here, there, back = list(range(0, 40, 2)), list(range(60, 40, -1)), list(range(100, 120))
        others = [block for block in range(BLOCKS) if block not in there]
        zeros = peer.checksum(others)
        started = time.perf_counter()
        finish(link.write(here, there, b"scattered"))
        first_s = time.perf_counter() - started
        peer.await_notice(b"scattered")
        if peer.checksum(there) != pool.checksum(here):
            raise CheckFailed("the written blocks do not contain what was sent")
        if peer.checksum(others) != zeros:
            raise CheckFailed("blocks that were not written have changed")
        finish(link.read(back, there))
        pool.synchronize()
        if pool.checksum(back) != pool.checksum(here):
            raise CheckFailed("the blocks read back differ from those written")
        best_s = min(_timed(link, number) for number in range(_ROUNDS))
        return {
            "GB/s": pool.bytes / best_s / 1e9,
            "first contact ms": first_s * 1e3,
            "from": bench.here,
            "to": bench.there,
        }


def _timed(link: PoolLink, number: int) -> float:
    """Seconds to write the whole pool."""
    whole = range(BLOCKS)
    started = time.perf_counter()
    finish(link.write(whole, whole, b"whole %d" % number))
    return time.perf_counter() - started


def events(bench: Bench) -> Figures:
    """A prefill rank's write must wait for the kernels that compute its blocks."""
    with Peer(bench.there) as peer, Pool(_name(), bench.here) as pool:
        rank = PrefillRank(pool.mover, pool.rank, 0, _held)
        blocks = list(range(16))
        pool.fill(seed=1)
        old = pool.checksum(blocks)
        _attempt(rank, [peer.rank], "first", blocks, _always)  # connects the two
        rank.stats.take()
        launched = time.perf_counter()
        ready = _computed_late(pool, seed=2)
        if ready():
            raise CheckFailed("the event reports a kernel of 0.4 s as done at once")
        _attempt(rank, [peer.rank], "second", blocks, ready)
        waited_s = time.perf_counter() - launched
        pool.synchronize()
        if pool.checksum(blocks) == old:
            raise CheckFailed("the blocks were not computed, so this part is inconclusive")
        if peer.checksum(blocks) != pool.checksum(blocks):
            raise CheckFailed("the write sent the blocks' content from before the kernel")
        return {"kernel and write ms": waited_s * 1e3}


def _attempt(
    rank: PrefillRank,
    peers: Sequence[RankMetadata],
    attempt: str,
    blocks: Sequence[int],
    ready: Callable[[], bool],
    tokens: int = TOKENS,
) -> float:
    """Runs one job of these blocks of so many tokens. Returns for how long its step has kept the
    thread. Raises CheckFailed."""
    target = EngineMetadata(
        engine_id="peer",
        lease_id=1,
        fingerprint={},
        block_size_tokens=tokens,
        num_blocks=len(blocks),
        ranks=tuple(peers),
    )
    of = WritingAttempt(attempt, "peer", len(blocks))
    block_write = BlockWrite(of, list(blocks), list(blocks), last=True)
    ended = [(attempt, True)]
    targets = {"peer": encode(target)}
    started = time.perf_counter()
    rank.step(PrefillStep(writes=[block_write], targets=targets, ended=ended), ready)
    kept_s = time.perf_counter() - started
    deadline = time.monotonic() + WAIT_S
    while attempt not in rank.results().sent:
        if BYTES in rank.stats.data and not ready():
            raise CheckFailed("the write started before its kernel was done")
        if time.monotonic() > deadline:
            raise CheckFailed(f"attempt {attempt} is not done within {WAIT_S:g} s")
    if (report := rank.report()) is not None and report.failures:
        raise CheckFailed(report.failures[attempt])
    return kept_s


def _computed_late(pool: Pool, seed: int) -> Callable[[], bool]:
    """Starts a slow computation of the pool's blocks. Returns a check whether it is done."""
    new = pool.random(seed)
    if pool.device.type == "cuda":
        pool.synchronize()
        torch.cuda._sleep(_BUSY_CYCLES)
        pool.tensor.copy_(new)
        return step_ended(on_gpu=True)
    computed = threading.Event()

    def compute() -> None:
        time.sleep(_BUSY_S)
        pool.tensor.copy_(new)
        computed.set()

    threading.Thread(target=compute, name="late kernel", daemon=True).start()
    return computed.is_set


def posting(bench: Bench) -> Figures:
    """A long prompt's blocks, cut by heads for a decode engine of two ranks, must not keep the
    engine's thread for longer than a step."""
    layers, blocks, heads, tokens, values = _MODEL
    half = (layers, blocks, heads // 2, tokens, values)
    with (
        Peer(bench.there, shape=half) as first,
        Peer(bench.there, shape=half, first_head=heads // 2) as second,
        # As a rank on a GPU has it: the transfers end without the engine's thread.
        Pool(_name(), bench.here, thread=bench.on_gpu, shape=_MODEL) as pool,
    ):
        rank, peers = PrefillRank(pool.mover, pool.rank, 0, _held), [first.rank, second.rank]
        kept_s = [
            _attempt(rank, peers, f"job {number}", range(blocks), _always, tokens)
            for number in range(_ROUNDS)
        ]
        return posted(kept_s, 2 * layers * blocks, blocks * tokens, bench)


def posted(kept_s: Sequence[float], descriptors: int, tokens: int, bench: Bench) -> Figures:
    """The verdict of `posting`. In host memory the bytes are copied meanwhile, so there is none.

    kept_s: of each job; the first one also connects.
    """
    connecting_ms, best_ms = kept_s[0] * 1e3, min(kept_s[1:]) * 1e3
    if bench.on_gpu and best_ms > _MOST_POSTING_MS:
        raise CheckFailed(
            f"the engine's thread is kept for {best_ms:.1f} ms by the write of {tokens} tokens in"
            f" {descriptors} descriptors, more than {_MOST_POSTING_MS:g} ms"
        )
    return {"tokens": tokens, "descriptors": descriptors, "ms": best_ms, "first ms": connecting_ms}


def context(bench: Bench) -> Figures:
    """The thread that moves transfers on must have a CUDA context: without one UCX disables CUDA
    IPC."""
    if not bench.on_gpu:
        raise Skip("transfers of host memory have no thread")
    watched = _Watched()
    with patch.object(opened_rank, "NixlMover", lambda *_: watched):
        mover = opened_rank.open_mover(_DECODE, 0, torch.device(bench.here), PollLimit())
    deadline = time.monotonic() + WAIT_S
    while not watched.contexts and time.monotonic() < deadline:
        mover.notices()
        time.sleep(0.001)
    mover.close()
    if not any(watched.contexts):
        why = getattr(mover, "broken", None) or "cuCtxGetCurrent gives none"
        raise CheckFailed(f"the transfer thread has no CUDA context on {bench.here}: {why}")
    return {"device": bench.here}


class _Watched:
    """A mover that looks for the context of the thread that polls it."""

    def __init__(self) -> None:
        self.contexts: list[int] = []

    def notices(self) -> list[bytes]:
        if threading.current_thread() is not threading.main_thread():
            self.contexts.append(current_context())
        return []

    def close(self) -> None:
        """Nothing is open."""


def current_context() -> int:
    """The CUDA context of the calling thread; 0 if it has none."""
    found = ctypes.c_void_p()
    code = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found))
    return 0 if code else found.value or 0


def polling(bench: Bench) -> Figures:
    """With the transfer thread a write must complete while the engine's thread is busy.

    It is the first write between the two, so it also needs a connection.
    """
    without_s, _ = _notice_while_busy(bench, thread=False)
    with_s, busy_s = _notice_while_busy(bench, thread=True)
    if with_s >= busy_s:
        raise CheckFailed(
            f"the notification arrived after {with_s * 1e3:.0f} ms, when the engine's thread was"
            f" no longer busy (after {busy_s * 1e3:.0f} ms)"
        )
    return {
        "busy ms": busy_s * 1e3,
        "notice ms with thread": with_s * 1e3,
        "without": without_s * 1e3,
    }


def _notice_while_busy(bench: Bench, *, thread: bool) -> tuple[float, float]:
    """Seconds until a write's notification arrived, and until the thread was free."""
    with Peer(bench.there) as peer, Pool(_name(), bench.here, thread=thread) as pool:
        pool.fill(seed=1)
        link = PoolLink(pool, peer.rank)
        started = time.monotonic()
        transfer = link.write(range(BLOCKS), range(BLOCKS), b"while busy")
        _be_busy(pool)
        free = time.monotonic()
        finish(transfer)
        return peer.await_notice(b"while busy") - started, free - started


def _be_busy(pool: Pool) -> None:
    """Blocks as an engine's thread that waits for its kernels: it does not call NIXL."""
    if pool.device.type == "cuda":
        torch.cuda._sleep(_BUSY_CYCLES)
        pool.synchronize()
    else:
        time.sleep(_BUSY_S)


def _name() -> str:
    return f"gpu-check-{os.getpid()}-{time.monotonic_ns()}"


def _always() -> bool:
    return True


def _held(_cell: Cell) -> float:
    """The claims of the attempts here never end."""
    return math.inf
