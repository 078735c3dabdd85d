"""The invariants of the record of the last switch to another role, and of the switch itself."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.planner import SwitchRecord
from dynamo_lite.simulation.graph_switches import SimSwitch

#: Phases of one switch follow each other in this order.
_PHASES = ("ordered", "asked", "withdrawing", "ended")


@dataclass
class SwitchJudge:
    """One switch at a time, recorded before it is ordered, and followed to its end."""

    violate: Callable[[str], None]
    counts: Counter[str]
    #: In etcd now.
    record: SwitchRecord | None = None
    #: Leases and new components of the switches that were taken.
    _taken: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])

    def stored(self, value: bytes | None) -> SwitchRecord | None:
        """The record has changed. Returns it if it has another phase than before."""
        before = self.record
        after = self.record = None if value is None else decode_json(value, SwitchRecord)
        if before is not None and before.phase != "ended":
            self._check_followed(before, after)
        if after is None:
            return None
        if before is not None and (before.id, before.phase) == (after.id, after.phase):
            return None
        if before is None or before.id != after.id:
            self.counts["planner switch"] += 1
        self.counts[f"planner switch {after.phase}"] += 1
        return after

    def _check_followed(self, before: SwitchRecord, after: SwitchRecord | None) -> None:
        if after is None:
            # The switch was not carried out.
            if (before.lease_id, before.to) in self._taken:
                self.violate(f"a switch is under way, and its record is deleted: {before}")
        elif before.id != after.id:
            self.violate(f"a switch is under way, and another one is recorded: {before}, {after}")
        elif _PHASES.index(after.phase) < _PHASES.index(before.phase):
            self.violate(f"a switch goes back from {before.phase} to {after.phase}")

    def wiped(self) -> None:
        self.record = None

    def ordered(self, lease_id: int, to: str) -> None:
        """A switch was taken for the first time. Call it only if etcd was not wiped."""
        one = self.record
        if one is None or one.phase == "ended" or (one.lease_id, one.to) != (lease_id, to):
            self.violate(f"{lease_id:x} is switched to {to}, and the record says {one}")

    def taken(self, lease_id: int, to: str) -> None:
        if (lease_id, to) in self._taken:
            self.violate(f"{lease_id:x} is switched to {to} twice")
        self._taken.add((lease_id, to))

    def cancelled(self, switch: SimSwitch) -> None:
        """As `ordered`."""
        one = self.record
        what = (switch.lease_id, switch.to)
        if one is None or one.phase != "withdrawing" or (one.lease_id, one.to) != what:
            self.violate(f"the switch of {switch.lease_id:x} is cancelled, and the record is {one}")

    def unsettled(self) -> str | None:
        one = self.record
        if one is None or one.phase == "ended":
            return None
        return f"a switch under way: {one}"
