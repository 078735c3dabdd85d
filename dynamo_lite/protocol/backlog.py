"""Messages between decode engines about the prefill queue: what each of them has on it.

Every message has the complete state of its sender, so the next one repairs a lost one.
"""

from enum import Enum

import msgspec

from dynamo_lite.protocol.codec import WIRE_VERSION, Decoder
from dynamo_lite.protocol.prefill import EngineId
from dynamo_lite.protocol.records import Natural


class Lane(Enum):
    """Where on the queue a job waits, in the order of service; see `policy/lanes.py`."""

    URGENT = "urgent"
    SHORT = "short"
    LONG = "long"


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """The remote prefills of one decode engine. Sent on every change, and every second."""

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
    #: Asks the other engines to send theirs.
    hello: bool = False
    #: This is the sender's last message.
    leaving: bool = False
    wire_version: int = WIRE_VERSION


decode_demand: Decoder[Backlog] = Decoder(Backlog)
