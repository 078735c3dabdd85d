"""Bandwidth of the mover for real KV layouts, beside one big write and a plain copy."""

import ctypes
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

# NIXL reads it when it is imported.
os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

import msgspec
import numpy as np

from benchmarks.command import begin, parser_of, until_interrupted, write_json
from benchmarks.figures import quartiles, verdict
from benchmarks.used_pools import JOB_BLOCKS, Load, Seam, runs
from dynamo_lite.protocol.records import KvRegion, RankMetadata
from dynamo_lite.transfer.block_map import BlockMap
from dynamo_lite.transfer.nixl import NixlMover
from dynamo_lite.transfer.sharding import join
from dynamo_lite.vllm.engine.free_blocks import hand_out_runs

MIN_RATIO = 0.9
MIN_BYTES = 1 << 20
MAX_DESCRIPTORS = 1 / 8
MIN_BLOCKS = 8
MAX_USED = 2.0
SERVED_JOBS, PROBES = 200, 20

_MIB = 1 << 20
_PAGE = 4096
_ANSWER_S = 30.0
_START_S = 120.0
_NOTICE = b"benchmark"
_LOOKS = 100

_ABOUT = f"""\
A second process opens a KV pool, laid out as vLLM lays it out on a CPU: all layers
back to back, blocks of one layer dense. This process has the same pool and writes
jobs into the other one, as a prefill worker does: block ids to descriptors
(transfer/block_map.py), one write with a notice (transfer/nixl.py), polled to its end.

  contiguous  the blocks of the job follow one another on both sides
  runs of 4   four blocks follow one another, then there is a gap
  scattered   no two blocks follow one another
  big         the same bytes as one NIXL WRITE of one descriptor, built beforehand
  memcpy      the same bytes within this process, by one memmove

All of them take turns within each round, on parts of the pool that change each
time; the fastest of --repeat counts, and a ratio compares what ran in the same
round. When its blocks are contiguous, a job is to reach {MIN_RATIO:g} x the big write from
{MIN_BYTES // _MIB} MiB on, and from {MIN_BLOCKS} blocks on to need at most 1/8 of blocks x layers
descriptors.

Those blocks are chosen. Which ones engines really get is counted apart, for jobs of
{JOB_BLOCKS} blocks: from vLLM's own block pools, fresh, and after {SERVED_JOBS} prompts of all
lengths that were prefilled in chunks, decoded beside one another, and evicted
(benchmarks/used_pools.py). Used pools are to cost at most {MAX_USED:g} x the descriptors.
"""


@dataclass(frozen=True)
class Shape:
    """A model's KV. block_bytes: of one layer. packed: all layers of a block lie together."""

    name: str
    layers: int
    block_bytes: int
    pool_blocks: int
    packed: bool = False


#: 32 tokens a block. tiny: 4 KV heads of 32, float32. bench: 4 of 64, bfloat16.
#: 8b: as Llama 3 8B, 8 of 128, bfloat16. packed: bench with VLLM_KV_CACHE_LAYOUT=BLHNC,
#: which backends of GPUs have.
SHAPES = (
    Shape("tiny", 4, 4 * 32 * 64 * 4, 1024),
    Shape("bench", 12, 4 * 32 * 128 * 2, 384),
    Shape("packed", 12, 4 * 32 * 128 * 2, 384, packed=True),
    Shape("8b", 32, 8 * 32 * 256 * 2, 80),
)
SIZES = (1, 4, 8, 16, 32, 64, 128)
KINDS = ("contiguous", "runs of 4", "scattered", "big", "memcpy")
_RUNS = {"contiguous": 0, "runs of 4": 4, "scattered": 1}


@dataclass
class Job:
    """Seconds of the fastest job of each round, by kind."""

    shape: str
    blocks: int
    layers: int
    bytes: int
    seconds: dict[str, list[float]]
    descriptors: dict[str, int]

    def ratios(self, kind: str, to: str = "big") -> list[float]:
        """Bandwidth of `kind` in bandwidths of `to`, round by round."""
        pairs = zip(self.seconds[to], self.seconds[kind], strict=True)
        return [theirs / ours for theirs, ours in pairs]


class Pool:
    """KV memory of one rank and its mover."""

    def __init__(self, shape: Shape, name: str):
        size = shape.layers * shape.pool_blocks * shape.block_bytes
        self._memory = np.ones(size + _PAGE, dtype=np.uint8)
        self.base = -(-self._memory.ctypes.data // _PAGE) * _PAGE
        self.size = size
        self.mover = NixlMover(name)
        self.mover.register([(self.base, size)], "DRAM", 0)
        per_layer = shape.block_bytes * (1 if shape.packed else shape.pool_blocks)
        stride = shape.block_bytes * (shape.layers if shape.packed else 1)
        self.rank = RankMetadata(
            agent=self.mover.metadata(),
            memory="DRAM",
            device=0,
            regions=tuple(
                KvRegion(
                    layer=f"model.layers.{layer}.self_attn.attn",
                    base=self.base + layer * per_layer,
                    stride_bytes=stride,
                    block_bytes=shape.block_bytes,
                )
                for layer in range(shape.layers)
            ),
        )


def receive(pipe: Connection, shape: Shape) -> None:
    """The other process: it does what a decode rank does, until the pipe is closed."""
    pool = Pool(shape, f"bench-receiver-{os.getpid()}")
    pipe.send_bytes(msgspec.msgpack.encode(pool.rank))
    try:
        while True:
            # Without a pause: the pace of an engine's steps is not what is measured.
            for _ in range(_LOOKS):
                pool.mover.notices()
            if pipe.poll():
                pipe.recv_bytes()
    except EOFError:
        pool.mover.close()


@contextmanager
def receiver(shape: Shape) -> Iterator[RankMetadata]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, shape), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise RuntimeError("the receiving process did not start")
        yield msgspec.msgpack.decode(ours.recv_bytes(), type=RankMetadata)
    finally:
        ours.close()
        process.join(_ANSWER_S)
        process.kill()


class Sender:
    """Moves jobs of one shape, each kind by its own means."""

    def __init__(self, shape: Shape, remote: RankMetadata, seed: int):
        self._shape = shape
        self._pool = Pool(shape, f"bench-sender-{os.getpid()}-{shape.name}")
        self._random = random.Random(seed)
        self._pool.mover.add_peer("receiver", remote.agent)
        lanes = join("receiver", [self._pool.rank], [remote])[0, 0]
        self._map = BlockMap([(lane.local, lane.remote) for lane in lanes], (0, 0))
        self._remote_base = min(region.base for region in remote.regions)
        self._scratch = np.ones(shape.layers * max(SIZES) * shape.block_bytes, np.uint8)
        self.descriptors = 0

    def close(self) -> None:
        self._pool.mover.close()

    def prepare(self, kind: str, blocks: int) -> Callable[[], None]:
        """A job somewhere in the pool; the returned call moves it."""
        size = self._shape.layers * blocks * self._shape.block_bytes
        if kind == "memcpy":
            source = self._pool.base + self._offset(size)
            target = self._scratch.ctypes.data
            return lambda: void(ctypes.memmove(target, source, size))
        if kind == "big":
            here = self._one(self._pool.base + self._offset(size), size)
            there = self._one(self._remote_base + self._offset(size), size)
            return lambda: self._move(here, there)
        local, remote = self._ids(kind, blocks), self._ids(kind, blocks)
        return lambda: self._move(*self._map.descriptors(local, remote))

    def _move(self, here: np.ndarray, there: np.ndarray) -> None:
        self.descriptors = len(here)
        memory = ("DRAM", "DRAM")
        write = self._pool.mover.write("receiver", here, there, memory=memory, notice=_NOTICE)
        until = time.monotonic() + _ANSWER_S
        while not write.done():
            if time.monotonic() > until:
                raise RuntimeError("a write does not end")

    def _offset(self, size: int) -> int:
        return self._random.randrange(0, self._pool.size - size + 1, _PAGE)

    def _ids(self, kind: str, blocks: int) -> list[int]:
        run = _RUNS[kind] or blocks
        if run >= blocks:
            start = self._random.randrange(self._shape.pool_blocks - blocks + 1)
            return list(range(start, start + blocks))
        # One block or more of room behind each run, and no two runs in order.
        slots = self._random.sample(range(self._shape.pool_blocks // (run + 1)), blocks // run)
        if slots == sorted(slots):
            slots.reverse()
        return [slot * (run + 1) + i for slot in slots for i in range(run)]

    @staticmethod
    def _one(address: int, size: int) -> np.ndarray:
        return np.array([[address, size, 0]], dtype=np.uint64)


def void(_: object) -> None:
    """memmove returns an address that nobody wants."""


def main() -> None:
    parser = parser_of("transfer", _ABOUT)
    parser.add_argument("--rounds", type=int, default=30, help="per kind and size (default 30)")
    parser.add_argument(
        "--repeat",
        type=int,
        default=7,
        help="jobs per round and kind, of which the fastest counts (default 7)",
    )
    parser.add_argument("--quick", action="store_true", help="5 rounds, for trying")
    options = begin(parser)
    rounds = 5 if options.quick else options.rounds
    jobs: list[Job] = []
    with until_interrupted():
        for shape in SHAPES:
            measure(shape, rounds, options.repeat, jobs)
    report(jobs, rounds)
    used = used_pools()
    found = {"transfer": [asdict(job) for job in jobs], "used_pools": used}
    write_json(options.json, found)


def used_pools() -> dict[str, float]:
    """Descriptors of a job for each region whose blocks are dense: a layer's, or that of all
    layers where they lie together."""
    seams: dict[str, Seam] = {"in runs": hand_out_runs, "vLLM's order": lambda _: None}
    print(f"\ndescriptors per region of a job of {JOB_BLOCKS} blocks, as vLLM's pools give them\n")
    print(f"{'':14}{'fresh':>8}{'used':>8}{'(most)':>8}{'ratio':>8}{'hits':>8}")
    ratios: dict[str, float] = {}
    for name, seam in seams.items():
        fresh = runs(Load(jobs=1, seam=seam, probes=1).run().found[0])
        load = Load(jobs=SERVED_JOBS + 5 * PROBES, seam=seam, probes=PROBES).run()
        counts = [runs(job) for job in load.found]
        ratios[name] = statistics.mean(counts) / fresh
        hits = load.hit_tokens / load.tokens
        print(
            f"{name:14}{fresh:8}{statistics.mean(counts):8.1f}{max(counts):8}"
            f"{ratios[name]:7.1f}x{hits:8.2f}"
        )
    print(f"\nused pools: {ratios['in runs']:.1f} x", end="")
    print(verdict(ratios["in runs"] <= MAX_USED, MAX_USED))
    return ratios


def measure(shape: Shape, rounds: int, repeat: int, jobs: list[Job]) -> None:
    with receiver(shape) as remote, closing(Sender(shape, remote, seed=1)) as sender:
        sizes = [n for n in SIZES if n <= shape.pool_blocks // 2]
        for kind in KINDS:
            for _ in range(3):
                sender.prepare(kind, sizes[-1])()
        for blocks in sizes:
            job = Job(
                shape.name,
                blocks,
                shape.layers,
                shape.layers * blocks * shape.block_bytes,
                {kind: [] for kind in KINDS},
                {},
            )
            for number in range(rounds):
                one_round(sender, job, number, repeat)
            jobs.append(job)
            print(f"  {shape.name:6}{blocks:4} blocks done", end="\r", file=sys.stderr, flush=True)


def one_round(sender: Sender, job: Job, number: int, repeat: int) -> None:
    turn = number % len(KINDS)
    for kind in KINDS[turn:] + KINDS[:turn]:
        taken: list[float] = []
        for _ in range(repeat):
            move = sender.prepare(kind, job.blocks)
            started = time.perf_counter()
            move()
            taken.append(time.perf_counter() - started)
        # The lowest: what else runs on the machine only ever adds.
        job.seconds[kind].append(min(taken))
        if kind in _RUNS:
            job.descriptors[kind] = sender.descriptors


def report(jobs: list[Job], rounds: int) -> None:
    print(f"GB/s per job, median of {rounds} rounds; ratio to the big write: median (quartiles)\n")
    kinds = tuple(_RUNS)
    head = "".join(f"{kind:>12}" for kind in KINDS)
    print(
        f"{'model':7}{'blocks':>7}{'MiB':>8}{head}" + "".join(f"{k + ' / big':>24}" for k in kinds)
    )
    for job in jobs:
        speeds = "".join(
            f"{job.bytes / statistics.median(job.seconds[k]) / 1e9:12.2f}" for k in KINDS
        )
        ratios = "".join(f"{quartiles(job.ratios(kind), 2):>24}" for kind in kinds)
        print(f"{job.shape:7}{job.blocks:7}{job.bytes / _MIB:8.2f}{speeds}{ratios}")
    print(f"\ndescriptors per job (share of blocks x layers)\n\n{'model':7}{'blocks':>7}", end="")
    print("".join(f"{kind:>20}" for kind in kinds))
    for job in jobs:
        counts = [job.descriptors.get(kind, 0) for kind in kinds]
        shares = [f"{n} ({n / (job.blocks * job.layers):.3f})" for n in counts]
        print(f"{job.shape:7}{job.blocks:7}" + "".join(f"{share:>20}" for share in shares))
    verdicts(jobs)


def verdicts(jobs: list[Job]) -> None:
    big = [job for job in jobs if job.bytes >= MIN_BYTES]
    if big:
        worst = min(big, key=lambda job: statistics.median(job.ratios("contiguous")))
        ratio = statistics.median(worst.ratios("contiguous"))
        print(f"\ncontiguous jobs from 1 MiB on, lowest: {ratio:.2f} x big", end="")
        print(f" ({worst.shape}, {worst.blocks} blocks)", end="")
        print(verdict(ratio >= MIN_RATIO, MIN_RATIO))
    long = [job for job in jobs if job.blocks >= MIN_BLOCKS]
    if long:
        share = max(job.descriptors["contiguous"] / (job.blocks * job.layers) for job in long)
        print(
            f"descriptors of contiguous jobs from {MIN_BLOCKS} blocks on, most: {share:.3f}", end=""
        )
        print(verdict(share <= MAX_DESCRIPTORS, MAX_DESCRIPTORS))


if __name__ == "__main__":
    main()
