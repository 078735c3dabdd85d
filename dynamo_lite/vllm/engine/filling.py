"""Which blocks a step of vLLM's scheduler completes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput


def filling_blocks(output: "SchedulerOutput", manager: "KVCacheManager", size: int) -> list[int]:
    """size: of a block, in tokens. Blocks that are completed by draft tokens count as well."""
    filled: list[int] = []
    for request_id, computed in _computed(output):
        start = computed // size
        end = (computed + output.num_scheduled_tokens[request_id]) // size
        if end > start:
            blocks = manager.get_blocks(request_id).blocks
            filled += [block.block_id for block in blocks[0][start:end]]
    return filled


def _computed(output: "SchedulerOutput") -> Iterator[tuple[str, int]]:
    """Of each request that the step computes: how many tokens were computed before."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
