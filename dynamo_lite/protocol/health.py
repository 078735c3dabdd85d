"""The beat that every worker publishes, so that whoever picks one knows who can work."""

from typing import Annotated

import msgspec

from dynamo_lite.protocol.codec import WIRE_VERSION, Decoder


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, a second after its last one.

    number: grows with each beat of a process, so that a late or repeated one is
    known as such. ok: its event loop runs (or there were no beat) and its engine
    answers; detail: what is wrong otherwise.
    """

    lease_id: int
    number: Annotated[int, msgspec.Meta(ge=0)]
    ok: bool
    detail: Annotated[str, msgspec.Meta(max_length=512)] = ""
    wire_version: int = WIRE_VERSION


decode_heartbeat: Decoder[Heartbeat] = Decoder(Heartbeat)
