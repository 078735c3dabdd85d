"""CPU time of one frame between a worker and a Frontend, over TLS and without."""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.command import begin, parser_of, write_json
from benchmarks.figures import spread
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.serve.certificate_folder import make_certificates

_ABOUT = """\
One process sends frames to another on the processes' own event loop: one for each step,
the steps following one another, or one each --step-ms, as a model would. The numbers are
CPU time of each process, all that a turn of its event loop costs included.
"""
#: Bytes of a step with a few requests, and of one with many.
_SIZES = (150, 4000)
_START_S = 30.0
_NAMESPACE = "bench"

#: Microseconds of sender and receiver.
Costs = tuple[float, float]


def main() -> None:
    parser = parser_of("tls_frames", _ABOUT)
    parser.add_argument("--rounds", type=int, default=7, help="of each kind (default 7)")
    parser.add_argument("--frames", type=int, default=10_000, help="per round (default 10000)")
    parser.add_argument("--step-ms", type=float, default=4.0, help="engine step (default 4)")
    options = begin(parser)
    with tempfile.TemporaryDirectory(prefix="dynamo-lite-bench-") as folder:
        make_certificates(Path(folder), _NAMESPACE, ("VllmWorker", "Frontend"))
        found = measure(options, Path(folder))
    report(found)
    write_json(options.json, [{"kind": kind, "costs": costs} for kind, costs in found.items()])


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[bool, list[Costs]]]:
    """By kind of steps, and by whether there is TLS."""
    found: dict[str, dict[bool, list[Costs]]] = {}
    paced = max(1, options.frames // 20)
    for size in _SIZES:
        for title, frames, pause_s in (
            ("back to back", options.frames, 0.0),
            (f"each {options.step_ms:g} ms", paced, options.step_ms / 1000),
        ):
            rounds: dict[bool, list[Costs]] = {True: [], False: []}
            for number in range(options.rounds):
                for tls in (True, False) if number % 2 else (False, True):
                    own = folder if tls else None
                    rounds[tls].append(uvloop.run(_send(own, size, frames, pause_s)))
            found[f"{size} bytes, {title}"] = rounds
    return found


def report(found: dict[str, dict[bool, list[Costs]]]) -> None:
    print("CPU per frame in microseconds; median (lowest to highest)\n")
    for kind, rounds in found.items():
        for side, name in enumerate(("sender", "receiver")):
            plain, tls = ([one[side] for one in rounds[with_tls]] for with_tls in (False, True))
            more = [one - other for one, other in zip(tls, plain, strict=True)]
            figures = f"plain {spread(plain, 1)}, TLS {spread(tls, 1)}, {spread(more, 1)} more"
            print(f"{kind}, {name}".ljust(38), figures)


class _Accepted(asyncio.Protocol):
    def __init__(self, connected: "asyncio.Future[asyncio.Transport]"):
        self._connected = connected

    def connection_made(self, transport: Any) -> None:
        self._connected.set_result(transport)


class _Received(asyncio.Protocol):
    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Nothing is parsed."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


async def _send(folder: Path | None, size: int, frames: int, pause_s: float) -> Costs:
    """folder: of the certificates; None: without TLS."""
    loop = asyncio.get_running_loop()
    connected: asyncio.Future[asyncio.Transport] = loop.create_future()
    own = None if folder is None else Certificates(folder, _NAMESPACE, "VllmWorker")
    context = None if own is None else own.server()
    async with await loop.create_server(
        lambda: _Accepted(connected), "127.0.0.1", 0, ssl=context
    ) as server:
        port = server.sockets[0].getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        told, tells = spawn.Pipe(duplex=False)
        receiver = spawn.Process(target=_receive, args=(port, folder, tells), daemon=True)
        receiver.start()
        async with asyncio.timeout(_START_S):
            transport = await connected
        began, frame = time.process_time(), bytes(size)
        for _ in range(frames):
            transport.write(frame)
            await asyncio.sleep(pause_s)
        used_s = time.process_time() - began
        transport.close()
        received_s = await asyncio.to_thread(told.recv)
        await asyncio.to_thread(receiver.join)
    return 1e6 * used_s / frames, 1e6 * received_s / frames


def _receive(port: int, folder: Path | None, tells: Connection) -> None:
    """In a process of its own."""

    async def receive() -> float:
        own = None if folder is None else Certificates(folder, _NAMESPACE, "Frontend")
        context = None if own is None else own.client()
        received = _Received()
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: received, "127.0.0.1", port, ssl=context)
        began = time.process_time()
        await received.ended.wait()
        return time.process_time() - began

    tells.send(uvloop.run(receive()))


if __name__ == "__main__":
    main()
