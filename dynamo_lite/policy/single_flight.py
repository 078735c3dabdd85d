"""Single flight: ask for a prompt's KV, or wait for another request's that it begins with?

A follower waits until its leader's remote prefill is over, and is decided again:
then the shared prefix is in the engine's own cache, and one prefill and one
transfer served both. Waiting pays only when most of either prompt is shared: a
follower must not wait for a leader that is much longer than itself, nor for a
prefix after which most of its work is still to do.
"""

import enum
from dataclasses import dataclass

from dynamo_lite.policy.disagg import DecisionReason, Verdict

#: Whoever gets one of these would ask for a remote prefill if it could.
_LONG = (
    DecisionReason.LONG,
    DecisionReason.QUEUE_FULL,
    DecisionReason.QUEUE_TOKENS,
    DecisionReason.TOO_LATE,
)


class FlightReason(enum.Enum):
    SHARED = "shared"
    NOT_LONG = "not_long"  # the verdict does not depend on what others compute
    NOTHING_SHARED = "nothing_shared"
    SHARED_SHORT = "shared_short"  # less than is worth a wait
    MOSTLY_ITS_OWN = "mostly_its_own"  # most of the prompt would still be to do
    LEADER_LONGER = "leader_longer"  # most of the wait would be for other tokens
    WAITED = "waited"  # often enough


@dataclass(frozen=True)
class Wait:
    """Until the leader's remote prefill is over."""

    reason: FlightReason


@dataclass(frozen=True)
class GoOn:
    """With the verdict as it is."""

    reason: FlightReason


@dataclass(frozen=True)
class SingleFlightThresholds:
    """min_shared_tokens: shared uncached tokens from which on waiting pays.

    max_waits: how often one request waits at most. One leader that fails is no
    reason to give up; several in a row are.
    """

    min_shared_tokens: int
    max_waits: int = 2


def follow(
    verdict: Verdict,
    *,
    uncached_tokens: int,
    shared_tokens: int,
    leader_tokens: int,
    waits: int,
    thresholds: SingleFlightThresholds,
) -> Wait | GoOn:
    """Whether a prompt with this verdict waits for a remote prefill in flight.

    shared_tokens: of its uncached tokens those that the leader's KV will bring.
    leader_tokens: all that the leader waits for. waits: how often it has waited.
    """
    # In all other cases the prompt is short, or the leader may wait in vain as well.
    if verdict.reason not in _LONG:
        return GoOn(FlightReason.NOT_LONG)
    if shared_tokens <= 0:
        return GoOn(FlightReason.NOTHING_SHARED)
    if waits >= thresholds.max_waits:
        return GoOn(FlightReason.WAITED)
    if shared_tokens < thresholds.min_shared_tokens:
        return GoOn(FlightReason.SHARED_SHORT)
    if 2 * shared_tokens < uncached_tokens:
        return GoOn(FlightReason.MOSTLY_ITS_OWN)
    if 2 * shared_tokens < leader_tokens:
        return GoOn(FlightReason.LEADER_LONGER)
    return Wait(FlightReason.SHARED)
