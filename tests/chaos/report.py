"""What a run of chaos has shown, as a table."""

from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.load import Tally, Wait
from tests.chaos.meters import total


@dataclass
class Report:
    """One run. trouble: what has not come back or not ended as it should; empty when all is well.
    left: processes that remain after the end."""

    what: str
    seed: int
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    blows: dict[str, int] = field(default_factory=dict[str, int])
    exits: dict[str, int] = field(default_factory=dict[str, int])
    moved: int = 0
    remote_prefills: dict[str, int] = field(default_factory=dict[str, int])
    stopped_writes: int = 0
    late_notices: int = 0
    trouble: list[str] = field(default_factory=list[str])
    left: list[str] = field(default_factory=list[str])
    facts: dict[str, str] = field(default_factory=dict[str, str])
    refusals_allowed: bool = True

    def meter(self, counts: Counter[str]) -> None:
        """counts: what the processes have counted meanwhile."""
        self.moved = total(counts, "requests_moved")
        self.remote_prefills = {
            name.partition('outcome="')[2].rstrip('"}'): int(value)
            for name, value in sorted(counts.items())
            if name.startswith("remote_prefills{")
        }
        self.stopped_writes = total(counts, "stopped_writes")
        self.late_notices = total(counts, "late_notices")

    @property
    def failures(self) -> list[str]:
        """Why this run is no success, or nothing."""
        tally, found = self.tally, []
        if tally.wrong:
            found.append(f"{tally.wrong} wrong answers")
        if tally.lost:
            found.append(f"{tally.lost.total()} lost requests")
        if tally.open:
            found.append(f"{tally.open} requests have not ended")
        if tally.refused and not self.refusals_allowed:
            found.append(f"{tally.refused.total()} refusals")
        return [*found, *self.trouble, *self.left]

    def as_text(self) -> str:
        lines = [f"{self.what}, seed {self.seed}, {self.seconds:.0f} s", ""]
        lines += [f"  {name:<36}{value}" for name, value in self._rows()]
        for title, items in (
            ("hit", [f"{n:>5}  {kind}" for kind, n in self.blows.items()]),
            ("exits seen by the supervisors", [f"{n:>5}  {k}" for k, n in self.exits.items()]),
            ("examples", self.tally.examples),
            ("NOT GOOD", self.failures),
        ):
            if items:
                lines += ["", f"  {title}:", *(f"    {item}" for item in items)]
        return "\n".join([*lines, "", "  all is well" if not self.failures else "  FAILED"])

    def _rows(self) -> list[tuple[str, str]]:
        tally = self.tally
        return [
            ("requests", str(tally.requests)),
            ("ended right", f"{tally.right}, {tally.tokens} tokens"),
            ("wrong answers", str(tally.wrong)),
            ("lost", _counts(tally.lost)),
            ("cancelled by clients", str(tally.cancelled)),
            ("refused, asked again", _counts(tally.refused)),
            ("excused, asked again", _counts(tally.excused)),
            ("moved to another worker", str(self.moved)),
            ("remote prefills", _counts(Counter(self.remote_prefills))),
            (
                "zombie writes refused",
                f"{self.stopped_writes} stopped, {self.late_notices} late notices",
            ),
            ("longest wait: first token", _wait(tally.first_token)),
            ("longest wait: next token", _wait(tally.between_tokens)),
            *self.facts.items(),
        ]


def _counts(counts: Counter[str]) -> str:
    total = counts.total()
    return f"{total}: " + ", ".join(f"{n} {k}" for k, n in counts.most_common()) if total else "0"


def _wait(wait: Wait) -> str:
    return f"{wait.seconds:.2f} s ({wait.whose})" if wait.whose else "none"
