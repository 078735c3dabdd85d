"""Which requests wait for another request's remote prefill of the same prefix.

A follower waits until its leader's remote prefill is over, and is then decided again. By then the
shared prefix is in the engine's own cache: one prefill and one transfer served both. Waiting pays
only if most of either prompt is shared. A follower must not wait for a much longer leader, nor for
a prefix after which most of its own work is left.

A leader is a prompt that is parked until its KV comes. It leads from the allocation of
its blocks until the engine learns that the KV came or will not come, or until the leader ends, at
its deadline at the latest. A follower holds no blocks and waits for one leader at a time. The
engine need not look at its prompt until then.
"""

import logging
from bisect import bisect_left

from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.decision.rule import WANT_OF_ROOM, DecisionReason
from dynamo_lite.disagg.decode.remote_prefill import PrefixWait, RemotePrefill
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.disagg.metrics import FLIGHT_WAIT
from dynamo_lite.protocol.options import DisaggOptions

logger = logging.getLogger(__name__)

#: Verdicts of prompts that are long enough for a remote prefill. In all other cases the prompt is
#: short, or the leader's remote prefill may fail, too.
_LONG = WANT_OF_ROOM | {DecisionReason.LONG}
#: It waits again after one failed leader, but not after several.
_MAX_WAITS = 2


def min_shared_tokens(options: DisaggOptions, block_size: int) -> int:
    """Fewer shared tokens are not worth a wait. block_size: in tokens."""
    if options.single_flight_min_length is not None:
        return options.single_flight_min_length
    # A prefix that is worth a remote prefill is also worth a wait for one.
    return options.max_local_prefill_length // block_size * block_size


def pays(*, shared: int, uncached: int, of_leader: int, least: int) -> bool:
    """Whether a wait is worth it. shared: tokens of the `uncached` ones that the leader's KV will
    bring, of all `of_leader` tokens that it waits for. least: see `min_shared_tokens`."""
    return shared >= max(least, 1) and 2 * shared >= max(uncached, of_leader)


class SingleFlight:
    """Runs on the engine's thread.

    block_size: in tokens.
    """

    def __init__(self, block_size: int, prefills: RemotePrefills, stats: Counters):
        self._block_size, self._prefills, self._stats = block_size, prefills, stats

    def waits(self, prefill: RemotePrefill, cached: int) -> bool:
        """Whether the request's leader is still parked."""
        wait = prefill.wait
        if wait is None or wait.leader is None:
            return False
        if self._prefills.leader_of(prefill.request_id) is not None:
            return True
        # For some drafts vLLM computes the last block of a cached prefix again.
        wait.served = 0 < cached >= wait.prefix_tokens - self._block_size
        self._end_wait(wait, "hit" if wait.served else "miss")
        return False

    def joins(self, request: Prompt, prefill: RemotePrefill) -> bool:
        """Whether the request waits from now on, instead of following its verdict."""
        decided = prefill.decided
        cached = decided.inputs.cached_tokens + decided.inputs.offloaded_tokens
        prefix, leader = self._longest(request)
        wait = prefill.wait or PrefixWait()
        if leader is None or decided.reason not in _LONG or wait.waits >= _MAX_WAITS:
            return False
        if not pays(
            shared=prefix - cached,
            uncached=request.num_prompt_tokens - cached,
            of_leader=leader.awaited_tokens,
            least=min_shared_tokens(decided.options, self._block_size),
        ):
            return False
        wait.leader, wait.prefix_tokens = leader.request_id, prefix
        wait.waits += 1
        wait.served = False
        prefill.wait = wait
        logger.info(
            "request %s: waits for the remote prefill of %s, which brings %d of %d tokens",
            request.request_id,
            leader.request_id,
            prefix - cached,
            request.num_prompt_tokens - cached,
        )
        return True

    def finished(self, wait: PrefixWait) -> None:
        """The request that may wait is over."""
        if wait.leader is not None:
            self._end_wait(wait, "cancelled")

    def _longest(self, request: Prompt) -> tuple[int, RemotePrefill | None]:
        """The longest prefix that a parked request awaits, in tokens, and the request with the
        fewest awaited tokens among those that bring it."""
        known, size = self._prefills.by_hash, self._prefills.hash_block_size
        assert size is not None
        # A hash stands for all blocks up to its own, so the known ones come first.
        hashes, end = request.block_hashes, self._prefills.cacheable(request)
        count = bisect_left(hashes, True, 0, end, key=lambda each: each not in known)
        if count == 0:
            return 0, None
        leaders = known[hashes[count - 1]].values()
        return count * size, min(leaders, key=lambda leader: leader.awaited_tokens)

    def _end_wait(self, wait: PrefixWait, outcome: str) -> None:
        wait.leader = None
        self._stats.add(f"{FLIGHT_WAIT}/{outcome}")
