"""Part `descriptors`: how many a job needs when the block pools have been in use.

The pools are vLLM's, with dynamo-lite's queue of free blocks. First they serve the mixed
load of `benchmarks/used_pools.py`.
"""

import statistics
from collections.abc import Sequence

from benchmarks.used_pools import JOB_BLOCKS, Job, Load
from dynamo_lite.protocol.records import KvRegion
from dynamo_lite.transfer.block_map import BlockMap
from dynamo_lite.vllm.engine.free_blocks import hand_out_runs
from gpu_check.bench import Bench
from gpu_check.report import CheckFailed, Figures

_LAYERS, _BLOCK_BYTES = 36, 128 << 10
_JOBS, _PROBES = 300, 20
#: Limit for the mean of used pools divided by that of fresh ones.
_MOST = 2.0


def descriptors(_bench: Bench) -> Figures:
    (fresh,) = counts_per_job(Load(jobs=1, seam=hand_out_runs, probes=1).run().found)
    used = counts_per_job(Load(jobs=_JOBS, seam=hand_out_runs, probes=_PROBES).run().found)
    mean = statistics.mean(used)
    if mean > _MOST * fresh:
        raise CheckFailed(
            f"a job of {JOB_BLOCKS} blocks has {mean:.0f} descriptors on used pools and {fresh} on"
            f" fresh ones, more than {_MOST:g} times as many"
        )
    return {
        "blocks per job": JOB_BLOCKS,
        "layers": _LAYERS,
        "fresh pools": fresh,
        "used pools, mean": round(mean, 1),
        "used pools, most": max(used),
    }


def counts_per_job(jobs: Sequence[Job]) -> list[int]:
    """Number of descriptors of each job, from its local to its remote blocks."""
    pools = _regions(1 << 40), _regions(1 << 44)
    blocks = BlockMap(list(zip(*pools, strict=True)), (0, 0))
    return [len(blocks.descriptors(job.local_ids, job.remote_ids)[0]) for job in jobs]


def _regions(base: int) -> list[KvRegion]:
    """Dense layers in sequence."""
    size = 1 << 34
    return [
        KvRegion(
            layer=str(layer),
            base=base + layer * size,
            stride_bytes=_BLOCK_BYTES,
            block_bytes=_BLOCK_BYTES,
        )
        for layer in range(_LAYERS)
    ]
