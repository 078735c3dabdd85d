"""The state of one request over one or several workers: which tokens the caller has got."""

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_lite.protocol.errors import WorkerLost
from dynamo_lite.protocol.generate import GenerateRequest, LogprobRows, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord

#: Finish reasons of an answer that the engine has completed.
_COMPLETE = frozenset({"stop", "length", "repetition"})


@dataclass(frozen=True, kw_only=True)
class MigrationPlan:
    """How a request continues after its worker is lost in the middle of the answer: exactly.

    Exact means: the client gets the tokens that one worker would have produced. A new worker that
    gets the tokens so far computes the same next ones only if they depend on nothing but the token
    ids. Other sampler state (a random generator, counts over the output, a grammar) is rebuilt by
    running the same request from its start and comparing the tokens that were sent already.
    """

    #: It is sent again from its start, and tokens that the client has are compared and dropped.
    #: Otherwise it is sent with the tokens so far.
    replay: bool = False
    #: Why it cannot migrate once a token was sent; empty when it can.
    stay: str = ""


class MigratingRequest:
    """Bookkeeping only: no I/O, no waiting."""

    def __init__(self, request: GenerateRequest, plan: MigrationPlan, deadline: float | None):
        self.request = request
        self.plan = plan
        #: Seconds by the event loop's clock.
        self.deadline = deadline
        #: Request id of the current attempt, submitted or running; empty while there is none.
        self.wire_id = ""
        #: How often its worker was lost and it was submitted again.
        self.moves = 0
        #: Set when the request has ended.
        self.over = False
        #: Lease ids of the worker that was lost last, and of that of the last attempt; 0: none.
        self.avoid = self.lease_id = 0
        #: Ends the request at its deadline; set by FailoverClient after acceptance.
        self.timer: asyncio.TimerHandle | None = None
        #: The task that migrates it; set by FailoverClient.
        self.migration: asyncio.Task[None] | None = None
        #: The tokens that were passed on to the caller.
        self._sent: list[int] = []
        #: How many of `_sent` the current attempt has generated, or got with its request.
        self._covered = 0
        #: Whether the prefill counts, and the log-probabilities of the prompt, were passed on.
        self._told_prefill = self._told_prompt_logprobs = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def move_kind(self) -> str:
        """How it is submitted again, if it can be: "fresh", "continue" or "replay"."""
        if not self._sent:
            return "fresh"
        return "replay" if self.plan.replay else "continue"

    @property
    def bound(self) -> str:
        """Why it cannot be migrated; empty when it can."""
        return self.plan.stay if self._sent else ""

    def attempt(self, wire_id: str, member: EndpointRecord, now: float) -> GenerateRequest:
        """Begins an attempt. Returns the request to submit to `member` at time `now`."""
        self.wire_id, self.lease_id = wire_id, member.lease_id
        changes: dict[str, Any] = {"request_id": wire_id}
        if self.moves:
            changes["moved"] = True
        if self.deadline is not None:
            changes["timeout_s"] = max(self.deadline - now, 0.0)
        if self.plan.replay:
            self._covered = 0
        else:
            self._covered = len(self._sent)
            if self._sent:
                changes["output_token_ids"] = [*self.request.output_token_ids, *self._sent]
        return msgspec.structs.replace(self.request, **changes)

    def take(self, delta: TokenDelta) -> TokenDelta | None:
        """Returns the part of the current attempt's delta that the caller has not got yet, or None.

        Raises WorkerLost when a replay differs from the tokens that were passed on.
        """
        again = min(len(self._sent) - self._covered, len(delta.token_ids))
        if self._covered < len(self._sent):
            self._compare(delta, again)
        self._sent += delta.token_ids[again:]
        self._covered += len(delta.token_ids)
        left = self._cut(delta, again)
        if left.token_ids or left.finish_reason or left.prefill or left.prompt_logprobs:
            return left
        return None

    def _compare(self, delta: TokenDelta, again: int) -> None:
        covered = self._covered + again
        ends_early = covered < len(self._sent) and delta.finish_reason in _COMPLETE
        if ends_early or delta.token_ids[:again] != self._sent[self._covered : covered]:
            raise WorkerLost(
                "its worker is gone, and the replayed answer differs from what was sent"
            )

    def _cut(self, delta: TokenDelta, again: int) -> TokenDelta:
        """Removes the first `again` tokens, and what is sent once per request."""
        changes: dict[str, Any] = {"request_id": self.request_id}
        if again:
            changes["token_ids"] = delta.token_ids[again:]
            if delta.logprobs is not None:
                changes["logprobs"] = rows_after(delta.logprobs, again)
        if delta.prefill is not None:
            if self._told_prefill:
                changes["prefill"] = None
            self._told_prefill = True
        if delta.prompt_logprobs is not None:
            if self._told_prompt_logprobs:
                changes["prompt_logprobs"] = None
            self._told_prompt_logprobs = True
        return msgspec.structs.replace(delta, **changes)


def rows_after(rows: LogprobRows, count: int) -> LogprobRows | None:
    """Returns `rows` without the first `count`, or None if none is left."""
    if rows.rows <= count:
        return None
    return rows.part(count, rows.rows)
