"""The grant: what a decode engine answers to the claim that it grants.

It names everything that the writer may do. So a writer can see when a grant is another worker's,
is old, or is for other blocks. Its commits name it, so the decode engine can see under which grant
blocks were written. `disagg/attempts/grants.py` has the writer's check.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.generate import Seconds
from dynamo_lite.protocol.records import LeaseId, Natural

AttemptId = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,64}\Z")]
#: Part of subjects and keys.
EngineId = Annotated[str, msgspec.Meta(pattern=rf"^{names.ENGINE_ID}\Z")]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
#: Random, of 63 bits; 0: no grant.
GrantId = Natural

_DIGEST_BYTES = 16


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """One writer may write one attempt's blocks, and read those of its prefix."""

    #: Id of the grant, in the notifications of all writes under it.
    id: GrantId
    #: The decode engine; every start of an engine has another id.
    engine_id: EngineId
    attempt: AttemptId
    #: The writer.
    writer_lease_id: LeaseId
    #: Number of the claim that was granted.
    claim: Natural
    #: `blocks_digest` of the job.
    blocks: Annotated[bytes, msgspec.Meta(max_length=_DIGEST_BYTES)]
    #: The grant ends this many seconds after its writer sent the claim, by the writer's own clock.
    #: The engine made the answer later than that, so its own deadline for the attempt is not
    #: earlier.
    for_s: Seconds
    #: Tag of `sealed_part` with the graph's secret; empty without a secret.
    seal: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


def sealed_part(grant: Grant) -> bytes:
    """The bytes that the seal covers: the grant without its seal."""
    return encode(msgspec.structs.replace(grant, seal=b""))


def blocks_digest(block_ids: Sequence[int], prefix_block_ids: Sequence[int]) -> bytes:
    """BLAKE2b (RFC 7693) of a job's blocks to write and blocks to read, in their order."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for ids in (block_ids, prefix_block_ids):
        digest.update(struct.pack(f"<I{len(ids)}I", len(ids), *ids))
    return digest.digest()
