"""A prefill rank's writes layer by layer, while the step computes the next layers.

These writes carry no notification. The ordinary write after the step announces its blocks:
it carries the layers that were not started before, at least one, and starts when the
writes of all other layers have ended.
"""

from collections.abc import Callable, Mapping, Sequence

from dynamo_lite.disagg.messages import BlockWrite
from dynamo_lite.disagg.prefill.outgoing import OutgoingAttempt, Ready
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRank, RemoteRanks
from dynamo_lite.transfer.block_map import BlockMap

#: Starts a write of an attempt's blocks to a peer, without a notification.
Start = Callable[[OutgoingAttempt, BlockWrite, RemoteRank, BlockMap], None]

#: Attempt, and position of the write's first block in it.
_Key = tuple[str, int]


class LayerStream:
    """attempts, peers, granted, alive: the rank's own. Does nothing until `ran` is called."""

    def __init__(
        self,
        attempts: Mapping[str, OutgoingAttempt],
        peers: RemoteRanks,
        granted: Callable[[OutgoingAttempt], bool],
        alive: Callable[[], bool],
        start: Start,
    ):
        self._attempts, self._peers, self._alive, self._start = attempts, peers, alive, start
        self._granted = granted
        self._waiting: list[tuple[BlockWrite, str, Ready]] = []
        self._begun: dict[_Key, dict[str, set[str]]] = {}

    def ran(self, writes: Sequence[BlockWrite], layer: str, ready: Ready) -> None:
        """The step has launched this layer. ready: whether its KV is in the blocks.

        writes: those of the step; the rank has opened their attempts.
        """
        self._waiting += [(write, layer, ready) for write in writes if write.local_ids]

    def pump(self) -> None:
        """Starts the layers that may start; the write after the step carries the others."""
        while self._waiting and self._waiting[0][2]():
            write, layer, _ = self._waiting.pop(0)
            attempt = self._attempts.get(write.attempt)
            if attempt is None or not self._free(attempt):
                continue
            for peer in self._peers.of(attempt.target):
                if attempt.failure is None:
                    self._start_layer(attempt, write, peer, layer)

    def begun(self, write: BlockWrite) -> bool:
        """Whether layers of the write's blocks were started before it."""
        return any(self._begun.get(_key(write), {}).values())

    def rest(self, write: BlockWrite, peer: RemoteRank) -> BlockMap:
        """The layers that the write after the step has to carry to the peer.

        Layers that still wait are among them, and are not started any more.
        """
        self._waiting = [entry for entry in self._waiting if entry[0] is not write]
        begun = self._begun.get(_key(write), {}).pop(peer.name, set())
        return peer.maps.of(peer.maps.layers - begun) if begun else peer.blocks

    def forget(self, *attempts: str) -> None:
        """Starts nothing more of these attempts; their started layers are over, or do not count."""
        self._waiting = [entry for entry in self._waiting if entry[0].attempt not in attempts]
        for key in [key for key in self._begun if key[0] in attempts]:
            del self._begun[key]

    def _free(self, attempt: OutgoingAttempt) -> bool:
        """Whether layers of the attempt may be written by themselves.

        Not while a write waits: layers of its step go with it, and later layers would delay an
        earlier step's blocks. Not with staging memory either: that takes all layers at once. Not
        before the claim was granted: the layers go with the write after the step.
        """
        if attempt.queue or attempt.failure is not None or not self._granted(attempt):
            return False
        if self._peers.layout(attempt.target) is not None:
            return False
        return attempt.target in self._peers and self._alive()

    def _start_layer(
        self, attempt: OutgoingAttempt, write: BlockWrite, peer: RemoteRank, layer: str
    ) -> None:
        begun = self._begun.setdefault(_key(write), {}).setdefault(peer.name, set())
        left = peer.maps.layers - begun
        if layer in left and len(left) > 1:
            begun.add(layer)
            self._start(attempt, write, peer, peer.maps.of({layer}))


def _key(write: BlockWrite) -> _Key:
    return write.attempt, write.first
