"""A prefill rank's writes layer by layer, while the step computes the next layers.

These writes say nothing in the decode rank. What speaks for a step's blocks is the
ordinary write after the step: it brings the layers that are not on their way yet, at
least one, and starts when all the others have ended.
"""

from collections.abc import Callable, Mapping, Sequence

from dynamo_lite.disagg.messages import BlockWrite
from dynamo_lite.disagg.prefill.outgoing import OutgoingAttempt, Ready
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRank, RemoteRanks
from dynamo_lite.transfer.block_map import BlockMap

#: Starts to bring blocks of an attempt to a peer, without a notice.
Start = Callable[[OutgoingAttempt, BlockWrite, RemoteRank, BlockMap], None]

#: Attempt, and the first of its blocks that the write brings.
_Key = tuple[str, int]


class LayerStream:
    """attempts, peers, alive: the rank's. Does nothing until `ran` is called."""

    def __init__(
        self,
        attempts: Mapping[str, OutgoingAttempt],
        peers: RemoteRanks,
        alive: Callable[[], bool],
        start: Start,
    ):
        self._attempts, self._peers, self._alive, self._start = attempts, peers, alive, start
        self._waiting: list[tuple[BlockWrite, str, Ready]] = []
        self._begun: dict[_Key, dict[str, set[str]]] = {}

    def ran(self, writes: Sequence[BlockWrite], layer: str, ready: Ready) -> None:
        """The step has run this layer; ready: whether the blocks really hold its KV.

        writes: of the step; the attempts know them.
        """
        self._waiting += [(write, layer, ready) for write in writes if write.local_ids]

    def pump(self) -> None:
        """Starts what may start. What may not is left to the write after the step."""
        while self._waiting and self._waiting[0][2]():
            write, layer, _ = self._waiting.pop(0)
            attempt = self._attempts.get(write.attempt)
            if attempt is None or not self._free(attempt):
                continue
            for peer in self._peers.of(attempt.target):
                if attempt.failure is None:
                    self._begin(attempt, write, peer, layer)

    def begun(self, write: BlockWrite) -> bool:
        """Whether layers of its blocks were started before it."""
        return any(self._begun.get(_key(write), {}).values())

    def rest(self, write: BlockWrite, peer: RemoteRank) -> BlockMap:
        """What the write after the step still has to bring to the peer.

        Its layers that wait are among it, and start no more.
        """
        self._waiting = [entry for entry in self._waiting if entry[0] is not write]
        begun = self._begun.get(_key(write), {}).pop(peer.name, set())
        return peer.maps.of(peer.maps.layers - begun) if begun else peer.blocks

    def forget(self, *attempts: str) -> None:
        """Nothing more of them is started, and what was is void, or over."""
        self._waiting = [entry for entry in self._waiting if entry[0].attempt not in attempts]
        for key in [key for key in self._begun if key[0] in attempts]:
            del self._begun[key]

    def _free(self, attempt: OutgoingAttempt) -> bool:
        """Whether layers of it may go by themselves. Not where a write waits: after their step
        they go with that one, and before an earlier step's blocks they would hold those up.
        Nor where blocks are put together in staging memory, all layers at once."""
        if attempt.queue or attempt.failure is not None:
            return False
        if self._peers.layout(attempt.target) is not None:
            return False
        return attempt.target in self._peers and self._alive()

    def _begin(
        self, attempt: OutgoingAttempt, write: BlockWrite, peer: RemoteRank, layer: str
    ) -> None:
        begun = self._begun.setdefault(_key(write), {}).setdefault(peer.name, set())
        left = peer.maps.layers - begun
        if layer in left and len(left) > 1:
            begun.add(layer)
            self._start(attempt, write, peer, peer.maps.of({layer}))


def _key(write: BlockWrite) -> _Key:
    return write.attempt, write.first
