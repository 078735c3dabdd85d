"""Records and messages of the planner, which changes the numbers of workers.

The records are JSON in etcd. Requests to a supervisor, and its replies, are JSON lines on a Unix
socket beside `run.json`: one request, one reply, in order.
"""

from typing import Annotated, Literal

import msgspec

from dynamo_lite.protocol.records import LeaseId, Natural, Text

#: Longest line on a supervisor's socket, with its newline.
MAX_LINE_BYTES = 64 << 10
#: Name of a supervisor's socket in the state directory. Only its owner can open it (0600).
SUPERVISOR_SOCKET = "supervisor.sock"

#: Most workers of a role.
MAX_WORKERS = 100_000

ComponentName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9]{0,62}\Z")]
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_WORKERS)]
#: Grows with each order of a namespace's planners.
Version = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
#: Seconds since the epoch, for display: the clocks of two hosts differ.
Wall = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class RoleCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one role, as the supervisor, or Kubernetes, counts them."""

    #: Started, but never ready so far.
    starting: Number = 0
    #: Ready, or restarting after a crash.
    ready: Number = 0
    #: Being removed; they still occupy their devices.
    draining: Number = 0
    #: Devices of one worker; 0 on a CPU.
    devices_each: Number = 0
    #: Devices that a new worker of this role could use now.
    devices_free: Number = 0

    @property
    def present(self) -> int:
        """All workers that occupy devices."""
        return self.starting + self.ready + self.draining


# The supervisor's socket


class Counts(msgspec.Struct, frozen=True, kw_only=True, tag="counts", forbid_unknown_fields=True):
    """Asks for the numbers of workers."""


class Add(msgspec.Struct, frozen=True, kw_only=True, tag="add", forbid_unknown_fields=True):
    """Asks for one more worker. The reply does not wait until it is ready."""

    component: ComponentName
    #: Higher than that of every earlier order, else it is refused.
    version: Version


class Remove(msgspec.Struct, frozen=True, kw_only=True, tag="remove", forbid_unknown_fields=True):
    """Asks to drain one worker without a restart. The reply does not wait for its end."""

    component: ComponentName
    #: The worker; 0: one that is restarted after a crash, or else one that was never ready. Refused
    #: if there is no such worker.
    lease_id: LeaseId
    #: As in `Add`.
    version: Version


SupervisorOrder = Add | Remove
SupervisorRequest = Counts | SupervisorOrder


class SupervisorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to every request."""

    ok: bool
    #: Why the request was refused; empty if it was not.
    error: Text = ""
    #: It was refused for its version: another process has given orders since.
    stale: bool = False
    #: It was refused because no process has the lease that it names.
    unknown: bool = False
    #: The numbers after the request, by component.
    counts: dict[ComponentName, RoleCounts] = {}
    #: The highest version of any order so far; 0 before the first.
    version: Natural = 0


# Records in etcd


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The planner that acts, at `names.planner_leader_key(...)`, under that planner's lease."""

    lease_id: LeaseId


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The last change of a component's number that a planner has ordered."""

    up: bool
    at: Wall


class TargetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of workers that are wanted, at `names.planner_target_key(...)`.

    Replaced only by compare-and-swap, so two writers never have the same version. It has no lease.
    """

    #: Numbers of serving workers, by component.
    counts: dict[ComponentName, Number]
    version: Version
    #: The planner's lease in hexadecimal, or USER@HOST.
    by: Text
    reason: Text
    at: Wall = 0.0
    #: Numbers that an operator has set and that are not reached yet. The load does not count for
    #: them.
    manual: dict[ComponentName, Number] = {}
    #: By component.
    changes: dict[ComponentName, Change] = {}


#: ordered: the supervisor, or Kubernetes, may or may not have the order. leaving: the victim's
#: lease was revoked, and it drains before the order is given. asked: the order was taken.
#: withdrawing: a start that took too long is being cancelled.
ChangePhase = Literal["ordered", "leaving", "asked", "withdrawing"]


class OperationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One change that is under way, at `names.planner_operation_key(...)`.

    It has no lease: the next leader resumes it. Deleted when the change is complete.
    """

    id: Version
    kind: Literal["add", "remove"]
    component: ComponentName
    phase: ChangePhase
    #: Workers of the component, without draining ones, when the change is complete.
    count: Number
    #: For `add`: the number of workers before. A withdrawal leaves this many.
    before: Number = 0
    #: For `remove`: lease of the victim; 0: a starting worker.
    lease_id: LeaseId = 0
    #: The victim's host, which is its pod's name under Kubernetes.
    host: Text = ""
    status_url: Text = ""
    reason: Text = ""
    at: Wall = 0.0
    #: How long it may take. A leader that resumes it grants this time again.
    within_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 600.0


class PauseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """While it exists, at `names.planner_pause_key(...)`, the planner decides nothing."""

    by: Text
    reason: Text = ""
    at: Wall = 0.0
