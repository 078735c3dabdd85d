"""Who may write into whom, before anything is computed."""

import re

import pytest

from dynamo_lite.engine.vllm.fingerprint import check_peer
from dynamo_lite.protocol.errors import IncompatiblePeer
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.transfer.memory import MemoryFabric, MemoryMover
from tests.shards import Shape, ShardedEngine

ONE = Shape()
SAME = {"model": "tiny", "block_size": "32", "kv_layout": "heads of [32, 64]/[64, 1]"}


def engine(name: str, shape: Shape = ONE, **changed: str) -> EngineMetadata:
    fabric = MemoryFabric()
    ranks = range(shape.tensor * shape.pipeline)
    movers = {rank: MemoryMover(fabric, f"{name}{rank}") for rank in ranks}
    return EngineMetadata(
        engine_id=name,
        lease_id=1,
        fingerprint={**SAME, **changed},
        block_size_tokens=32,
        num_blocks=4,
        ranks=tuple(ShardedEngine(shape, 4, 4, movers, truth=False).ranks),
    )


@pytest.mark.parametrize("shape", [Shape(tensor=2), Shape(tensor=4), Shape(pipeline=2)])
def test_engines_may_differ_in_how_they_are_spread(shape):
    check_peer(engine("p", shape), engine("d"))
    check_peer(engine("p"), engine("d", shape))


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("model", "other"), ("block_size", "64"), ("kv_layout", "[32, 4 heads, 64]/[256, 64, 1]")],
)
def test_a_difference_is_named_with_both_values(name, theirs):
    words = f"{name}: {SAME[name]!r} here, {theirs!r} there"
    with pytest.raises(IncompatiblePeer, match=re.escape(words)):
        check_peer(engine("p"), engine("d", **{name: theirs}))


def test_ranks_that_do_not_fit_are_refused_with_what_each_side_has():
    mine, theirs = Shape(heads_first=False), Shape(tensor=2, heads_first=False)
    with pytest.raises(IncompatiblePeer, match=r"its rank 0 \(.*cannot be cut.*here \(rank 0"):
        check_peer(engine("p", mine), engine("d", theirs))
