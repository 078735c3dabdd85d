"""One end of a KV write between two hosts: `test_cut_off.py` runs this on each.

    python -m tests.hosts.kv_peer target | writer

The target prints its metadata and the address of its memory, and then, after each line of its
input, how many of its bytes are the writer's. The writer reads what the target has printed first,
starts to write one byte, says why these calls failed, and says when the byte is written. After the
next line of its input it writes as much as fits, until it is killed. Calls that failed are its end.
"""

import json
import sys
import threading
import time

import numpy as np

from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.transfer.nixl import NixlMover, NixlTransfer

#: More than the kernel takes of it.
_BYTES = 16 << 20
_WRITTEN = 7
_PAUSE_S = 0.002


def _say(**said: object) -> None:
    print(json.dumps(said), flush=True)  # NIXL prints lines of its own


def target() -> None:
    mover, memory = NixlMover("target"), np.zeros(_BYTES, np.uint8)
    address = memory.ctypes.data
    mover.register([(address, _BYTES)], "DRAM", 0)
    _say(metadata=mover.metadata().hex(), address=address)
    asked = threading.Event()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    while True:
        mover.notices()  # UCX makes progress in it
        if asked.is_set():
            asked.clear()
            _say(written=int(np.count_nonzero(memory == _WRITTEN)))
        time.sleep(_PAUSE_S)


def _listen(asked: threading.Event) -> None:
    for _ in sys.stdin:
        asked.set()


def writer() -> None:
    mover, memory = NixlMover("writer"), np.full(_BYTES, _WRITTEN, np.uint8)
    mover.register([(memory.ctypes.data, _BYTES)], "DRAM", 0)
    there = json.loads(sys.stdin.readline())

    def write(size: int) -> NixlTransfer:
        local, remote = (
            np.array([(address, size, 0)], np.uint64)
            for address in (memory.ctypes.data, there["address"])
        )
        return mover.write("target", local, remote, memory=("DRAM", "DRAM"))

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
    sys.stdin.readline()
    rest = write(_BYTES)
    while not rest.done():
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    {"target": target, "writer": writer}[sys.argv[1]]()
