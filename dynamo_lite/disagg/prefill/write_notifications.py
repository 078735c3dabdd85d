"""The notifications that a prefill rank's writes carry to decode ranks."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_lite.disagg.messages import BlockWrite
from dynamo_lite.disagg.prefill.outgoing import OutgoingAttempt
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRank
from dynamo_lite.disagg.prefill.staging import Staging, StagingSlot
from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.protocol.prefill import Committed, Landed
from dynamo_lite.transfer.digest import ReadMemory, checksum, sample


@dataclass(frozen=True)
class WriteNotifications:
    """Makes notifications with checksums of sampled blocks."""

    #: Index of the writing rank.
    rank: int
    #: Share of an attempt's blocks that have a checksum.
    checksum_rate: float
    #: Reads the rank's blocks.
    read: ReadMemory
    staging: Staging

    def of(self, write: BlockWrite, peer: RemoteRank, attempt: OutgoingAttempt) -> bytes:
        """The notification of a write that starts now. Writes to one peer come in order."""
        if attempt.slot is None:
            share = self._direct(write, peer, attempt.local_ids)
        else:
            share = self._staged(write, peer, attempt.slot, attempt.checksums)
        share["grant"] = attempt.grant
        if write.last:
            return encode_sealed(Committed(**share))
        return encode_sealed(Landed(first=write.first, **share))

    def _direct(
        self, write: BlockWrite, peer: RemoteRank, local_ids: Mapping[int, int]
    ) -> dict[str, Any]:
        """The part without staging. The last notification covers the whole attempt, because all
        its blocks are still held.

        local_ids: by position in the attempt.
        """
        sampled = self._sampled(write, whole=write.last)
        blocks = [local_ids[position] for position in sampled]
        value = checksum([lane.local for lane in peer.lanes], blocks, self.read)
        return self._share(write, peer, sampled, value)

    def _staged(
        self,
        write: BlockWrite,
        peer: RemoteRank,
        slot: StagingSlot,
        checksums: MutableMapping[str, int],
    ) -> dict[str, Any]:
        """The part with staging: the checksum covers the staged bytes. The bytes of earlier writes
        are gone by now.

        checksums: by peer, the checksum of the attempt's writes before this one.
        """
        regions = [
            msgspec.structs.replace(region, base=region.base + slot.address)
            for region in peer.slot_regions
        ]
        blocks = [position - write.first for position in self._sampled(write, whole=False)]
        before = checksums.get(peer.name, 0) if write.first else 0
        checksums[peer.name] = checksum(regions, blocks, self.staging.read, before)
        if write.last:
            return self._share(write, peer, self._sampled(write, whole=True), checksums[peer.name])
        value = checksum(regions, blocks, self.staging.read)
        return self._share(write, peer, self._sampled(write, whole=False), value)

    def _sampled(self, write: BlockWrite, *, whole: bool) -> list[int]:
        positions = sample(write.attempt, write.num_blocks, self.checksum_rate)
        end = write.first + len(write.remote_ids)
        return [p for p in positions if whole or write.first <= p < end]

    def _share(
        self, write: BlockWrite, peer: RemoteRank, sampled: list[int], value: int
    ) -> dict[str, Any]:
        """The fields of a notification about this rank's part of the blocks."""
        return {
            "attempt": write.attempt,
            "rank": self.rank,
            "num_blocks": write.num_blocks if write.last else len(write.remote_ids),
            "sampled": sampled,
            "checksum": value,
            "writers": peer.writers,
            "parts": peer.parts,
        }
