"""Messages between decode engines about the prefill queue: the jobs of each engine, and the
broker's count of all jobs.

Every message is complete, so the next one repairs a lost one.
"""

from enum import Enum
from typing import Annotated

import msgspec

from dynamo_lite.protocol.codec import WIRE_VERSION, Decoder
from dynamo_lite.protocol.prefill import EngineId
from dynamo_lite.protocol.records import Natural


class Lane(Enum):
    """The sub-queue of a job, in the order of service; see `policy/decision/lanes.py`."""

    URGENT = "urgent"
    SHORT = "short"
    LONG = "long"


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """The remote prefills of one decode engine. Sent on every change, and every second.

    A message of an older engine leaves out the counters that it does not know; they count as 0.
    """

    engine_id: EngineId
    #: One more than in the sender's previous message.
    number: Natural
    #: Remote prefills that no prefill worker has claimed.
    queued_jobs: Natural = 0
    #: Their tokens to compute, by lane.
    queued_tokens: dict[Lane, Natural] = {}
    #: Remote prefills that a prefill worker has claimed and whose KV is not complete here.
    claimed_jobs: Natural = 0
    claimed_tokens: Natural = 0
    #: Tokens of completed remote prefills since the engine started.
    done_tokens: Natural = 0
    #: Tokens to compute of all remote prefills that the engine has requested since it started.
    asked_tokens: Natural = 0
    #: Uncached tokens of prompts that it computed itself since it started, because the queue had no
    #: room or the wait would have been too long.
    overflow_tokens: Natural = 0
    #: Asks the other engines to send theirs.
    hello: bool = False
    #: This is the sender's last message.
    leaving: bool = False
    wire_version: int = WIRE_VERSION


decode_backlog: Decoder[Backlog] = Decoder(Backlog)


class QueueReading(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's answer to one decode engine, sent to all others."""

    engine_id: EngineId
    #: Jobs on the queue, waiting and in flight.
    jobs: Natural
    #: Which queue it was; changes when the broker has lost it and it was created again.
    identity: Annotated[str, msgspec.Meta(max_length=256)]
    #: Seconds since the engine asked.
    age_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    wire_version: int = WIRE_VERSION


decode_queue_reading: Decoder[QueueReading] = Decoder(QueueReading)
