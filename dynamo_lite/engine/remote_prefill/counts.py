"""What a half has counted since it was last asked.

A half adds to a small dictionary, which the engine carries to its component
with the statistics of the same step, in order and without loss.
"""

from typing import Any

DECISION = "decision"  # + "/verdict/reason"
REMOTE = "remote"  # + "/outcome"
BYTES = "bytes"
DESCRIPTORS = "descriptors"
SECONDS = "seconds"  # a list of durations
STAGE = "stage"  # + "/stage": a list of durations
LATE = "late_notices"
FENCED = "fenced_writes"
ENDED = "ended"  # a list of [attempt, outcome, detail]: see `AttemptOutcome`


class Counts:
    """data: name -> number, or list of numbers."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}

    def add(self, name: str, amount: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + amount

    def append(self, name: str, value: Any) -> None:
        self.data.setdefault(name, []).append(value)

    def add_stage(self, stage: str, seconds: float) -> None:
        self.append(f"{STAGE}/{stage}", seconds)

    def take(self) -> dict[str, Any]:
        """What was collected since the last call."""
        taken, self.data = self.data, {}
        return taken
