"""A graph of workers that a planner adds and removes, in a few lines: no processes, no clock."""

from dataclasses import dataclass, field

from dynamo_lite.planner.policy.inputs import (
    DecodeLoad,
    PrefillLoad,
    Role,
    RoleSeen,
    Seen,
)
from dynamo_lite.planner.policy.planner import PlannerMemory, Proposal, begun, plan
from dynamo_lite.planner.policy.role import Change
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import RoleCounts

P, D = Role.PREFILL, Role.DECODE


@dataclass
class Pool:
    """The workers of one role. Times are when something happens."""

    ready: int = 1
    start_s: float = 20.0
    drain_s: float = 10.0
    devices_each: int = 1
    starting: list[float] = field(default_factory=list)
    draining: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.starting) + self.ready


class World:
    """`tick` lets time pass, asks the planner and carries out its decision."""

    def __init__(
        self, limits: PlannerOptions, prefill: Pool | None = None, decode: Pool | None = None
    ):
        self.limits = limits
        self.pools = {P: prefill or Pool(), D: decode or Pool()}
        self.memory = PlannerMemory()
        self.now = 1000.0
        self.prefill = PrefillLoad()
        self.decode = DecodeLoad()
        self.manual: dict[Role, int] = {}
        #: (time, role, up) of every change that the planner has ordered.
        self.orders: list[tuple[float, Role, bool]] = []

    def seen(self) -> Seen:
        return Seen(
            roles={role: self._role(role, pool) for role, pool in self.pools.items()},
            prefill=self.prefill,
            decode=self.decode,
            manual=self.manual,
        )

    def _role(self, role: Role, pool: Pool) -> RoleSeen:
        free = self.limits.budget_devices - sum(
            (p.count + len(p.draining)) * p.devices_each for p in self.pools.values()
        )
        return RoleSeen(
            counts=RoleCounts(
                starting=len(pool.starting),
                ready=pool.ready,
                draining=len(pool.draining),
                devices_each=pool.devices_each,
                devices_free=max(free, 0),
            ),
            changed=self._changed(role),
        )

    def _changed(self, role: Role) -> tuple[bool, float] | None:
        mine = [(up, at) for at, of, up in self.orders if of is role]
        return mine[-1] if mine else None

    def tick(self) -> Proposal:
        self.now += self.limits.tick_s
        for pool in self.pools.values():
            self._pass_time(pool)
        self.memory, proposal = plan(self.memory, self.seen(), self.limits, self.now)
        for action in proposal.actions:
            self._do(action)
        return proposal

    def run(self, seconds: float) -> list[Proposal]:
        return [self.tick() for _ in range(round(seconds / self.limits.tick_s))]

    def _pass_time(self, pool: Pool) -> None:
        due = [at for at in pool.starting if at <= self.now]
        pool.starting = [at for at in pool.starting if at > self.now]
        pool.ready += len(due)
        pool.draining = [at for at in pool.draining if at > self.now]

    def _do(self, change: Change) -> None:
        pool = self.pools[change.role]
        self.memory = begun(self.memory, change)
        if change.kind == "withdraw":
            assert len(pool.starting) == -change.by
            pool.starting = []
            return
        self.orders.append((self.now, change.role, change.by > 0))
        if change.by > 0:
            pool.starting += [self.now + pool.start_s] * change.by
        else:
            assert change.by == -1
            pool.ready -= 1
            pool.draining.append(self.now + pool.drain_s)


def prefill_load(
    asked: float, *, refused: float = 0, backlog: float = 0, rate: float | None = 1000
):
    return PrefillLoad(asked_per_s=asked, refused_per_s=refused, backlog=backlog, rate=rate)


def decode_load(kv: float, requests: float = 0, *, waiting: float = 0):
    return DecodeLoad(
        kv_used=kv,
        kv_waiting=0,
        running=requests,
        waiting=waiting,
        max_running=100,
    )
