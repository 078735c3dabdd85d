"""A NIXL agent in a process of its own, to be killed by `test_mover.py`.

Usage: nixl_peer.py writer|target. A JSON line with its metadata (base64) and
its buffer comes out first; a writer then reads the same line of its target and
writes for ever, with the notice "wrote", while a target polls for ever. NIXL
prints on the same stream: the reader skips what is not JSON.
"""

import base64
import json
import sys

import numpy as np

from dynamo_lite.transfer.nixl import NixlMover

SIZE = 1 << 20


def write_for_ever(mover: NixlMover, own: int) -> None:
    order = json.loads(sys.stdin.readline())
    mover.add_peer("target", base64.b64decode(order["agent"]))
    local = np.array([(own, order["length"], 0)], dtype=np.uint64)
    remote = np.array([(order["address"], order["length"], 0)], dtype=np.uint64)
    while True:
        under_way = mover.write("target", local, remote, memory=("DRAM", "DRAM"), notice=b"wrote")
        while not under_way.done():
            mover.notices()


def main() -> None:
    role = sys.argv[1]
    memory = np.full(SIZE, 0xA5, np.uint8)
    address = memory.__array_interface__["data"][0]
    mover = NixlMover(f"killed-{role}")
    mover.register([(address, SIZE)], "DRAM", 0)
    agent = base64.b64encode(mover.metadata()).decode()
    print(json.dumps({"agent": agent, "address": address, "length": SIZE}), flush=True)
    if role == "writer":
        write_for_ever(mover, address)
    while True:
        mover.notices()


if __name__ == "__main__":
    main()
