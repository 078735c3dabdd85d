"""The second process: a decode engine's memory; it receives notifications and computes
checksums."""

import os
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import msgspec

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.records import RankMetadata
from gpu_check.report import CheckFailed

_START_S = 90.0
_RESPONSE_S = 60.0
_PAUSE_S = 0.0002


def serve(pipe: Connection, device: str, options: dict[str, Any]) -> None:
    """Serves the requests of `Peer` until the pipe is closed."""
    from gpu_check.memory import Pool

    with Pool(f"gpu-check-peer-{os.getpid()}", device, **options) as pool:
        pipe.send(encode(pool.rank))
        arrived: dict[bytes, float] = {}
        while True:
            now = time.monotonic()
            arrived |= dict.fromkeys(pool.mover.notices(), now)
            if not pipe.poll(_PAUSE_S):
                continue
            try:
                what, argument = pipe.recv()
            except EOFError:
                return
            pipe.send(arrived if what == "notices" else pool.checksum(argument))


class Peer:
    """Starts the second process. options: of its `Pool`. rank: its memory."""

    def __init__(self, device: str, **options: Any):
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, device, options), daemon=True)
        self._process.start()
        theirs.close()
        metadata = self._response(_START_S, "its metadata")
        self.rank = msgspec.msgpack.decode(metadata, type=RankMetadata)

    def notices(self) -> dict[bytes, float]:
        """All notifications received, with their times by this machine's monotonic clock."""
        return self._request("notices", None)

    def checksum(self, blocks: Sequence[int]) -> int:
        return self._request("checksum", list(blocks))

    def await_notice(self, notice: bytes, timeout_s: float = 10.0) -> float:
        """Returns the time of its arrival. Raises CheckFailed after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (came := self.notices().get(notice)) is None:
            if time.monotonic() > deadline:
                raise CheckFailed(f"notification {notice!r} did not arrive within {timeout_s:g} s")
        return came

    def _request(self, what: str, argument: object) -> Any:
        self._pipe.send((what, argument))
        return self._response(_RESPONSE_S, what)

    def _response(self, timeout_s: float, what: str) -> Any:
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except EOFError:
            self._process.join(5.0)
            code = self._process.exitcode
            raise CheckFailed(f"the second process has ended, exit code {code}") from None
        raise CheckFailed(f"the second process did not respond within {timeout_s:g} s: {what}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
