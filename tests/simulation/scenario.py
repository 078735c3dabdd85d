"""The scenario of one seed: the cluster, the requests, and the times of the faults.

All of it is drawn from the seed before anything runs (`draw.py`), as plain data; times are
seconds after the start.
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from dynamo_lite.protocol.options import PlannerOptions
from tests.simulation.engine.model import Sampling


class Step(StrEnum):
    """A moment in a change of the numbers. wanted: the record says so. ordered: the order was
    taken."""

    ADD_WANTED = "add wanted"
    ADD_ORDERED = "add ordered"
    WITHDRAW_WANTED = "withdraw wanted"
    WITHDRAW_ORDERED = "withdraw ordered"
    REMOVE_WANTED = "remove wanted"
    REMOVE_ORDERED = "remove ordered"


@dataclass(frozen=True, kw_only=True)
class BadStarts:
    """Workers that are started in this time are never ready: they end, or hang."""

    from_s: float
    to_s: float
    hang: bool
    #: Only those that were ready before and have crashed, and only until the end of this time.
    restarts: bool = False


@dataclass(frozen=True, kw_only=True)
class Wish:
    """An operator sets the number of a component's workers."""

    at_s: float
    component: str
    count: int

    def __str__(self) -> str:
        return f"{self.at_s:10.6f}  planner set {self.component}={self.count}"


@dataclass(frozen=True, kw_only=True)
class PlannerScenario:
    """Its planners, and what happens to them."""

    #: Number of planners, including the one in a dry run.
    planners: int
    #: Whether the last planner is in a dry run.
    one_is_dry: bool
    #: Whether the connector chooses which worker ends, and ends it at once, as Kubernetes may. If
    #: not, the supervisor of `serve` runs the workers.
    pods: bool
    options: PlannerOptions
    #: Of the host; a worker has one.
    devices: int
    #: kill -9 of the planner that leads, once for each.
    crashes: tuple[Step, ...] = ()
    bad_starts: tuple[BadStarts, ...] = ()
    wishes: tuple[Wish, ...] = field(default=())

    def is_dry(self, index: int) -> bool:
        return self.one_is_dry and index == self.planners - 1


#: The load begins when the workers are up, which is about then.
LOAD_FROM_S = 2.0


class FaultKind(Enum):
    """What can go wrong, and for how long."""

    CRASH = "crash"  # kill -9 of a worker or client, with its engine
    ENGINE_CRASH = "engine crash"  # kill -9 of an engine alone
    PAUSE = "pause"  # SIGSTOP of a worker with its engine, or a client
    COMPONENT_PAUSE = "component pause"  # of a worker without its engine
    ENGINE_PAUSE = "engine pause"  # of an engine without its worker
    DRAIN = "drain"  # SIGTERM; its supervisor starts a new one
    REVOKE = "revoke"  # its lease is revoked from outside
    ISOLATE = "isolate"  # a host is partitioned from all others
    CUT = "cut"  # two hosts do not reach each other
    WEATHER = "weather"  # loss, duplication, reordering and delay of messages
    WALL_JUMP = "wall jump"  # a host's wall clock is set
    BROKER_CRASH = "broker crash"  # NATS is killed and starts again
    BROKER_PAUSE = "broker pause"
    STORE_CRASH = "store crash"  # etcd is killed and starts again, with its data
    STORE_WIPE = "store wipe"  # ... and without
    STORE_PAUSE = "store pause"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """for_s: duration, of faults that last. amount: strength, of faults that have one.

    target, other: names of slots ("decode-0"), "nats" or "etcd".
    """

    at_s: float
    kind: FaultKind
    target: str = ""
    other: str = ""
    for_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        words = [self.kind.value, self.target]
        words += [f"from {self.other}"] if self.other else []
        words += [f"for {self.for_s:.3f} s"] if self.for_s else []
        words += [f"by {self.amount:.3f}"] if self.amount else []
        return " ".join(word for word in words if word)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request of a client."""

    at_s: float
    client: int = 0
    #: A client that is restarted may send the same id again.
    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    timeout_s: float = 30.0
    #: When its client cancels it; None: never.
    cancel_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Sizes and times of the cluster; see the options of the same names."""

    seed: int
    profile: str = "chosen"
    decode: int = 1
    prefill: int = 1
    clients: int = 1
    num_blocks: int = 256
    lease_ttl_s: float = 5.0
    remote_prefill_timeout_s: float = 6.0
    max_jobs: int = 8
    #: Longest time that a write is in flight; below a lease's time-to-live.
    slowest_write_s: float = 0.05
    token_s: float = 0.001
    #: No fault lasts beyond this time.
    quiet_at_s: float
    max_queue_wait_s: float = 2.0
    #: Longest time between etcd's application of a call and its answer.
    slowest_store_answer_s: float = 0.0
    #: Whether an attacker replays messages (`intruder.py`).
    intruded: bool = False
    #: Hosts with a wrong wall clock, and by how many seconds it is ahead.
    clock_skews: tuple[tuple[str, float], ...] = ()
    faults: tuple[Fault, ...] = ()
    asks: tuple[Ask, ...] = field(default=(), repr=False)
    #: None: without a planner.
    planner: PlannerScenario | None = None

    @property
    def only_broker_fails(self) -> bool:
        """True as well if nothing fails."""
        return all(
            fault.kind in (FaultKind.BROKER_CRASH, FaultKind.BROKER_PAUSE) for fault in self.faults
        )

    @property
    def slots(self) -> list[str]:
        """Names of the processes of the start, in the order in which they are drained."""
        planners = 0 if self.planner is None else self.planner.planners
        counted = (
            ("planner", planners),
            ("client", self.clients),
            ("decode", self.decode),
            ("prefill", self.prefill),
        )
        return [f"{kind}-{index}" for kind, count in counted for index in range(count)]
