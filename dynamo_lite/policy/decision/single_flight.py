"""Single flight: request a prompt's KV, or wait for another request's remote prefill with a shared
prefix?

A follower waits until its leader's remote prefill is over, and is then decided again. By then the
shared prefix is in the engine's own cache: one prefill and one transfer served both. Waiting pays
only if most of either prompt is shared. A follower must not wait for a much longer leader, nor for
a prefix after which most of its own work is left.
"""

import enum
from dataclasses import dataclass

from dynamo_lite.policy.decision.disagg import WANT_OF_ROOM, DecisionReason, Verdict
from dynamo_lite.protocol.options import DisaggOptions

#: Verdicts of prompts that are long enough for a remote prefill.
_LONG = WANT_OF_ROOM | {DecisionReason.LONG}
#: It waits again after one failed leader, but not after several.
_MAX_WAITS = 2


class FlightReason(enum.Enum):
    SHARED = "shared"
    NOT_LONG = "not_long"  # the verdict does not depend on other requests
    NOTHING_SHARED = "nothing_shared"
    SHARED_SHORT = "shared_short"  # too little to wait for
    MOSTLY_ITS_OWN = "mostly_its_own"  # most of the prompt would still have to be computed
    LEADER_LONGER = "leader_longer"  # most of the wait would be for tokens that it does not share
    WAITED = "waited"  # max_waits is reached


@dataclass(frozen=True)
class WaitForLeader:
    """Wait until the leader's remote prefill is over."""

    reason: FlightReason


@dataclass(frozen=True)
class GoOn:
    """Continue with the verdict as it is."""

    reason: FlightReason


def min_shared_tokens(options: DisaggOptions, block_size: int) -> int:
    """block_size: in tokens."""
    if options.single_flight_min_length is not None:
        return options.single_flight_min_length
    # A prefix that is worth a remote prefill is also worth a wait for one.
    return options.max_local_prefill_length // block_size * block_size


def follow(
    verdict: Verdict,
    *,
    uncached_tokens: int,
    shared_tokens: int,
    leader_tokens: int,
    waits: int,
    min_shared_tokens: int,
) -> WaitForLeader | GoOn:
    """Whether a prompt with this verdict waits for a remote prefill in flight.

    shared_tokens: its uncached tokens that the leader's KV will bring. leader_tokens: all tokens
    that the leader waits for. waits: how often it has waited.
    min_shared_tokens: fewer shared tokens are not worth a wait.
    """
    # In all other cases the prompt is short, or the leader's remote prefill may fail, too.
    if verdict.reason not in _LONG:
        return GoOn(FlightReason.NOT_LONG)
    if shared_tokens <= 0:
        return GoOn(FlightReason.NOTHING_SHARED)
    if waits >= _MAX_WAITS:
        return GoOn(FlightReason.WAITED)
    if shared_tokens < min_shared_tokens:
        return GoOn(FlightReason.SHARED_SHORT)
    if 2 * shared_tokens < uncached_tokens:
        return GoOn(FlightReason.MOSTLY_ITS_OWN)
    if 2 * shared_tokens < leader_tokens:
        return GoOn(FlightReason.LEADER_LONGER)
    return WaitForLeader(FlightReason.SHARED)
