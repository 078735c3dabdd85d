"""A NATS client that reconnects whatever has ended its connection.

It works around these faults of nats-py:

- It closes for good when a server that has accepted it refuses it later: too many
  connections, an expired login, a protocol violation.
- Before it reconnects it waits until its buffer is sent, even if the old server hangs or is
  partitioned and will never read it. It leaks a connection on which the server has sent
  nothing, and one whose first attempt is cancelled while it closes.
- The PING of its flush is sent before a subscription that waits to be sent: the PONG confirms
  nothing.
- It stops reading at a message with malformed headers or a malformed reply subject, and at the
  PONG of a flush that was cancelled or had a timeout.
- It keeps a subscription whose drain was cancelled or had a timeout, and subscribes again with
  the next connection (see `drop`).
- It leaves the tasks of a connection that breaks while it sends the subscriptions again: their
  PINGs go on, in the next connections, too. It leaves the tasks of its subscriptions when its
  close is cancelled or has a timeout, and those of a connection that opens during its close.
- It loses a cancel that comes in the same turn of the event loop as the reply (Python 3.11's
  `asyncio.wait_for` returns the reply then), or while it flushes. A task that sends requests in
  a loop would never end.
- It reconnects no more after a RuntimeError, which uvloop raises for a write to a connection that
  is lost: to a server that resets it right after its greeting.
- It reads a credentials file without a JWT for ever, in the event loop, and gives up when a key
  cannot be read.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from nats import errors
from nats.aio.client import DEFAULT_BUFFER_SIZE, PING_PROTO, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol.command import unsub_cmd

from dynamo_lite.protocol.errors import ConfigError, ProtocolError
from dynamo_lite.runtime.credentials import user_jwt
from dynamo_lite.runtime.tasks import end_tasks
from dynamo_lite.runtime.tls import Reread, TlsFiles

T = TypeVar("T")

_PERMISSIONS = "permissions violation"


def is_forbidden(error: Exception | str) -> bool:
    """Whether the server's error says that this user has no right to a subject. The connection
    stays open."""
    return _PERMISSIONS in str(error).lower()


class LoopTransport(TcpTransport):
    """Raises ConnectionResetError for a write to a lost connection, whatever the event loop
    raises."""

    def write(self, payload: bytes) -> None:
        with _lost():
            super().write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        with _lost():
            super().writelines(payload)


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:
        raise ConnectionResetError(str(exc)) from exc


class PersistentClient(Client):
    """Use it with endless reconnects. After `close` it cannot be connected again."""

    _ended = False

    async def _process_err(self, err_msg: str) -> None:
        if is_forbidden(err_msg):
            await super()._process_err(err_msg)
            return
        exc = errors.Error(f"nats: {err_msg}")
        await self._error_cb(exc)
        await self._process_op_err(exc)

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        """Drops a malformed message (its reply subject is not UTF-8) and continues to read."""
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except Exception as exc:
            await self._error_cb(ProtocolError(f"malformed message: {exc!r}"))

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():  # the flush that waited for it has ended
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        """Treats malformed headers, which come from an untrusted sender, as absent."""
        try:
            return await super()._process_headers(headers)
        except Exception as exc:
            await self._error_cb(ProtocolError(f"malformed headers: {exc!r}"))
            return None

    async def _request_new_style(self, *args: Any, **options: Any) -> Msg:
        return await _keeping_cancels(super()._request_new_style(*args, **options))

    def _read_creds_user_jwt(self, creds: Any) -> bytearray:
        return user_jwt(Path(creds))

    def _connect_command(self) -> bytes:
        try:
            return super()._connect_command()
        except (errors.Error, OSError):
            raise
        except ConfigError as exc:
            raise errors.Error(str(exc)) from exc
        except Exception as exc:  # of the package that signs
            raise errors.Error(f"its key cannot be used: {type(exc).__name__}") from exc

    async def flush(self, *args: Any, **options: Any) -> None:
        await _keeping_cancels(super().flush(*args, **options))

    async def _flush_pending(self, *args: Any, **options: Any) -> Any:
        return await _keeping_cancels(super()._flush_pending(*args, **options))

    async def _attempt_reconnect(self) -> None:
        self._abort_transport()
        await super()._attempt_reconnect()

    async def _connect_to_server(self, s: Any) -> None:
        if self._ended:
            # `close` only cancels this task. On Python 3.11 a cancel that comes together
            # with a refused connection is lost, and it would retry for ever.
            raise asyncio.CancelledError
        # nats-py does so after a failure only; one that breaks later must not be tried in a loop.
        s.last_attempt = asyncio.get_running_loop().time()
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:  # of a connection that broke before it was used
                task.cancel()
        self._abort_transport()  # that of a server that accepted it and then sent nothing
        self._transport = transport = self._new_transport()
        timeout_s = self.options["connect_timeout"]
        await transport.connect(s.uri, buffer_size=DEFAULT_BUFFER_SIZE, connect_timeout=timeout_s)

    def _new_transport(self) -> LoopTransport:
        return LoopTransport()

    async def close(self) -> None:
        tasks = [subscription._wait_for_msgs_task for subscription in self._subs.values()]
        try:
            await super().close()
        finally:
            self._abort_transport()
            for subscription in list(self._subs.values()):  # of a close that was cut short
                drop(subscription)
            # nats-py cancels them once, a reconnect may lose that and connect, and nothing waits.
            tasks += [self._reconnection_task, self._reading_task]
            tasks += [self._ping_interval_task, self._flusher_task]
            own = asyncio.current_task()
            await end_tasks(*(task for task in tasks if task and task is not own))

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        self._ended = status == Client.CLOSED
        await super()._close(status, do_cbs)

    def _abort_transport(self) -> None:
        """Aborts the TCP connection, if there is one."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


def drop(subscription: Subscription) -> None:
    """Ends a subscription without waiting, in any state. Messages not yet handled are lost."""
    client, sid = subscription._conn, subscription._id
    if client._subs.pop(sid, None) is None:
        return
    subscription._closed = True
    subscription._stop_processing()
    # Behind its SUB, which may still wait to be sent, perhaps with the next connection.
    client._pending.append(command := unsub_cmd(sid, 0))
    client._pending_data_size += len(command)
    if client.is_connected:
        with contextlib.suppress(asyncio.QueueFull):  # then the flusher has enough to wake for
            client._flush_queue.put_nowait(asyncio.get_running_loop().create_future())


async def _keeping_cancels(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call of nats-py. Raises CancelledError if it has lost a cancel."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    result = await call
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return result


class TlsMismatch(errors.Error):
    """Server and URL disagree about TLS: a retry is of no use."""


class TlsClient(PersistentClient):
    """Requires TLS. A server begins in plain text and announces there whether it wants TLS. nats-py
    follows that announcement, so a man in the middle could make it send the password in plain text.
    This client raises or reports TlsMismatch before it sends any credentials to a wrong server."""

    def __init__(self, files: TlsFiles):
        """Raises ConfigError."""
        super().__init__()
        self._files, self._context = files, Reread(files, files.context)

    def _new_transport(self) -> LoopTransport:
        self.options["tls"] = self._context.current()
        return _TlsTransport()

    def _connect_command(self) -> bytes:
        if not isinstance(self._transport, _TlsTransport) or not self._transport.secured:
            raise TlsMismatch("it does not offer TLS; write nats:// if that is intended")
        if self._server_info.get("tls_verify") and self._files.cert is None:
            raise TlsMismatch("it requires a client certificate: ?cert=FILE&key=FILE")
        return super()._connect_command()


class _TlsTransport(LoopTransport):
    """Records whether the TLS handshake has succeeded."""

    secured = False

    async def connect_tls(self, *args: Any, **options: Any) -> None:
        await super().connect_tls(*args, **options)
        # `start_tls` does not tell the protocol, which would keep a connection open that the server
        # has ended, and the loop would log each time that TLS cannot do that.
        writer: Any = self._io_writer
        writer._protocol._over_ssl = True
        self.secured = True

    async def wait_closed(self) -> None:
        # After a failed handshake asyncio would never report that the connection is closed.
        if self.secured:
            await super().wait_closed()
