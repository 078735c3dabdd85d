"""Keeps simulated processes running, as the supervisor of `serve` does real ones.

A component and its engine are two processes: the engine dies with its component,
as by a parent-death signal, and may be stopped or killed apart from it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo_lite.policy.backoff import Backoff
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.runtime.process.component import Host
from tests.simulation.engine.assembly import SimEngineProcess
from tests.simulation.invariants import Judge
from tests.simulation.loop.loop import VirtualLoop
from tests.simulation.loop.process import SimProcess, SimState

#: After this time an operator starts an instance again that has left in order.
_OPERATOR_S = 1.0
_BACKOFF = Backoff(first_s=0.5, longest_s=4.0)

#: How often a dead process's lease is not revoked, as if its supervisor had died with it.
_NOT_REVOKED = 0.3
#: A revocation takes between 1 ms and the product's timeout, as powers of ten.
_REVOKED_AFTER_S = (-3.0, 0.3)


class SimLeaseRevoker:
    """Revokes leases like `LeaseRevoker` of the product, after a random time, and not always.

    revoke: takes a host and a lease id; returns whether it has revoked the lease.
    """

    def __init__(self, loop: VirtualLoop, judge: Judge, revoke: Callable[[str, int], bool]):
        self._loop, self._judge, self._revoke = loop, judge, revoke
        self._rng = loop.stream("supervisors")

    async def revoke(self, host: str, lease_id: int) -> None:
        """host: of the process that has died."""
        if self._rng.random() < _NOT_REVOKED:
            return
        await asyncio.sleep(10 ** self._rng.uniform(*_REVOKED_AFTER_S))
        if self._revoke(host, lease_id):
            self._loop.trace.add(f"{host}: its supervisor has revoked lease {lease_id:x}")
            self._judge.counts["leases revoked by supervisors"] += 1


class Slot:
    """One supervised process and its engine; implements Home for the latter.

    main: makes the process's work, to be run as that process. leases: revokes the lease of a
    process that has died. alone: it was added to a running graph, and is not started again when
    it ends before it was ready.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        judge: Judge,
        main: Callable[["Slot"], Coroutine[Any, Any, int]],
        leases: SimLeaseRevoker,
        *,
        alone: bool = False,
    ):
        self.name = name
        #: Written by the world.
        self.was_ready = False
        self.process: SimProcess | None = None
        self.engine: SimProcess | None = None
        #: What the component got; None until it is connected.
        self.host: Host | None = None
        self._loop, self._judge, self._main, self._leases = loop, judge, main, leases
        #: Of the last component that was connected; 0 until it is, and after its end.
        self._lease_id = 0
        self._stopping, self._alone = False, alone
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"Slot({self.name}, {self.process!r})"

    def processes(self) -> list[SimProcess]:
        """Those that are alive."""
        return [p for p in (self.process, self.engine) if p is not None and not p.dead]

    async def keep(self) -> None:
        """Runs until `stop`; a process that ends before is started again."""
        failures = 0
        while not self._stopping:
            began = self._loop.time()
            code = await self._run_once()
            self._judge.counts[f"exit {'killed' if code is None else code}"] += 1
            if code != 0 and self._lease_id:
                await self._leases.revoke(self.name, self._lease_id)
            if self._stopping or (self._alone and not self.was_ready):
                break
            delay_s = _OPERATOR_S
            if code != 0:
                restart = _BACKOFF.after_exit(failures, self._loop.time() - began)
                failures, delay_s = restart.failures, restart.delay_s
            self._loop.trace.add(f"{self.name} ended with {code}; again in {delay_s:g} s")
            await self._pause(delay_s)

    def stop(self) -> None:
        """Drains it; it is not started again."""
        self._stopping = True
        self._wake.set()
        self.terminate()

    def kill(self) -> None:
        """SIGKILL; it is not started again."""
        self._stopping = True
        self._wake.set()
        if self.process is not None:
            self.process.kill()

    def terminate(self) -> None:
        """SIGTERM."""
        if self.host is not None and self.process is not None and self.process.running:
            self.process.run(self.host.stop, "SIGTERM")
        elif self.process is not None:
            self.process.kill()

    async def _pause(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _run_once(self) -> int | None:
        """Its exit code; None when it was killed."""
        self.host = None
        self.process = process = self._loop.add_process(self.name)
        ended = asyncio.Event()

        def died(_: SimProcess, state: SimState) -> None:
            if state is SimState.DEAD:
                self._end_engine()
                ended.set()

        process.watchers.append(died)
        task = process.spawn(self._main(self), name=f"main {self.name}")
        task.add_done_callback(lambda _: ended.set())
        await ended.wait()
        self._lease_id = 0 if self.host is None else self.host.lease.id
        self.host = None
        if not task.done():
            return None
        if left := process.exit():
            self._judge.violate(f"{process} left tasks behind: {left}")
        if task.cancelled() or task.exception() is not None:
            self._judge.violate(f"{process} ended with {task!r}")
            return 1
        return task.result()

    # Home

    def start_engine(
        self, engine: SimEngineProcess, main: Coroutine[Any, Any, None], on_end: Callable[[], None]
    ) -> SimProcess:
        self._end_engine()
        process = self.engine = self._loop.add_process(f"{self.name}.engine", host=self.name)
        self._judge.engine_started(engine)

        def died(_: SimProcess, state: SimState) -> None:
            if state is SimState.DEAD:
                engine.mover.die()
                self._judge.engine_died(engine)
                on_end()

        def ended(task: asyncio.Task[None]) -> None:
            if process.dead:
                return
            if not task.cancelled() and (exc := task.exception()) is not None:
                # An engine that cannot start ends, and so does its component, which is restarted.
                if engine.ready or not isinstance(exc, DynamoLiteError):
                    self._judge.violate(f"{process} failed: {exc!r}")
            elif left := process.exit():
                self._judge.violate(f"{process} left tasks behind: {left}")
            process.kill()

        process.watchers.append(died)
        process.spawn(main, name=f"main {process.name}").add_done_callback(ended)
        return process

    def _end_engine(self) -> None:
        if self.engine is not None:
            self.engine.kill()
