"""After a writer is lost: request the rest from another prefill worker, or compute it here?

The blocks that the lost writer completed stay, so less is left to compute. Whether that is worth a
remote prefill is then decided as for any prompt. This module decides whether another worker may be
asked at all.
"""

import enum
from dataclasses import dataclass

from dynamo_lite.policy.attempts.instructions import Outcome


class ResumeReason(enum.Enum):
    WRITER_LOST = "writer_lost"
    NOT_THE_WRITER = "not_the_writer"  # another writer would end the same way
    TRIED = "tried"  # max_tries is reached
    NO_OTHER = "no_other"  # no other usable prefill worker
    LATE = "late"  # less time is left than was already spent


@dataclass(frozen=True)
class AskAgain:
    """Another prefill worker may be asked."""

    reason: ResumeReason


@dataclass(frozen=True)
class PrefillHere:
    """The engine computes the rest."""

    reason: ResumeReason


#: Outcomes that the writer caused.
_OF_THE_WRITER = {
    Outcome.WRITER_FAILED,
    Outcome.WRITER_ABANDONED,
    Outcome.WRITER_UNUSABLE,
    Outcome.WRITER_LOST,
    Outcome.WRITER_SILENT,
}


def again(
    outcome: Outcome, *, tries: int, max_tries: int, others: int, spent_s: float, left_s: float
) -> AskAgain | PrefillHere:
    """Whether a prompt may ask another prefill worker.

    tries: number of its remote prefills so far. others: usable prefill workers beside the writer.
    spent_s: since it asked first. left_s: until its time limit.
    """
    if outcome not in _OF_THE_WRITER:
        return PrefillHere(ResumeReason.NOT_THE_WRITER)
    if tries >= max_tries:
        return PrefillHere(ResumeReason.TRIED)
    if others < 1:
        return PrefillHere(ResumeReason.NO_OTHER)
    if left_s < spent_s:
        return PrefillHere(ResumeReason.LATE)
    return AskAgain(ResumeReason.WRITER_LOST)
