"""What is kept of a remote prefill that was lost half-way, and whether its rest is requested.

The blocks that a lost writer had finished are given to the engine's prefix cache before
the engine takes the prompt's blocks back. So the engine finds them when it looks at the
prompt again, and the rest is decided as for any prompt with a cached prefix. The blocks
behind them may still be written, and stay in quarantine. The cached blocks stay in
quarantine as well, which is safe: a writer that writes a finished block again writes the
same contents.
"""

import logging
from collections.abc import Callable
from typing import Any

from dynamo_lite.disagg.counters import RESUME, Counters
from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.policy.attempts.instructions import Outcome
from dynamo_lite.policy.attempts.resume import AskAgain, again
from dynamo_lite.runtime.members.roster import Members

logger = logging.getLogger(__name__)

#: Gives the blocks of the request's first tokens, as many as stated, to the prefix cache.
CacheBlocks = Callable[[Any, int], None]


class Resumes:
    """usable: the usable prefill workers. cache: None where the engine caches no prefixes."""

    def __init__(
        self,
        block_size: int,
        stats: Counters,
        usable: Callable[[], Members],
        cache: CacheBlocks | None,
    ):
        self._size, self._stats, self._usable, self._cache = block_size, stats, usable, cache

    def lost(self, prefill: RemotePrefill, now: float) -> bool:
        """The engine is about to take the blocks back. Returns whether another remote prefill
        may be requested."""
        prompt, until = prefill.prompt, prefill.until
        if prompt is None or until is None or prefill.outcome is None:
            return False
        if prefill.outcome is Outcome.WRITER_UNUSABLE:
            prefill.tries -= 1  # it has not tried at all
        verdict = again(
            prefill.outcome,
            tries=prefill.tries,
            max_tries=prefill.max_tries,
            others=sum(member.lease_id != prefill.done_by for member in self._usable()),
            spent_s=now - prefill.since,
            left_s=until - now,
        )
        blocks = prefill.landed_blocks or 0
        if blocks and self._cache is not None:
            self._cache(prompt, (prefill.first_block + blocks) * self._size)
        logger.info(
            "request %s: attempt %s: remote prefill lost (%s), %d blocks are kept; retry: %s (%s)",
            prefill.request_id,
            prefill.attempt,
            prefill.outcome.value,
            blocks,
            "yes" if isinstance(verdict, AskAgain) else "no",
            verdict.reason.value,
        )
        self._stats.add(f"{RESUME}/{verdict.reason.value}")
        prefill.may_retry = isinstance(verdict, AskAgain)
        if not prefill.may_retry:
            prefill.prompt = None
        return prefill.may_retry
