"""What decode engines tell each other of the prefill queue: what each has on it.

Every notice is the whole truth about its sender, so one that is lost is made good by
the next.
"""

from enum import Enum

import msgspec

from dynamo_lite.protocol.codec import WIRE_VERSION, Decoder
from dynamo_lite.protocol.prefill import EngineId
from dynamo_lite.protocol.records import Natural


class Lane(Enum):
    """Where on the queue a job waits; see `policy/lanes.py`. In the order in which they go."""

    URGENT = "urgent"
    SHORT = "short"
    LONG = "long"


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """One decode engine, whenever it changed, and every second.

    number: one more than the last one's. queued_*: of remote prefills that nobody has
    claimed; tokens to compute, by lane. claimed_*: of those that a prefill worker
    holds, whose KV is not all here. done_tokens: that have come, since the engine
    started. hello: others shall tell theirs. leaving: there will be no more.
    """

    engine_id: EngineId
    number: Natural
    queued_jobs: Natural = 0
    queued_tokens: dict[Lane, Natural] = {}
    claimed_jobs: Natural = 0
    claimed_tokens: Natural = 0
    done_tokens: Natural = 0
    hello: bool = False
    leaving: bool = False
    wire_version: int = WIRE_VERSION


decode_demand: Decoder[Backlog] = Decoder(Backlog)
