"""One member of a roster, as its heartbeats show it."""

from dataclasses import dataclass

from dynamo_lite.protocol.health import Heartbeat

#: This many consecutive heartbeats are the worker's own, although another process has sent a
#: higher number.
_IN_ROW = 4


@dataclass
class MemberHealth:
    """`HealthMonitor` owns it, and writes what `take` and `is_news` do not."""

    #: When it was last known to be healthy, or when its timeout began.
    well_at: float
    #: Number of the newest heartbeat.
    number: int = -1
    #: The last number below `number`, and how many led to it without a gap.
    late: int = -1
    late_in_row: int = 0
    #: The content of the newest heartbeat.
    ok: bool = True
    detail: str = ""
    #: Whether heartbeats are missing.
    silent: bool = False

    @property
    def responsive(self) -> bool:
        return self.ok and not self.silent

    @property
    def trouble(self) -> str:
        """What is wrong; empty when only heartbeats are missing, or nothing."""
        return "" if self.ok else self.detail or "it cannot work"

    def is_news(self, number: int) -> bool:
        """Whether the heartbeat is newer than the newest one, or shows that the newest one was
        forged: consecutive late heartbeats are no repetition."""
        if number <= self.number:
            self.late_in_row = self.late_in_row + 1 if number == self.late + 1 else 1
            self.late = number
            if self.late_in_row < _IN_ROW:
                return False
        self.late, self.late_in_row = -1, 0
        return True

    def take(self, heartbeat: Heartbeat) -> None:
        """It is the newest one."""
        self.number, self.ok, self.detail = heartbeat.number, heartbeat.ok, heartbeat.detail
