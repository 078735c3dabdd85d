"""Faults that are injected into the processes of a cluster, one coroutine per kind. A fault ends
when the process that it hit works again. It is counted when it has hit."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from operator import attrgetter

from tests.chaos.cluster import FRONTEND, Cluster, Member
from tests.servers import PrivateServer

#: A process that was hit is back after this long, also while others start.
BACK_S = 180.0
_MOST_AGAIN = 3


class NotNow(Exception):
    """This fault would leave no worker to serve, or has no target at present."""


@dataclass
class Blows:
    """Hits a cluster. counts: by kind. ending: what is begun is finished, no more."""

    cluster: Cluster
    rng: random.Random
    say: Callable[[str], None] = lambda line: None
    counts: Counter[str] = field(default_factory=Counter[str])
    ending: bool = False

    def hit(self, kind: str, detail: str) -> None:
        self.counts[kind] += 1
        self.say(f"{kind}: {detail}")

    def pick(self, service: str, *, spare: int = 0) -> Member:
        """A ready member, with `spare` other ones. Raises NotNow."""
        ready = self.cluster.ready(service)
        if len(ready) <= spare:
            raise NotNow
        return self.rng.choice(ready)

    async def kill(self, member: Member, kind: str, *, engine: bool = False) -> None:
        """kill -9 to a component or its EngineCore; returns when it has been noticed."""
        restarts = member.state.restarts
        pid = member.engine_pid if engine else member.state.pid
        if not pid:
            raise NotNow
        # A killed Frontend loses the answers that it was sending; no other fault may.
        excuse = self.cluster.excusing("Frontend killed")
        with excuse if member.service == FRONTEND else contextlib.nullcontext():
            state = member.state.state
            os.kill(pid, signal.SIGKILL)
            self.hit(kind, f"{member.name} pid {pid}" + ("" if state == "ready" else f" ({state})"))
            await self.cluster.until(
                lambda: member.state.restarts > restarts,
                timeout_s=BACK_S,
                what=f"the end of {member.name} is noticed",
            )

    async def back(self, member: Member) -> None:
        await self.cluster.until(
            lambda: member.ready, timeout_s=BACK_S, what=f"{member.name} is ready again"
        )

    async def hold(self, pids: list[int], seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while. Processes that have ended by then are ignored."""
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    pass


Blow = Callable[[Blows, str], Awaitable[None]]

NATS, ETCD = attrgetter("nats"), attrgetter("etcd")
"""Of a cluster."""


def killing(service: str, *, engine: bool = False, spare: int = 0, again: float = 0.6) -> Blow:
    """Kills one, and with the chance `again` once more while it starts, and so on."""

    async def blow(blows: Blows, kind: str) -> None:
        victim = blows.pick(service, spare=spare)
        await blows.kill(victim, kind, engine=engine)
        for _ in range(_MOST_AGAIN):
            if blows.rng.random() > again:
                break
            await blows.cluster.until(
                lambda: bool(victim.engine_pid if engine else victim.state.pid),
                timeout_s=BACK_S,
                what=f"{victim.name} is started again",
            )
            await asyncio.sleep(blows.rng.uniform(0.2, 6.0))
            if blows.ending:
                break
            await blows.kill(victim, kind, engine=engine)
        await blows.back(victim)

    return blow


def holding(service: str, shortest_s: float, longest_s: float, *, spare: int = 0) -> Blow:
    """Stops a component, its engine, or both for a while, then lets them continue. A process
    that finds its lease gone then leaves and is restarted."""

    async def blow(blows: Blows, kind: str) -> None:
        victim = blows.pick(service, spare=spare)
        pids = [victim.state.pid, victim.engine_pid]
        chosen = blows.rng.choice(([pids[0]], pids[1:], pids))
        chosen = [pid for pid in chosen if pid] or pids[:1]
        seconds = blows.rng.uniform(shortest_s, longest_s)
        what = "both" if len(chosen) > 1 else "engine" if chosen == pids[1:] else "component"
        blows.hit(kind, f"{victim.name} {what} for {seconds:.1f} s")
        began = time.monotonic()
        await blows.hold(chosen, seconds)
        # What was stopped acts a moment later on what it finds.
        await asyncio.sleep(min(3.0, time.monotonic() - began))
        await blows.back(victim)

    return blow


def freezing(server: Callable[[Cluster], PrivateServer], low_s: float, high_s: float) -> Blow:
    async def blow(blows: Blows, kind: str) -> None:
        frozen = server(blows.cluster)
        seconds = blows.rng.uniform(low_s, high_s)
        blows.hit(kind, f"for {seconds:.1f} s")
        frozen.freeze()
        try:
            await asyncio.sleep(seconds)
        finally:
            frozen.thaw()

    return blow


def restarting(
    server: Callable[[Cluster], PrivateServer], low_s: float, high_s: float, *, wiped: bool = False
) -> Blow:
    """kill -9, and a start a while later on the same port."""

    async def blow(blows: Blows, kind: str) -> None:
        killed = server(blows.cluster)
        seconds = blows.rng.uniform(low_s, high_s)
        await killed.kill()
        blows.hit(kind, f"back in {seconds:.1f} s")
        try:
            await asyncio.sleep(seconds)
        finally:
            await killed.restart(wiped=wiped)

    return blow
