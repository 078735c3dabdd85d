"""Whether a grant is the one that a writer needs for its job: checked once, before the first byte.

Each field is compared with what the writer knows from elsewhere: its own lease and claim, the job
from the queue, and the decode engine's metadata from the store.
"""

import enum
from dataclasses import dataclass

from dynamo_lite.protocol.grant import Grant


class GrantFault(enum.Enum):
    """What is wrong with a grant; a label of the counter."""

    #: The answer has no grant.
    MISSING = "missing"
    #: It was not made with the graph's secret, or was changed since.
    SEAL = "seal"
    #: It is of another engine, or of another incarnation of this one.
    ENGINE = "engine"
    #: It is for another attempt.
    ATTEMPT = "attempt"
    #: It was given to another worker.
    WRITER = "writer"
    #: It answers another claim of this worker.
    CLAIM = "claim"
    #: It is for other blocks than those that the job names.
    BLOCKS = "blocks"
    EXPIRED = "expired"


@dataclass(frozen=True)
class Mismatch:
    """Why a writer must not write. detail: for logs and the decode engine."""

    fault: GrantFault
    detail: str


@dataclass(frozen=True, kw_only=True)
class GrantWanted:
    """The values that the grant of a job must have. Fields as in `Grant`."""

    engine_id: str
    attempt: str
    writer_lease_id: int
    claim: int
    blocks: bytes


def check_grant(
    grant: Grant | None, wanted: GrantWanted, *, authentic: bool, elapsed_s: float
) -> Mismatch | None:
    """Returns None if the job may be written.

    authentic: whether the grant's seal holds. elapsed_s: since the claim was first sent.
    """
    if grant is None or grant.id == 0:
        return Mismatch(GrantFault.MISSING, "the answer to the claim has no grant")
    if not authentic:
        return Mismatch(GrantFault.SEAL, "its seal was not made with this graph's secret")
    for fault, said, known in (
        (GrantFault.ENGINE, grant.engine_id, wanted.engine_id),
        (GrantFault.ATTEMPT, grant.attempt, wanted.attempt),
        (GrantFault.WRITER, f"{grant.writer_lease_id:x}", f"{wanted.writer_lease_id:x}"),
        (GrantFault.CLAIM, grant.claim, wanted.claim),
    ):
        if said != known:
            return Mismatch(fault, f"it is for {fault.value} {said}, not {known}")
    if grant.blocks != wanted.blocks:
        return Mismatch(GrantFault.BLOCKS, "it is for other blocks than the job names")
    if elapsed_s >= grant.for_s:
        late = f"it came {elapsed_s:.3f} s after the claim, and holds for {grant.for_s:.3f} s"
        return Mismatch(GrantFault.EXPIRED, late)
    return None
