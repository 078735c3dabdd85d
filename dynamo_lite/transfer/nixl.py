"""The mover on NIXL (UCX backend).

No progress thread: NIXL's spins on a core for ever. Progress is made by
`Write.done` and `notices`, which the engine's worker half calls each step while
anything is in flight; a peer's first contact completes for the same reason.
"""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from nixl._api import nixl_agent, nixl_agent_config

from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.transfer.layout import Descriptors

logger = logging.getLogger(__name__)


class NixlWrite:
    """One posted transfer."""

    def __init__(self, agent: Any, peer: str, handle: Any, status: str):
        self._agent, self._peer, self._handle = agent, peer, handle
        self._failure: str | None = None
        self._settle(status)

    def done(self) -> bool:
        if self._failure is not None:
            raise TransferError(self._peer, self._failure)
        if self._handle is None:
            return True
        try:
            status = self._agent.check_xfer_state(self._handle)
        except Exception as exc:
            self._release()
            self._failure = f"write failed: {exc}"
            raise TransferError(self._peer, self._failure) from exc
        return self._settle(status)

    def _settle(self, status: str) -> bool:
        if status == "PROC":
            return False
        self._release()
        if status != "DONE":
            self._failure = f"write ended in state {status}"
            raise TransferError(self._peer, self._failure)
        return True

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(handle)


class NixlMover:
    """name: unique per engine incarnation and rank."""

    def __init__(self, name: str):
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
        self._registrations: list[Any] = []
        self._peers: dict[str, str] = {}

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
        if name is not None:
            try:
                self._agent.remove_remote_agent(name)
            except Exception as exc:
                logger.warning("forgetting NIXL agent of engine %s: %s", peer, exc)

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        *,
        memory: tuple[str, str],
        notice: bytes = b"",
    ) -> NixlWrite:
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(local, memory[0]),
                self._agent.get_xfer_descs(remote, memory[1]),
                self._peers[peer],
                notice,
            )
            status = self._agent.transfer(handle)
        except KeyError as exc:
            raise TransferError(peer, "no such peer") from exc
        except Exception as exc:
            raise TransferError(peer, f"write not started: {exc}") from exc
        return NixlWrite(self._agent, peer, handle, status)

    def notices(self) -> list[bytes]:
        try:
            arrived = self._agent.get_new_notifs()
        except Exception as exc:
            # The caller is an engine's step: a broken peer must not end it.
            logger.warning("reading NIXL notices: %s", exc)
            return []
        return [notice for from_peer in arrived.values() for notice in from_peer]

    def close(self) -> None:
        for peer in list(self._peers):
            self.remove_peer(peer)
        for registration in self._registrations:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registration)
        self._registrations.clear()
