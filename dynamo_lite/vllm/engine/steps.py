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
    for request_id, computed, again in _computed(output, drafts):
        start = max(computed - again, 0) // size
        end = (computed + output.num_scheduled_tokens[request_id]) // size
        if end > start:
            blocks = manager.get_blocks(request_id).blocks
            filled += [block.block_id for block in blocks[0][start:end]]
    return filled


def _computed(output: "SchedulerOutput", drafts: int) -> Iterator[tuple[str, int, int]]:
    """Each request of the step, with the number of tokens that earlier steps computed, and how many
    of these it may compute again."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, 0
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed, drafts


def step_ended(*, on_gpu: bool) -> Callable[[], bool]:
    """Returns a check whether the step or layer that was launched last has ended.

    On a CPU it has ended already. On a GPU it is queued, and an event is recorded behind it.
    """
    if not on_gpu:
        return lambda: True
    event = torch.cuda.Event()
    event.record()
    return event.query
