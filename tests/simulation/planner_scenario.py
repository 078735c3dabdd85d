"""What a seed with a planner stands for besides its cluster. Times: seconds after the start."""

from dataclasses import dataclass, field
from typing import Literal

from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import ChangePhase


@dataclass(frozen=True)
class Step:
    """A moment in a change of the numbers: its record gets this phase."""

    kind: Literal["add", "remove"]
    phase: ChangePhase

    def __str__(self) -> str:
        return f"{self.kind} {self.phase}"


@dataclass(frozen=True, kw_only=True)
class BadStarts:
    """Workers that are started in this time are never ready: they end, or hang."""

    from_s: float
    to_s: float
    hang: bool
    #: Only those that were ready before and have crashed, and only until the end of this time.
    restarts: bool = False

    def __str__(self) -> str:
        how = "hangs" if self.hang else "fails"
        what = "restart" if self.restarts else "start"
        return f"{self.from_s:10.6f}  every {what} {how} for {self.to_s - self.from_s:.3f} s"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """An operator sets the number of a component's workers, also without the planner."""

    at_s: float
    component: str
    count: int
    #: `dynamo-lite scale` asks the supervisor; `dynamo-lite planner set` asks the planner.
    by_scale: bool = False

    def __str__(self) -> str:
        command = "scale" if self.by_scale else "planner set"
        return f"{self.at_s:10.6f}  {command} {self.component}={self.count}"


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
    #: kill -9 of the planner that leads, in each of these moments once.
    crashes: tuple[Step, ...] = ()
    bad_starts: tuple[BadStarts, ...] = ()
    wishes: tuple[Wish, ...] = field(default=())

    def is_dry(self, index: int) -> bool:
        return self.one_is_dry and index == self.planners - 1

    def lines(self) -> list[str]:
        """For people."""
        own = self.options
        return [
            f"  {self.planners} planners{' (one dry)' if self.one_is_dry else ''} over"
            f" {'pods' if self.pods else 'a supervisor'} with {self.devices} devices: prefill"
            f" {own.prefill_min}-{own.prefill_max}, decode {own.decode_min}-{own.decode_max},"
            f" budget {own.budget_devices}, tick {own.tick_s:.2f} s, down after"
            f" {own.down_window_s:.2f} s, a start takes {own.start_timeout_s:.2f} s at most",
            *[f"  kill -9 of the leader in {step}" for step in self.crashes],
            *[f"  {one}" for one in (*self.bad_starts, *self.wishes)],
        ]
