"""A prefill engine in a process of its own, for `test_sharded_nixl.py`: all its ranks.

Usage: python -m tests.contract.shard_peer. For each line with a shape it makes an engine,
prints its ranks' metadata (msgpack, in hexadecimal digits) and reads those of both engines.
Then it writes one attempt in two steps and says how that ended, by rank. NIXL prints on the
same stream: the reader skips what is not JSON.
"""

import json
import sys
from collections.abc import Sequence

import numpy as np

from dynamo_lite.disagg.messages import PrefillStep, WorkerReport
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.protocol.codec import encode
from dynamo_lite.transfer.nixl import NixlMover
from tests.builders import always_held, block_write
from tests.shards import Shape, ShardedEngine

BLOCKS = 8
#: Blocks of the attempt, at its writer and at its reader: runs, and jumps on either side.
LOCAL, REMOTE = [5, 6, 1, 2, 3], [0, 1, 4, 6, 7]


def reached(own_tokens: int, tokens: int) -> list[int]:
    """The reader's blocks that those of the writer fill, the last one perhaps in part."""
    return REMOTE[: -(-len(LOCAL) * own_tokens // tokens)]


def write(
    ranks: Sequence[PrefillRank], own: bytes, engine_id: str, target: bytes, sizes: tuple[int, int]
) -> list[object]:
    """By rank: the requests that it reports as sent, the failures, and the links that broke.

    sizes: of blocks here and there, in tokens.
    """
    here, there = sizes
    remote = reached(here, there)
    local = LOCAL[: -(-len(remote) * there // here)]
    half = 2
    for first, end in ((0, half), (half, len(remote))):
        last = end == len(remote)
        start, skip = divmod(first * there, here)
        write = block_write(
            "a1",
            local[start : -(-end * there // here)],
            remote[first:end],
            target_engine=engine_id,
            last=last,
            num_blocks=len(remote),
            first=first,
            skip_tokens=skip,
        )
        ended = [("p-a1", True)] if last else []
        step = PrefillStep(writes=[write], targets={engine_id: target}, own=own, ended=ended)
        for rank in ranks:
            rank.step(step, lambda: True)
    sent: list[list[str]] = [[] for _ in ranks]
    while not all(sent):
        for index, rank in enumerate(ranks):
            sent[index] += rank.results().sent
    reports = [rank.report() or WorkerReport() for rank in ranks]
    return [
        [said, report.failures, report.broken] for said, report in zip(sent, reports, strict=True)
    ]


def hear() -> dict:
    return json.loads(sys.stdin.readline() or "{}")


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    engines: list[ShardedEngine] = []  # they stay: a commit may leave after its write was seen
    while order := hear():
        shape = Shape(**{**order["shape"], "dtype": np.dtype(order["shape"]["dtype"]).type})
        indices = range(shape.tensor * shape.pipeline)
        movers = {index: NixlMover(f"prefill-{len(engines)}-{index}") for index in indices}
        engine = ShardedEngine(shape, order["heads"], BLOCKS, movers, truth=True)
        engines.append(engine)
        ranks = [
            PrefillRank(
                movers[index],
                engine.ranks[index],
                index,
                always_held,
                open_transposer=engine.transposer(index),
            )
            for index in indices
        ]
        say(ranks=[encode(own).hex() for own in engine.ranks])
        told = hear()
        own, target = (bytes.fromhex(told[name]) for name in ("own", "target"))
        tokens = (shape.tokens, told["tokens"])
        say(ended=write(ranks, own, told["engine_id"], target, tokens))


if __name__ == "__main__":
    main()
