"""The mover on NIXL (UCX backend).

NIXL's progress thread is not used: it spins on a core and knows no limit (`PollLimit`).
`Transfer.done` and `notices` make progress. The engine's worker half calls them each step
while anything is in flight, and the thread of `polled.py` between the steps. A peer's first
contact also completes in these calls.

Over TCP, UCX sends a notification as a message, and the next transfer to the same peer
waits until it is confirmed. The peer confirms when it makes progress, so the next write and
its notification would be delayed by a step of the peer's engine. A read of a few bytes
after each such write requests the confirmation early.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.transfer.block_map import Descriptors

logger = logging.getLogger(__name__)

_CONFIRM_BYTES = 8


class NixlTransfer:
    """One posted transfer. what: "write" or "read". on_end: called once if it ends without an
    error."""

    def __init__(
        self,
        agent: Any,
        peer: str,
        handle: Any,
        status: str,
        what: str,
        on_end: Callable[[], None],
    ):
        self._agent, self._peer, self._handle, self._what = agent, peer, handle, what
        self._on_end = on_end
        self._failure: str | None = None
        self._settle(status)

    @property
    def over(self) -> bool:
        return self._handle is None

    def done(self) -> bool:
        if self._failure is not None:
            raise TransferError(self._peer, self._failure)
        if self._handle is None:
            return True
        try:
            status = self._agent.check_xfer_state(self._handle)
        except Exception as exc:
            self.release()
            self._failure = f"{self._what} failed: {exc}"
            raise TransferError(self._peer, self._failure) from exc
        return self._settle(status)

    def _settle(self, status: str) -> bool:
        if status == "PROC":
            return False
        self.release()
        if status != "DONE":
            self._failure = f"{self._what} ended in state {status}"
            raise TransferError(self._peer, self._failure)
        self._on_end()
        return True

    def release(self) -> None:
        handle, self._handle = self._handle, None
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(handle)


class NixlMover:
    """name: unique per engine incarnation and rank."""

    def __init__(self, name: str):
        # `polled.py` calls from two threads, one at a time. NIXL's handles also release
        # themselves when Python collects them, in any thread.
        config = nixl_agent_config(
            enable_prog_thread=False, sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self._agent = nixl_agent(name, config)
        self._registrations: list[Any] = []
        self._peers: dict[str, str] = {}
        self._confirmed = np.zeros(_CONFIRM_BYTES, dtype=np.uint8)
        self._confirming: dict[str, NixlTransfer] = {}
        self.register([(self._confirmed.ctypes.data, _CONFIRM_BYTES)], "DRAM", 0)

    def register(self, spans: Sequence[tuple[int, int]], memory: str, device: int) -> None:
        rows = [(address, length, device, "") for address, length in spans]
        self._registrations.append(self._agent.register_memory(rows, memory))

    def metadata(self) -> bytes:
        return self._agent.get_agent_metadata()

    def add_peer(self, peer: str, metadata: bytes) -> None:
        if peer in self._peers:
            return
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as exc:
            raise TransferError(peer, f"its NIXL metadata was not accepted: {exc}") from exc
        self._peers[peer] = name.decode() if isinstance(name, bytes) else name

    def remove_peer(self, peer: str) -> None:
        name = self._peers.pop(peer, None)
        # Its data may still arrive: in `_confirmed`, which nothing reads.
        if (confirming := self._confirming.pop(peer, None)) is not None:
            confirming.release()
        if name is not None:
            try:
                self._agent.remove_remote_agent(name)
            except Exception as exc:
                logger.warning("could not remove the NIXL agent of engine %s: %s", peer, exc)

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        *,
        memory: tuple[str, str],
        notice: bytes = b"",
    ) -> NixlTransfer:
        return self._start("WRITE", peer, local, remote, memory, notice)

    def read(
        self, peer: str, local: Descriptors, remote: Descriptors, *, memory: tuple[str, str]
    ) -> NixlTransfer:
        return self._start("READ", peer, local, remote, memory, b"")

    def _start(
        self,
        operation: str,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        memory: tuple[str, str],
        notice: bytes,
    ) -> NixlTransfer:
        what = operation.lower()
        try:
            handle = self._agent.initialize_xfer(
                operation,
                self._agent.get_xfer_descs(local, memory[0]),
                self._agent.get_xfer_descs(remote, memory[1]),
                self._peers[peer],
                notice,
            )
            status = self._agent.transfer(handle)
        except KeyError as exc:
            raise TransferError(peer, "no such peer") from exc
        except Exception as exc:
            raise TransferError(peer, f"{what} not started: {exc}") from exc
        wanted = bool(notice) and memory == ("DRAM", "DRAM")
        address, length = int(remote[0, 0]), int(remote[0, 1])
        ended = partial(self._confirm, peer, address, length) if wanted else lambda: None
        return NixlTransfer(self._agent, peer, handle, status, what, ended)

    def notices(self) -> list[bytes]:
        try:
            arrived = self._agent.get_new_notifs()
        except Exception as exc:
            # The caller is an engine's step: a broken peer must not end it.
            logger.warning("could not read NIXL notifications: %s", exc)
            return []
        return [notice for from_peer in arrived.values() for notice in from_peer]

    def _confirm(self, peer: str, address: int, length: int) -> None:
        """Makes the peer confirm what was sent to it, by a read of what was just written."""
        size = min(length, _CONFIRM_BYTES)
        here = np.array([[self._confirmed.ctypes.data, size, 0]], dtype=np.uint64)
        there = np.array([[address, size, 0]], dtype=np.uint64)
        try:
            pending = self._confirming.pop(peer, None)
            if pending is None or pending.done():
                pending = self.read(peer, here, there, memory=("DRAM", "DRAM"))
            self._confirming[peer] = pending
        except TransferError as exc:
            # The write has succeeded, so only time is lost. Other transfers detect a dead peer.
            logger.debug("could not request a confirmation: %s", exc)

    def close(self) -> None:
        for peer in list(self._peers):
            self.remove_peer(peer)
        for registration in self._registrations:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registration)
        self._registrations.clear()
