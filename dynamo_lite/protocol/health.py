"""What workers say of themselves: heartbeats to all, and an engine's status to its component."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from dynamo_lite.protocol.codec import Decoder
from dynamo_lite.protocol.records import EngineMetadata, LeaseId


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, one second after its previous heartbeat."""

    lease_id: int
    #: Grows with each heartbeat of a process, so that late or repeated ones are detected.
    number: Annotated[int, msgspec.Meta(ge=0)]
    #: Whether the engine answers. (That the event loop runs is shown by the heartbeat itself.)
    ok: bool
    #: What is wrong if not ok.
    detail: Annotated[str, msgspec.Meta(max_length=512)] = ""


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """Decode worker to its own engine: stop asking for remote prefills."""

    lease_id: LeaseId


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer to `describe`."""

    metadata: EngineMetadata
    #: Blocks of its KV pool. Prefix-cached blocks that no request uses count as free.
    free_blocks: int
    total_blocks: int
    #: Requests that wait for remote KV, and the tokens that prefill workers compute for them.
    waiting: int = 0
    waiting_tokens: int = 0
    #: Withdrawn attempts whose blocks are not reused because a writer may still write.
    quarantined: int = 0
    #: Jobs on the prefill queue as this engine last saw it, and their tokens; None if that was too
    #: long ago.
    queue_jobs: int | None = None
    queue_tokens: int | None = None
    #: Seconds since its scheduler began its last step.
    last_step_age_s: float | None = None
    #: Prefill workers that are registered but unresponsive or unhealthy.
    unresponsive_writers: int = 0
    #: Prefill workers that respond, but whose link to this engine has failed.
    unusable_writers: int = 0
    #: Leases of the prefill workers that may still write into its blocks: they hold the claim of an
    #: attempt that is not over.
    writers: list[LeaseId] = []


def joined(statuses: Sequence[EngineStatus]) -> EngineStatus:
    """The status of an engine with several data-parallel ranks; the metadata are the first's.

    statuses: one for each rank. Ranks see the same queue and the same writers.
    """
    first, ages = statuses[0], [s.last_step_age_s for s in statuses]
    return msgspec.structs.replace(
        first,
        free_blocks=sum(s.free_blocks for s in statuses),
        total_blocks=sum(s.total_blocks for s in statuses),
        waiting=sum(s.waiting for s in statuses),
        waiting_tokens=sum(s.waiting_tokens for s in statuses),
        quarantined=sum(s.quarantined for s in statuses),
        last_step_age_s=min((age for age in ages if age is not None), default=None),
        unresponsive_writers=max(s.unresponsive_writers for s in statuses),
        unusable_writers=max(s.unusable_writers for s in statuses),
        writers=sorted({lease for s in statuses for lease in s.writers}),
    )


decode_heartbeat: Decoder[Heartbeat] = Decoder(Heartbeat)
decode_leave: Decoder[Leave] = Decoder(Leave)
decode_engine_status: Decoder[EngineStatus] = Decoder(EngineStatus)
