"""One request on its way over one worker or several: what has been sent on of it."""

import asyncio
from typing import Any

import msgspec

from dynamo_lite.policy.migration import Plan, Replay, Stay
from dynamo_lite.protocol.errors import WorkerLost
from dynamo_lite.protocol.generate import GenerateRequest, LogprobRows, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord

#: Endings that say that the engine has nothing more to give.
_COMPLETE = frozenset({"stop", "length", "repetition"})


class MigratingRequest:
    """Bookkeeping only: it sends nothing and waits for nothing.

    deadline: by the event loop's clock. wire_id: the request id of the attempt
    that is being sent or runs; empty while there is none. `wake` is set when
    whoever waits to send it should look again. avoid: the lease id of the worker
    that lost it last.
    """

    def __init__(self, request: GenerateRequest, plan: Plan, deadline: float | None):
        self.request = request
        self.plan = plan
        self.deadline = deadline
        self.wire_id = ""
        self.moves = 0
        self.over = False
        self.avoid = -1
        self.member: EndpointRecord | None = None
        self.wake = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None
        self.mover: asyncio.Task[None] | None = None
        self._sent: list[int] = []
        # How many of the tokens sent on the current attempt has given, or was given.
        self._covered = 0
        self._told_prefill = False
        # Likewise, of the rows about the prompt.
        self._prompt_rows_told = 0
        self._prompt_rows_covered = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def move_kind(self) -> str:
        """What sending it again means: "fresh", "continue", "replay" or "stay"."""
        return type(self.plan).__name__.lower() if self._sent else "fresh"

    @property
    def bound(self) -> str | None:
        """Why it cannot go on elsewhere; None when it can."""
        return self.plan.reason if self._sent and isinstance(self.plan, Stay) else None

    def is_at(self, moves: int) -> bool:
        """Whether it still needs the worker that was looked for when it had `moves` moves."""
        return not self.over and self.moves == moves

    def attempt(self, wire_id: str, member: EndpointRecord, now: float) -> GenerateRequest:
        """Begins an attempt: the request as `member` shall get it at time `now`."""
        self.wire_id, self.member = wire_id, member
        self._prompt_rows_covered = 0
        changes: dict[str, Any] = {}
        if wire_id != self.request_id:
            changes["request_id"] = wire_id
        if self.moves:
            changes["moved"] = True
        if self.deadline is not None:
            changes["timeout_s"] = max(self.deadline - now, 0.0)
        if isinstance(self.plan, Replay):
            self._covered = 0
        else:
            self._covered = len(self._sent)
            if self._sent:
                changes["output_token_ids"] = [*self.request.output_token_ids, *self._sent]
        return msgspec.structs.replace(self.request, **changes) if changes else self.request

    def take(self, delta: TokenDelta) -> TokenDelta | None:
        """What of the current attempt's delta is to be sent on; None when nothing is.

        Raises WorkerLost when a repetition does not repeat what was sent on.
        """
        again = min(len(self._sent) - self._covered, len(delta.token_ids))
        if again:
            self._compare(delta, again)
        elif self._covered < len(self._sent) and delta.finish_reason in _COMPLETE:
            raise self._differs()
        self._sent += delta.token_ids[again:]
        self._covered += len(delta.token_ids)
        if again and again == len(delta.token_ids) and delta.finish_reason is None:
            return None
        cut = self._cut(delta, again)
        return None if cut is not delta and _says_nothing(cut) else cut

    def _compare(self, delta: TokenDelta, again: int) -> None:
        covered = self._covered + again
        ends_early = covered < len(self._sent) and delta.finish_reason in _COMPLETE
        if ends_early or delta.token_ids[:again] != self._sent[self._covered : covered]:
            raise self._differs()

    def _differs(self) -> WorkerLost:
        return WorkerLost("its worker is gone, and the answer could not be repeated exactly")

    def _cut(self, delta: TokenDelta, again: int) -> TokenDelta:
        """Without its first `again` tokens, and without what is said once per request."""
        changes: dict[str, Any] = {}
        if delta.request_id != self.request_id:
            changes["request_id"] = self.request_id
        if again:
            changes["token_ids"] = delta.token_ids[again:]
            if delta.logprobs is not None:
                changes["logprobs"] = rows_after(delta.logprobs, again)
        if delta.prefill is not None:
            if self._told_prefill:
                changes["prefill"] = None
            self._told_prefill = True
        if (rows := delta.prompt_logprobs) is not None:
            told = min(self._prompt_rows_told - self._prompt_rows_covered, rows.rows)
            if told:
                changes["prompt_logprobs"] = rows_after(rows, told)
            self._prompt_rows_covered += rows.rows
            self._prompt_rows_told = max(self._prompt_rows_told, self._prompt_rows_covered)
        return msgspec.structs.replace(delta, **changes) if changes else delta


def _says_nothing(delta: TokenDelta) -> bool:
    said = delta.token_ids or delta.finish_reason or delta.prefill or delta.prompt_logprobs
    return not said


def rows_after(rows: LogprobRows, count: int) -> LogprobRows | None:
    """Without the first `count` rows; None when none is left."""
    if rows.rows <= count:
        return None
    return rows.part(count, rows.rows)
