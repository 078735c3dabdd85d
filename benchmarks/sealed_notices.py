"""CPU time of a KV write whose notification is authenticated with the graph's secret, and of one
whose notification is not."""

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

# NIXL reads it when it is imported.
os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

import numpy as np

from benchmarks.command import begin, parser_of, until_interrupted, write_json
from benchmarks.figures import spread
from dynamo_lite.runtime.secret import GraphSecret, new_secret
from dynamo_lite.serve.run_state import write_private
from dynamo_lite.transfer.nixl import NixlMover

_ABOUT = """\
Two NIXL agents of one process write KV from one to the other, each write with a
notification of 300 bytes, longer than that of most last writes. The notifications
are authenticated (on) or not (off), in turn within each round. The numbers are CPU
time of both agents per write, until the notification has arrived.
"""
_KIB = 1 << 10
#: Bytes of one write: a block of the tiny model, and a job of 8 MiB.
_SIZES = (32 * _KIB, 8 << 20)
_DRAM = ("DRAM", "DRAM")
_WRITE_S = 30.0
_PEER = "target"
#: Longer than most.
_NOTICE = bytes(300)


@dataclass
class Found:
    """Microseconds of CPU per write, round by round."""

    on: list[float] = field(default_factory=list[float])
    off: list[float] = field(default_factory=list[float])

    @property
    def ratios(self) -> list[float]:
        return [on / off for on, off in zip(self.on, self.off, strict=True)]

    @property
    def more(self) -> list[float]:
        return [on - off for on, off in zip(self.on, self.off, strict=True)]


class Pair:
    """A writer and a target. Both ends are closed by `close`."""

    def __init__(self, name: str, secret: GraphSecret | None):
        self._source = np.ones(max(_SIZES), np.uint8)
        self._target = np.zeros(max(_SIZES), np.uint8)
        self._writer = NixlMover(f"{name}-writer-{os.getpid()}", secret)
        self._reader = NixlMover(f"{name}-reader-{os.getpid()}", secret)
        for mover, memory in ((self._writer, self._source), (self._reader, self._target)):
            mover.register([(memory.ctypes.data, memory.nbytes)], "DRAM", 0)
        self._writer.add_peer(_PEER, self._reader.metadata())

    def close(self) -> None:
        self._writer.close()
        self._reader.close()

    def write(self, size: int) -> None:
        """Raises RuntimeError when the notification does not arrive as it was sent."""
        local = np.array([[self._source.ctypes.data, size, 0]], np.uint64)
        remote = np.array([[self._target.ctypes.data, size, 0]], np.uint64)
        transfer = self._writer.write(_PEER, local, remote, memory=_DRAM, notice=_NOTICE)
        until, ended, heard = time.monotonic() + _WRITE_S, False, list[bytes]()
        while not (ended and heard):
            ended = ended or transfer.done()
            heard += self._reader.notices()
            if time.monotonic() > until:
                raise RuntimeError("a write does not end")
        if heard != [_NOTICE]:
            raise RuntimeError(f"a notification has arrived as {heard}")


def main() -> None:
    parser = parser_of("sealed_notices", _ABOUT)
    parser.add_argument("--rounds", type=int, default=15, help="of each kind (default 15)")
    parser.add_argument("--writes", type=int, default=500, help="per round (default 500)")
    parser.add_argument("--quick", action="store_true", help="3 rounds, for trying")
    options = begin(parser)
    found = {size: Found() for size in _SIZES}
    with until_interrupted():
        measure(options, found)
    report(found)
    write_json(options.json, {size: asdict(one) for size, one in found.items()})


def measure(options: argparse.Namespace, found: dict[int, Found]) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        write_private(folder / "secret", new_secret())
        pairs = {True: Pair("on", GraphSecret(folder / "secret")), False: Pair("off", None)}
        for pair in pairs.values():
            stack.callback(pair.close)
        for number in range(3 if options.quick else options.rounds):
            for size in _SIZES:
                turns = (True, False) if number % 2 else (False, True)
                taken = {sealed: _cpu_us(pairs[sealed], size, options.writes) for sealed in turns}
                found[size].on.append(taken[True])
                found[size].off.append(taken[False])


def _cpu_us(pair: Pair, size: int, writes: int) -> float:
    began = time.process_time()
    for _ in range(writes):
        pair.write(size)
    return 1e6 * (time.process_time() - began) / writes


def report(found: dict[int, Found]) -> None:
    print("CPU per write in microseconds; median (lowest to highest)\n")
    for size, one in found.items():
        print(
            f"{size // _KIB} KiB: on {spread(one.on, 1)}, off {spread(one.off, 1)},"
            f" {spread(one.more, 1)} more, {spread(one.ratios)} x"
        )


if __name__ == "__main__":
    main()
