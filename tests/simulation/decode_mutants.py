"""Decode workers without one of their safeguards, which the simulation must detect."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dynamo_lite.disagg.attempts.attempt import Attempt, AttemptState, Refusal, Terms
from dynamo_lite.disagg.attempts.instructions import Hold, Instruction, Outcome
from dynamo_lite.disagg.attempts.ledger import Ledger
from dynamo_lite.disagg.decode.engine_events import EngineEvents
from dynamo_lite.disagg.decode.first_tokens import FirstTokens
from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.protocol.prefill import decode_notice
from tests.simulation.shipped import Mutant, Shipped


class _NoClaim(Ledger):
    """A writer's claim is granted and not recorded."""

    def claim(
        self, attempt: str, writer_lease_id: int, now: float, number: int = 0, grant: int = 0
    ) -> Refusal | None:
        return None

    def granted(self, attempt: str, now: float) -> Terms:
        entry = self._attempts.get(attempt)
        return Terms(1, b"" if entry is None else entry.offered, 60.0)


class _NoQuarantine(Ledger):
    """Blocks of a withdrawn attempt are free at once, although its writer may still write."""

    def _withdraw(self, entry: Attempt, outcome: Outcome, detail: str = "") -> list[Instruction]:
        entry.writer_done = True
        return super()._withdraw(entry, outcome, detail)


class _NoPrefixHoldEvents(EngineEvents):
    def _carry_out_here(self, instructions: Iterable[Instruction]) -> None:
        super()._carry_out_here([self._less(one) for one in instructions])

    def _less(self, instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Hold):
            return instruction
        blocks = [self._pool.blocks[i] for i in instruction.block_ids]
        return Hold(instruction.attempt, tuple(b.block_id for b in blocks if b.key is None))


class _NoPrefixHold(DecodeScheduler):
    """The blocks of a withdrawn attempt that its writer may only read are free at once."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._events.__class__ = _NoPrefixHoldEvents


class _TakesBackClaimed(Ledger):
    """An engine also takes back what a writer has claimed, as if it were queued."""

    def tick(self, now: float) -> list[Instruction]:
        for entry in self._by_request.values():
            if now - entry.queued_at >= entry.max_queue_wait_s:
                entry.state = AttemptState.QUEUED
        return super().tick(now)


class _UngrantedCommits(DecodeRank):
    """A decode engine accepts each commit, whatever grant it names."""

    def _add_notice(self, payload: bytes) -> None:
        notice = decode_notice(payload)
        awaited = self._awaited.get(notice.attempt)
        if awaited is not None and awaited.notices.grant is not None:
            notice = msgspec.structs.replace(notice, grant=awaited.notices.grant)
        super()._add_notice(encode_sealed(notice))


class _NoAttemptId(DecodeScheduler):
    """A remote prefill has the caller's request id, also when the request is retried."""

    def state_after_alloc(self, request: Prompt, block_ids: Sequence[int], external: int) -> None:
        self._prompts._jobs._new_attempt = lambda: request.request_id.partition("~")[0]
        super().state_after_alloc(request, block_ids, external)


class _NoDeadline(Ledger):
    """A decode engine waits for remote KV without a timeout."""

    def allocated(
        self,
        request_id: str,
        attempt: str,
        block_ids: tuple[int, ...],
        deadline: float,
        **limits: float,
    ) -> None:
        super().allocated(request_id, attempt, block_ids, math.inf, **limits)


class _FirstTokenTwice(FirstTokens):
    """The decode engine's first token is sent, also when the client has the prefill worker's."""

    def settle(self, own: str, delta: TokenDelta) -> TokenDelta:
        super().settle(own, delta)
        return delta


#: By the name that the command line takes.
DECODE_MUTANTS: dict[str, Mutant] = {
    "no-claim": Mutant("which is not the attempt's", Shipped(ledger=_NoClaim)),
    "no-quarantine": Mutant("which is not the attempt's", Shipped(ledger=_NoQuarantine)),
    "no-prefix-hold": Mutant("which is not kept for", Shipped(decode_scheduler=_NoPrefixHold)),
    "takes-back-claimed": Mutant("which is not the attempt's", Shipped(ledger=_TakesBackClaimed)),
    "ungranted-commits": Mutant("is wrong", Shipped(decode_rank=_UngrantedCommits)),
    "no-attempt-id": Mutant("are taken", Shipped(decode_scheduler=_NoAttemptId)),
    "no-deadline": Mutant("still waits for remote KV", Shipped(ledger=_NoDeadline)),
    "first-token-twice": Mutant("tokens instead of", Shipped(first_tokens=_FirstTokenTwice)),
}
