"""What a step of vLLM's scheduler completes, and when its kernels have run."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput


def filling_blocks(
    output: "SchedulerOutput", manager: "KVCacheManager", size: int, drafts: int
) -> list[int]:
    """The blocks that the step completes, also those that draft tokens complete.

    size: tokens per block. drafts: the most of a step. Those of the step before count as computed
    while it runs, and may be rejected.
    """
    filled: list[int] = []
    for request_id, computed in _computed(output):
        start = max(computed - drafts, 0) // size
        end = (computed + output.num_scheduled_tokens[request_id]) // size
        if end > start:
            blocks = manager.get_blocks(request_id).blocks
            filled += [block.block_id for block in blocks[0][start:end]]
    return filled


def _computed(output: "SchedulerOutput") -> Iterator[tuple[str, int]]:
    """Each request of the step, with the number of tokens that earlier steps computed."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def step_ended(*, on_gpu: bool) -> Callable[[], bool]:
    """Returns a check whether the step or layer that was launched last has ended.

    On a CPU it has ended already. On a GPU it is queued, and an event is recorded behind it.
    """
    if not on_gpu:
        return lambda: True
    event = torch.cuda.Event()
    event.record()
    return event.query
