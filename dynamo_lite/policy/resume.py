"""A remote prefill whose writer is lost: ask another one for the rest, or compute it here?

What the lost writer had finished stays, so there is less to do than at first;
whether that much is worth a remote prefill is then decided as for any prompt. Here
is decided whether another one may be asked at all.
"""

import enum
from dataclasses import dataclass

from dynamo_lite.policy.instructions import Outcome


class ResumeReason(enum.Enum):
    WRITER_LOST = "writer_lost"
    NOT_THE_WRITER = "not_the_writer"  # another one would end the same way
    TRIED = "tried"  # often enough
    NO_OTHER = "no_other"  # usable prefill worker
    LATE = "late"  # less time is left than was spent in vain


@dataclass(frozen=True)
class AskAgain:
    """Another prefill worker may be asked."""

    reason: ResumeReason


@dataclass(frozen=True)
class PrefillHere:
    """The engine computes the rest."""

    reason: ResumeReason


#: Ends that are the writer's own, and whether it may be among the usable ones.
_OF_THE_WRITER = {
    Outcome.WRITER_FAILED: True,
    Outcome.WRITER_ABANDONED: True,
    Outcome.WRITER_UNUSABLE: False,
    Outcome.WRITER_LOST: False,
    Outcome.WRITER_SILENT: False,
}


def again(
    outcome: Outcome, *, tries: int, max_tries: int, usable: int, spent_s: float, left_s: float
) -> AskAgain | PrefillHere:
    """Whether a prompt may ask once more.

    tries: how often it has; usable: prefill workers that respond and can write here, as far
    as is known; spent_s: since it asked first; left_s: until it must be done.
    """
    if outcome not in _OF_THE_WRITER:
        return PrefillHere(ResumeReason.NOT_THE_WRITER)
    if tries >= max_tries:
        return PrefillHere(ResumeReason.TRIED)
    if usable - _OF_THE_WRITER[outcome] < 1:
        return PrefillHere(ResumeReason.NO_OTHER)
    if left_s < spent_s:
        return PrefillHere(ResumeReason.LATE)
    return AskAgain(ResumeReason.WRITER_LOST)
