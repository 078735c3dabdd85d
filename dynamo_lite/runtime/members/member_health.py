"""What is known of one member's health."""

from dataclasses import dataclass

#: So many beats in a row are a worker's own, though somebody has sent a higher number.
_IN_ROW = 4


@dataclass
class MemberHealth:
    """well_at: when it was last known to be well, or began to be waited for.

    number: of the newest beat. late, late_in_row: the last number below it, and how
    many have led to that one without a gap. ok, detail: what its beats say. failed: how
    it has failed a canary; empty when it has not.
    """

    well_at: float
    number: int = -1
    late: int = -1
    late_in_row: int = 0
    ok: bool = True
    silent: bool = False
    detail: str = ""
    failed: str = ""

    @property
    def well(self) -> bool:
        return self.ok and not self.failed

    @property
    def responsive(self) -> bool:
        return self.well and not self.silent

    @property
    def trouble(self) -> str:
        """Empty for who is well, though perhaps silent."""
        return self.failed if self.ok else self.detail or "it cannot work"

    def is_news(self, number: int) -> bool:
        """Whether the beat comes after the newest one, or shows that it was not the worker's:
        late beats that keep coming one by one are no repetition."""
        if number <= self.number:
            self.late_in_row = self.late_in_row + 1 if number == self.late + 1 else 1
            self.late = number
            if self.late_in_row < _IN_ROW:
                return False
        self.late, self.late_in_row = -1, 0
        return True
