"""The planner's record and messages: wanted numbers of workers, and the supervisor's socket.

The records are JSON in etcd. A request to a supervisor, and its reply, are a JSON line each on a
connection of their own to a Unix socket beside `run.json`.
"""

from typing import Annotated

import msgspec

from dynamo_lite.protocol.records import LeaseId, Natural, Text

#: Longest line on a supervisor's socket, with its newline.
MAX_LINE_BYTES = 64 << 10
#: Name of a supervisor's socket in the state directory. Only its owner can open it (0600).
SUPERVISOR_SOCKET = "supervisor.sock"

#: Most workers of a role. A limit on mistakes: a number with too many digits must not fill the
#: process table.
MAX_WORKERS = 1000

ComponentName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9]{0,62}\Z")]
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_WORKERS)]
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
    #: Leases of all of them, as far as they have any. Empty under Kubernetes.
    leases: tuple[LeaseId, ...] = ()

    @property
    def present(self) -> int:
        """All workers that occupy devices."""
        return self.starting + self.ready + self.draining


# The supervisor's socket


class Counts(msgspec.Struct, frozen=True, kw_only=True, tag="counts", forbid_unknown_fields=True):
    """Asks for the numbers of workers."""


class Want(msgspec.Struct, frozen=True, kw_only=True, tag="want", forbid_unknown_fields=True):
    """Asks for a number of workers. The reply waits neither for starts nor for drains."""

    component: ComponentName
    #: Workers without draining ones, from now on.
    count: Number
    #: Where there are too many: those to drain. Only ones that were never ready or are restarted
    #: after a crash end without being named.
    leases: tuple[LeaseId, ...] = ()
    #: `SupervisorReply.version` of the numbers that it was decided on: it is refused after another
    #: order.
    version: Natural


SupervisorRequest = Counts | Want


class SupervisorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to every request."""

    #: Why the request was refused; empty if it was not.
    error: Text = ""
    #: It was refused because there was another order since.
    stale: bool = False
    #: The numbers after the request, by component.
    counts: dict[ComponentName, RoleCounts] = {}
    #: How many orders there were.
    version: Natural = 0


# Records in etcd


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The planner that acts, at `names.planner_leader_key(...)`, under that planner's lease."""

    lease_id: LeaseId


class WantedWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """The wanted number of one role: what was decided last."""

    #: Workers without draining ones.
    count: Number
    #: Whether it was a change to more.
    up: bool
    #: The planner's lease in hexadecimal, or USER@HOST.
    by: Text
    reason: Text
    at: Wall = 0.0


class WantedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted, at `names.planner_wanted_key(...)`. It has no lease, and is replaced only by
    compare-and-swap."""

    roles: dict[ComponentName, WantedWorkers] = {}
    #: Numbers that an operator has set and that are not reached yet. The load does not count for
    #: them.
    manual: dict[ComponentName, Number] = {}
    #: Why the planner decides nothing; None: it decides.
    paused: Text | None = None
    #: Who has changed `manual` or `paused`.
    by: Text = ""
