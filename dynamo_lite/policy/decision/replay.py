"""The verdict of a past decision with other thresholds."""

import math

from dynamo_lite.policy.decision.disagg import DecisionReason, Local, QueueView, Verdict, decide
from dynamo_lite.protocol.options import DecisionThresholds

#: Independent of all thresholds.
_FIXED = (
    DecisionReason.LEAVING,
    DecisionReason.NOT_TRANSFERABLE,
    DecisionReason.CHEAPER,
    DecisionReason.CROWDED,
    DecisionReason.EXPLORED,
)


def replay(
    taken: Verdict,
    *,
    prompt_tokens: int,
    cached_tokens: int,
    queue: QueueView | None,
    thresholds: DecisionThresholds,
    now: float,
    time_left_s: float = math.inf,
) -> Verdict:
    """The arguments are those of `decide` at that time, except for the thresholds.

    The queue counts as it was seen then. That other decisions would have filled or emptied it is
    ignored.
    """
    if taken.reason in _FIXED:
        return taken
    verdict = decide(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        queue=queue,
        thresholds=thresholds,
        now=now,
        time_left_s=time_left_s,
    )
    waited = (
        taken.reason is DecisionReason.SINGLE_FLIGHT and verdict.reason is DecisionReason.CACHED
    )
    return Local(DecisionReason.SINGLE_FLIGHT) if waited else verdict
