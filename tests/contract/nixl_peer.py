"""One end of NIXL writes: a `PeerProcess`, to be killed.

    python -m tests.contract.nixl_peer target | writer

It says its metadata and the address of its memory. A target says then, after each line of its
input, how many of its bytes are the writer's. A writer reads what a target has said first, starts
to write one byte, says why these calls failed, and says when the byte is written. After the next
line of its input it writes that many bytes, with the notice "wrote", again and again, until it is
killed. Calls that failed are its end.
"""

import json
import sys
import threading
import time
from typing import Any

import numpy as np

from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.transfer.nixl import NixlMover, NixlTransfer

#: More than a kernel takes of it.
SIZE = 16 << 20
WRITTEN = 0xA5
_PAUSE_S = 0.002


def _say(**said: object) -> None:
    print(json.dumps(said), flush=True)  # NIXL prints lines of its own


def _hear() -> dict[str, Any]:
    return json.loads(sys.stdin.readline())


def target(mover: NixlMover, memory: np.ndarray) -> None:
    asked = threading.Event()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    while True:
        mover.notices()  # UCX makes progress in it
        if asked.is_set():
            asked.clear()
            _say(written=int(np.count_nonzero(memory == WRITTEN)))
        time.sleep(_PAUSE_S)


def _listen(asked: threading.Event) -> None:
    for _ in sys.stdin:
        asked.set()


def writer(mover: NixlMover, memory: np.ndarray) -> None:
    memory[:] = WRITTEN
    there = _hear()

    def write(size: int, notice: bytes = b"") -> NixlTransfer:
        local, remote = (
            np.array([(address, size, 0)], np.uint64)
            for address in (memory.ctypes.data, there["address"])
        )
        return mover.write("target", local, remote, memory=("DRAM", "DRAM"), notice=notice)

    try:
        mover.add_peer("target", bytes.fromhex(there["metadata"]))
        first = write(1)
    except TransferError as exc:
        _say(failed=str(exc))
        return
    _say(failed="")
    while not first.done():
        time.sleep(_PAUSE_S)
    _say(connected=True)
    size = _hear()["size"]
    while True:
        under_way = write(size, b"wrote")
        while not under_way.done():
            mover.notices()


def main() -> None:
    role = sys.argv[1]
    mover, memory = NixlMover(role), np.zeros(SIZE, np.uint8)
    mover.register([(memory.ctypes.data, SIZE)], "DRAM", 0)
    _say(metadata=mover.metadata().hex(), address=memory.ctypes.data)
    {"target": target, "writer": writer}[role](mover, memory)


if __name__ == "__main__":
    main()
