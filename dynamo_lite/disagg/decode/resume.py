"""Prompts whose remote prefill may be lost half-way, and what of it stays.

The blocks that a lost writer had finished are given to the engine's prefix cache
before the engine takes the prompt's blocks back. So it finds them when it looks at
the prompt anew, and the rest is decided as for any prompt with a prefix. The blocks
behind may still be written, and stay in quarantine; those in the cache as well, where
that does no harm: what a writer has finished it writes again only as it was.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo_lite.disagg.counters import RESUME, Counters
from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.policy.instructions import Outcome
from dynamo_lite.policy.resume import AskAgain, again

logger = logging.getLogger(__name__)

#: Gives the request's blocks of its first so many tokens to the prefix cache.
CacheBlocks = Callable[[Any, int], None]


@dataclass
class _Asked:
    """first: number of the first block that is awaited. since, until, max_tries: of all
    its tries.

    landed: blocks from there on whose KV is here, as far as is known.
    """

    request: Prompt
    first: int
    since: float
    until: float
    max_tries: int
    tries: int = 0
    landed: int | None = None
    outcome: Outcome | None = None


class Resumes:
    """usable: how many prefill workers are; see `again`."""

    def __init__(self, block_size: int, stats: Counters, usable: Callable[[], int]):
        self._size, self._stats = block_size, stats
        self._usable = usable
        self._asked: dict[str, _Asked] = {}

    def __bool__(self) -> bool:
        return bool(self._asked)

    def asked(
        self, request: Prompt, first: int, now: float, timeout_s: float, max_tries: int
    ) -> float:
        """The prompt asks for blocks from `first` on. Returns until when it waits.

        timeout_s, max_tries: how long, and how many remote prefills, it may wait for;
        what it was told the first time holds for all.
        """
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = _Asked(request, first, now, now + timeout_s, max_tries)
            self._asked[request.request_id] = asked
        asked.first, asked.landed, asked.outcome = first, None, None
        asked.tries += 1
        return asked.until

    def left_s(self, request_id: str, now: float) -> float | None:
        """For a prompt that asks again; None for one that has not asked."""
        asked = self._asked.get(request_id)
        return None if asked is None else asked.until - now

    def landed(self, request_id: str, blocks: int) -> None:
        """A rank has so many of them; the prompt has what all ranks have."""
        asked = self._asked.get(request_id)
        if asked is not None:
            asked.landed = blocks if asked.landed is None else min(asked.landed, blocks)

    def ended(self, request_id: str, outcome: Outcome) -> None:
        """What the ledger says of it. Its blocks are the prompt's until `lost`."""
        asked = self._asked.get(request_id)
        if asked is not None:
            asked.outcome = outcome

    def lost(self, request_id: str, cache: CacheBlocks | None, now: float) -> bool:
        """The engine is about to take the blocks back. Returns whether it may ask again."""
        asked = self._asked.get(request_id)
        if asked is None or asked.outcome is None:
            return False
        if asked.outcome is Outcome.WRITER_UNUSABLE:
            asked.tries -= 1  # another worker may not have tried at all
        verdict = again(
            asked.outcome,
            tries=asked.tries,
            max_tries=asked.max_tries,
            usable=self._usable(),
            spent_s=now - asked.since,
            left_s=asked.until - now,
        )
        blocks = asked.landed or 0
        if blocks and cache is not None:
            cache(asked.request, (asked.first + blocks) * self._size)
        logger.info(
            "request %s: %d blocks of its lost remote prefill (%s) are here; the rest: %s",
            request_id,
            blocks,
            asked.outcome.value,
            verdict,
        )
        self._stats.add(f"{RESUME}/{verdict.reason.value}")
        if isinstance(verdict, AskAgain):
            return True
        del self._asked[request_id]
        return False

    def finished(self, request_id: str) -> None:
        """Its KV came, or it is over."""
        self._asked.pop(request_id, None)
