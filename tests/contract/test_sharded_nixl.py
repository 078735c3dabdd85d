"""Engines of several ranks and NIXL between two processes: every byte in its place.

The prefill engines are in `shard_peer.py`, the decode engines here; each rank has an
agent of its own.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from queue import Empty

import msgspec
import numpy as np
import pytest

from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.messages import DecodeStep
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.transfer.nixl import NixlMover
from tests.builders import engine_metadata, expecting
from tests.contract.peers import PeerProcess
from tests.contract.shard_peer import BLOCKS, LOCAL, reached
from tests.shards import BLOCK_TOKENS, Shape, ShardedEngine, expected_of_tokens

WAIT_S = 60.0
NUMBERS = itertools.count()
ORDERS = {True: "heads", False: "tokens"}


class Peer(PeerProcess):
    """The process with the prefill engines."""

    def engine(self, shape: Shape, heads: int) -> bytes:
        """Makes one. Returns its metadata."""
        self.tell({"shape": {**asdict(shape), "dtype": np.dtype(shape.dtype).name}, "heads": heads})
        said = self.said.get(timeout=WAIT_S)["ranks"]
        ranks = [msgspec.msgpack.decode(bytes.fromhex(r), type=RankMetadata) for r in said]
        return metadata("prefill", ranks, shape)

    def meet(self, engine_id: str, own: bytes, target: bytes, *, tokens: int) -> None:
        """Its last engine writes into this one, which has `tokens` tokens per block."""
        engines = {"own": own.hex(), "target": target.hex()}
        self.tell({"engine_id": engine_id, "tokens": tokens, **engines})


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    peer = Peer("tests.contract.shard_peer")
    yield peer
    peer.kill()


def metadata(engine_id: str, ranks: list[RankMetadata], shape: Shape) -> bytes:
    size = {"block_size_tokens": shape.tokens, "num_blocks": BLOCKS}
    return encode(engine_metadata(engine_id, ranks=tuple(ranks), **size))


@contextmanager
def decode_engine(engine_id: str, shape: Shape, heads: int) -> Iterator[ShardedEngine]:
    indices = range(shape.tensor * shape.pipeline)
    movers = {index: NixlMover(f"{engine_id}-{index}") for index in indices}
    try:
        yield ShardedEngine(shape, heads, BLOCKS, movers, truth=False)
    finally:
        for mover in movers.values():
            mover.close()


def staged_pairs() -> Iterator:
    """Blocks that differ: sizes and orders for two sizes of values, over one rank and two."""
    sizes, orders = [(32, 64), (64, 32), (32, 32)], itertools.product([True, False], repeat=2)
    for (here, there), (ours, theirs) in itertools.product(sizes, list(orders)):
        if here == there and ours == theirs:
            continue
        for dtype, name in ((np.uint8, "fp8"), (np.uint16, "bf16")):
            one = Shape(tokens=here, heads_first=ours, dtype=dtype)
            other = Shape(tokens=there, heads_first=theirs, dtype=dtype)
            words = [
                f"{n} {'heads' if h else 'tokens'}" for n, h in ((here, ours), (there, theirs))
            ]
            yield pytest.param(one, other, 4, id=f"{name}: {' to '.join(words)}")
    ours, theirs = Shape(tokens=32), Shape(tokens=64, heads_first=False)
    yield pytest.param(ours, replace(theirs, tensor=2), 4, id="TP 1 to 2, tokens, 32 to 64")
    yield pytest.param(replace(theirs, tensor=2), ours, 4, id="TP 2 to 1, heads, 64 to 32")
    yield pytest.param(ours, replace(theirs, pipeline=2), 4, id="PP 1 to 2, tokens, 32 to 64")
    yield pytest.param(replace(theirs, pipeline=2), ours, 4, id="PP 2 to 1, heads, 64 to 32")
    yield pytest.param(theirs, replace(theirs, tensor=2), 4, id="a slice of blocks of tokens")


@pytest.mark.parametrize(
    ("prefill", "decode", "heads"),
    [
        pytest.param(Shape(), Shape(tensor=2), 4, id="TP 1 to 2"),
        pytest.param(Shape(tensor=2), Shape(), 4, id="TP 2 to 1"),
        pytest.param(Shape(pipeline=2), Shape(), 4, id="PP 2 to 1"),
        pytest.param(Shape(), Shape(pipeline=2), 4, id="PP 1 to 2"),
        pytest.param(Shape(tensor=2), Shape(tensor=2, pipeline=2), 1, id="one head on all"),
        *staged_pairs(),
    ],
)
def test_every_byte_lands_in_its_place(peer, prefill, decode, heads):
    engine_id = f"decode-{next(NUMBERS)}"
    remote = reached(prefill.tokens, decode.tokens)
    tokens = [block * prefill.tokens + token for block in LOCAL for token in range(prefill.tokens)]
    own = peer.engine(prefill, heads)
    with decode_engine(engine_id, decode, heads) as target:
        ranks = [
            DecodeRank(mover, own) for mover, own in zip(target.movers, target.ranks, strict=True)
        ]
        for rank in ranks:
            rank.step(expecting({"a1": "r1"}, blocks={"a1": tuple(remote)}))
        described = metadata(engine_id, target.ranks, decode)
        peer.meet(engine_id, own, described, tokens=decode.tokens)

        received: set[int] = set()
        ended: list | None = None
        deadline = time.monotonic() + WAIT_S
        while len(received) < len(ranks) or ended is None:
            assert time.monotonic() < deadline, (received, ended)
            for index, rank in enumerate(ranks):
                rank.step(DecodeStep(poll=True))
                results = rank.results()
                assert not results.lost
                received |= {index} if results.received else set()
            try:
                ended = ended or peer.said.get(timeout=0.001)["ended"]
            except Empty:
                continue

        assert ended == [[["p-a1"], {}, {}]] * (prefill.tensor * prefill.pipeline)
        for shard in [shard for rank in target.shards for shard in rank]:
            wanted = expected_of_tokens(shard, tokens[: len(remote) * decode.tokens], remote)
            np.testing.assert_array_equal(shard.blocks, wanted)


def test_the_first_write_to_an_engine_that_has_left_breaks_the_link(peer):
    engine_id = f"decode-{next(NUMBERS)}"
    own = peer.engine(Shape(), 4)
    with decode_engine(engine_id, Shape(), 4) as target:
        described = metadata(engine_id, target.ranks, Shape())
    del target
    peer.meet(engine_id, own, described, tokens=BLOCK_TOKENS)
    ((sent, failures, broken),) = peer.said.get(timeout=WAIT_S)["ended"]
    assert sent == ["p-a1"] and broken.keys() == {engine_id}
    assert broken[engine_id].startswith(f"KV transfer with engine {engine_id}")
    assert broken[engine_id] in failures["p-a1"]
