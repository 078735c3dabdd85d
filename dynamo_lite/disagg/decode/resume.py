"""What is kept of a remote prefill that was lost half-way, and whether its rest is requested.

The blocks that a lost writer had finished are given to the engine's prefix cache before
the engine takes the prompt's blocks back. So the engine finds them when it looks at the
prompt again, and the rest is decided as for any prompt with a cached prefix. The blocks
behind them may still be written, and stay in quarantine. The cached blocks stay in
quarantine as well, which is safe: a writer that writes a finished block again writes the
same contents. Whether the rest is worth a remote prefill is decided as for any prompt; here it is
decided whether another worker may be asked at all.
"""

import enum
import logging
from collections.abc import Callable
from typing import Any

from dynamo_lite.disagg.attempts.ledger import Outcome
from dynamo_lite.disagg.counters import RESUME, Counters
from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.runtime.members.roster import Members

logger = logging.getLogger(__name__)

#: Gives the blocks of the request's first tokens, as many as stated, to the prefix cache.
CacheBlocks = Callable[[Any, int], None]


class ResumeReason(enum.Enum):
    """Why another prefill worker may be asked (`WRITER_LOST`), or not."""

    WRITER_LOST = "writer_lost"
    NOT_THE_WRITER = "not_the_writer"  # another writer would end the same way
    TRIED = "tried"  # max_tries is reached
    NO_OTHER = "no_other"  # no other usable prefill worker
    LATE = "late"  # less time is left than was already spent


#: Outcomes that the writer caused.
_OF_THE_WRITER = {
    Outcome.WRITER_FAILED,
    Outcome.WRITER_ABANDONED,
    Outcome.WRITER_LOST,
    Outcome.WRITER_SILENT,
}


def again(
    outcome: Outcome, *, tries: int, max_tries: int, others: int, spent_s: float, left_s: float
) -> ResumeReason:
    """Whether a prompt may ask another prefill worker.

    tries: number of its remote prefills so far. others: usable prefill workers beside the writer.
    spent_s: since it asked first. left_s: until its time limit.
    """
    if outcome not in _OF_THE_WRITER:
        return ResumeReason.NOT_THE_WRITER
    if tries >= max_tries:
        return ResumeReason.TRIED
    if others < 1:
        return ResumeReason.NO_OTHER
    return ResumeReason.LATE if left_s < spent_s else ResumeReason.WRITER_LOST


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

    def lost(self, prefill: RemotePrefill, now: float) -> None:
        """The remote prefill has ended without its KV, and the engine is about to take the blocks
        back."""
        prompt, until = prefill.prompt, prefill.until
        if prompt is None or until is None or prefill.outcome is None:
            return
        reason = again(
            prefill.outcome,
            tries=prefill.tries,
            max_tries=prefill.max_tries,
            others=sum(member.lease_id != prefill.writer for member in self._usable()),
            spent_s=now - prefill.since,
            left_s=until - now,
        )
        prefill.may_retry = reason is ResumeReason.WRITER_LOST
        blocks = 0 if self._cache is None else prefill.landed_blocks or 0
        if blocks and self._cache is not None:
            self._cache(prompt, (prefill.first_block + blocks) * self._size)
        logger.info(
            "request %s: attempt %s: remote prefill lost (%s), %d blocks are kept; retry: %s (%s)",
            prefill.request_id,
            prefill.attempt,
            prefill.outcome.value,
            blocks,
            "yes" if prefill.may_retry else "no",
            reason.value,
        )
        self._stats.add(f"{RESUME}/{reason.value}")
        if not prefill.may_retry:
            prefill.prompt = None
