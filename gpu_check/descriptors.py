"""The part about descriptors: how many a job needs when the block pools are no longer fresh.

Pure arithmetic. `used_pool` stands for an engine's block pool; what it hands out is a list
of block ids for each job.
"""

from collections import deque
from collections.abc import Sequence

from dynamo_lite.protocol.records import KvRegion
from dynamo_lite.transfer.block_map import BlockMap
from gpu_check.bench import Bench
from gpu_check.report import Figures

_LAYERS, _BLOCK_BYTES = 36, 128 << 10
_JOB_BLOCKS, _JOBS = 128, 14
#: Jobs that fit into the pool of a decode and of a prefill engine.
_DECODE_JOBS, _PREFILL_JOBS = 6, 4


def descriptors(_bench: Bench) -> Figures:
    counts = counts_per_job(
        used_pool(_PREFILL_JOBS * _JOB_BLOCKS, _JOB_BLOCKS, _JOBS),
        used_pool(_DECODE_JOBS * _JOB_BLOCKS, _JOB_BLOCKS, _JOBS),
    )
    return {
        "blocks per job": _JOB_BLOCKS,
        "layers": _LAYERS,
        "fresh pools": counts[0],
        "used pools, most": max(counts),
        "used pools, last job": counts[-1],
    }


def used_pool(blocks: int, job_blocks: int, jobs: int) -> list[list[int]]:
    """The ids of each job's blocks, as vLLM's pool hands them out to one job after the other.

    A job takes the blocks that were free for longest. Its own come back last block first.
    """
    free = deque(range(1, blocks + 1))
    taken: list[list[int]] = []
    for _ in range(jobs):
        taken.append([free.popleft() for _ in range(job_blocks)])
        free.extend(reversed(taken[-1]))
    return taken


def counts_per_job(here: Sequence[Sequence[int]], there: Sequence[Sequence[int]]) -> list[int]:
    """Descriptors of each job, from its blocks here to its blocks there."""
    pools = _regions(1 << 40), _regions(1 << 44)
    blocks = BlockMap(list(zip(*pools, strict=True)), (0, 0))
    return [
        len(blocks.descriptors(local, remote)[0]) for local, remote in zip(here, there, strict=True)
    ]


def _regions(base: int) -> list[KvRegion]:
    """Dense layers, one behind the other."""
    size = 1 << 34
    return [
        KvRegion(
            layer=str(layer),
            plane=0,
            base=base + layer * size,
            stride_bytes=_BLOCK_BYTES,
            block_bytes=_BLOCK_BYTES,
        )
        for layer in range(_LAYERS)
    ]
