"""Where the blocks of some layers lie, here and in a peer's memory. Pure."""

from collections.abc import Sequence, Set

from dynamo_lite.transfer.block_map import BlockMap
from dynamo_lite.transfer.sharding import ShardMapping


class LayerMaps:
    """lanes: to the peer. devices: as a `BlockMap` has them. Maps are made when first
    asked for, and kept."""

    def __init__(self, lanes: Sequence[ShardMapping], devices: tuple[int, int]):
        self._lanes, self._devices = lanes, devices
        self.layers = frozenset(lane.local.layer for lane in lanes)
        self._maps: dict[frozenset[str], BlockMap] = {}

    def of(self, layers: Set[str]) -> BlockMap:
        """Of these layers, of which there is at least one."""
        wanted = frozenset(layers)
        found = self._maps.get(wanted)
        if found is None:
            mine = [lane for lane in self._lanes if lane.local.layer in wanted]
            found = BlockMap([(lane.local, lane.remote) for lane in mine], self._devices)
            self._maps[wanted] = found
        return found
