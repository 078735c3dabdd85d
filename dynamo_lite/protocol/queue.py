"""The prefill queue: its lanes, and what decode engines tell each other of it.

Every message is complete, so the next one repairs a lost one.
"""

from enum import Enum
from typing import Annotated

import msgspec

from dynamo_lite.protocol.codec import WIRE_VERSION, Decoder
from dynamo_lite.protocol.prefill import EngineId
from dynamo_lite.protocol.records import Natural


class Lane(Enum):
    """The sub-queue of a job, in the order of service; see `disagg/decision/lanes.py`."""

    URGENT = "urgent"
    SHORT = "short"
    LONG = "long"


class QueueReading(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's answer to one decode engine, sent to all others."""

    engine_id: EngineId
    #: Jobs on the queue, waiting and in flight.
    jobs: Natural
    #: Their tokens to compute, estimated from their size.
    tokens: Natural = 0
    #: Which queue it was; changes when the broker has lost it and it was created again.
    identity: Annotated[str, msgspec.Meta(max_length=256)]
    #: Seconds since the engine asked.
    age_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    wire_version: int = WIRE_VERSION


decode_queue_reading: Decoder[QueueReading] = Decoder(QueueReading)
