"""Engines of several ranks and NIXL between two processes: every byte in its place.

The prefill engines are in `shard_peer.py`, the decode engines here; each rank has an
agent of its own.
"""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec
import numpy as np
import pytest

from dynamo_lite.engine.remote_prefill.decode_rank import DecodeRank
from dynamo_lite.engine.remote_prefill.messages import DecodeStep
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.records import EngineMetadata, RankMetadata
from dynamo_lite.transfer.nixl import NixlMover
from tests.contract.shard_peer import BLOCKS, LOCAL, REMOTE
from tests.shards import BLOCK_TOKENS, Shape, ShardedEngine, expected

WAIT_S = 60.0
ROOT = Path(__file__).parents[2]
NUMBERS = itertools.count()


class Peer:
    """The process with the prefill engines. said: what it says, as it comes."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.shard_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        self.said: SimpleQueue[dict] = SimpleQueue()
        self._reader = threading.Thread(target=self._listen, name="shard-reader")
        self._reader.start()

    def tell(self, **what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def engine(self, shape: Shape, heads: int) -> bytes:
        """Makes one. Returns its metadata."""
        self.tell(tensor=shape.tensor, pipeline=shape.pipeline, heads=heads)
        said = self.said.get(timeout=WAIT_S)["ranks"]
        ranks = [msgspec.msgpack.decode(bytes.fromhex(r), type=RankMetadata) for r in said]
        return metadata("prefill", ranks)

    def end(self) -> None:
        with self._process:
            self._process.kill()
            self._reader.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.said.put(json.loads(line))


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.end()


def metadata(engine_id: str, ranks: list[RankMetadata]) -> bytes:
    return encode(
        EngineMetadata(
            engine_id=engine_id,
            lease_id=1,
            fingerprint={},
            block_size_tokens=BLOCK_TOKENS,
            num_blocks=BLOCKS,
            ranks=tuple(ranks),
        )
    )


@contextmanager
def decode_engine(engine_id: str, shape: Shape, heads: int) -> Iterator[ShardedEngine]:
    indices = range(shape.tensor * shape.pipeline)
    movers = {index: NixlMover(f"{engine_id}-{index}") for index in indices}
    try:
        yield ShardedEngine(shape, heads, BLOCKS, movers, truth=False)
    finally:
        for mover in movers.values():
            mover.close()


@pytest.mark.parametrize(
    ("prefill", "decode", "heads"),
    [
        pytest.param(Shape(), Shape(tensor=2), 4, id="TP 1 to 2"),
        pytest.param(Shape(tensor=2), Shape(), 4, id="TP 2 to 1"),
        pytest.param(Shape(pipeline=2), Shape(), 4, id="PP 2 to 1"),
        pytest.param(Shape(), Shape(pipeline=2), 4, id="PP 1 to 2"),
        pytest.param(Shape(tensor=2), Shape(tensor=2, pipeline=2), 1, id="one head on all"),
    ],
)
def test_every_byte_lands_in_its_place(peer, prefill, decode, heads):
    engine_id = f"decode-{next(NUMBERS)}"
    own = peer.engine(prefill, heads)
    with decode_engine(engine_id, decode, heads) as target:
        ranks = [
            DecodeRank(mover, own) for mover, own in zip(target.movers, target.ranks, strict=True)
        ]
        for rank in ranks:
            rank.step(DecodeStep(expect={"a1": "r1"}, blocks={"a1": tuple(REMOTE)}))
        described = metadata(engine_id, target.ranks)
        peer.tell(engine_id=engine_id, own=own.hex(), target=described.hex())

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

        assert ended == [[["p-a1"], {}]] * (prefill.tensor * prefill.pipeline)
        for shard in [shard for rank in target.shards for shard in rank]:
            np.testing.assert_array_equal(shard.blocks, expected(shard, LOCAL, REMOTE))
