"""What the bridge tells the engine's thread, which takes it in each step."""

from collections import deque
from dataclasses import dataclass

from dynamo_lite.disagg.attempts.instructions import Ended, Release


@dataclass(frozen=True)
class Published:
    """The broker has confirmed the attempt's job. at: monotonic seconds."""

    attempt: str
    at: float


@dataclass(frozen=True)
class Claimed:
    """A writer holds the attempt. claim: its id. pulled_at, at: when the writer pulled the job, and
    when it claimed it, in monotonic seconds."""

    attempt: str
    claim: int
    writer: int
    pulled_at: float
    at: float


@dataclass(frozen=True)
class DoneBy:
    """This worker reports that it is done with the attempt."""

    attempt: str
    writer: int


Event = Published | Claimed | DoneBy | Release | Ended
#: Appended on the bridge's thread, taken on the engine's.
Inbox = deque[Event]
