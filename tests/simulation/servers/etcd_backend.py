"""What the shipped etcd client runs on in a simulated process."""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from dynamo_lite.runtime.etcd.backend import EtcdBackend
from dynamo_lite.runtime.tasks import OwnedTasks
from tests.simulation.network.grpc import SimChannel
from tests.simulation.network.network import Network
from tests.simulation.servers.etcd import PORT

#: Of the simulated etcd. The network knows servers by their ports alone.
ETCD_URL = f"http://etcd:{PORT}"


def etcd_backend(network: Network) -> EtcdBackend:
    """For the process that is running. Hosts of the client's URL are found by their ports."""
    return EtcdBackend(
        open_channel=lambda host, _: SimChannel(network, host[1]),
        open_portal=_open_portal,
        clock=network.loop.current_process().clock,
    )


class _LoopPortal:
    """Implements Portal in the caller's own event loop: a simulation has no threads."""

    def __init__(self) -> None:
        self.tasks = OwnedTasks()

    def start_task_soon(self, func: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        task = self.tasks.start(_run(func, args, future), name="portal")
        future.add_done_callback(lambda done: task.cancel() if done.cancelled() else None)
        return future


async def _run(func: Callable[..., Any], args: tuple[Any, ...], future: Future[Any]) -> None:
    try:
        result = func(*args)
        if inspect.isawaitable(result):
            result = await result
    except asyncio.CancelledError:
        future.cancel()
        raise
    except Exception as exc:
        if not future.cancelled():
            future.set_exception(exc)
    else:
        if not future.cancelled():
            future.set_result(result)


@contextlib.asynccontextmanager
async def _open_portal() -> AsyncIterator[_LoopPortal]:
    portal = _LoopPortal()
    try:
        yield portal
    finally:
        await portal.tasks.join()
