"""The heartbeat of every worker. Its readers learn which workers respond."""

from typing import Annotated

import msgspec

from dynamo_lite.protocol.codec import WIRE_VERSION, Decoder


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, one second after its previous heartbeat."""

    lease_id: int
    #: Grows with each heartbeat of a process, so that late or repeated ones are detected.
    number: Annotated[int, msgspec.Meta(ge=0)]
    #: Whether the engine answers. (That the event loop runs is shown by the heartbeat itself.)
    ok: bool
    #: What is wrong if not ok.
    detail: Annotated[str, msgspec.Meta(max_length=512)] = ""
    wire_version: int = WIRE_VERSION


decode_heartbeat: Decoder[Heartbeat] = Decoder(Heartbeat)
