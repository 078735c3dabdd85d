"""What the engine's thread and the bridge's share of a decode engine: the ledger, and polling."""

import threading
from collections.abc import Callable, Iterable

from dynamo_lite.policy.attempts.attempt import AttemptState
from dynamo_lite.policy.attempts.instructions import FOR_ENGINE, Instruction
from dynamo_lite.policy.attempts.ledger import Ledger
from dynamo_lite.protocol.prefill import Listen


class LockedLedger:
    """The ledger with its lock, and the instructions and grants that wait for a step."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.lock = threading.Lock()
        self._for_engine: list[Instruction] = []
        self._grants: dict[str, int] = {}

    def leave_for_engine(self, instructions: Iterable[Instruction]) -> None:
        """Keeps those that the engine's next step carries out. Call with the lock held."""
        self._for_engine += [i for i in instructions if isinstance(i, FOR_ENGINE)]

    def take_for_engine(self) -> list[Instruction]:
        """Call with the lock held."""
        taken, self._for_engine = self._for_engine, []
        return taken

    def leave_grant(self, attempt: str, grant: int) -> None:
        """A claim was granted; the ranks learn it with the next step. Call with the lock held."""
        self._grants[attempt] = grant

    def take_grants(self) -> dict[str, int]:
        """Those of attempts that are still claimed. Call with the lock held."""
        taken, self._grants = self._grants, {}
        return {a: g for a, g in taken.items() if self.ledger.state(a) is AttemptState.CLAIMED}

    @property
    def busy(self) -> bool:
        """Whether the engine must keep stepping because of the ledger."""
        with self.lock:  # both under one lock, because an entry turns into an instruction
            return bool(self._for_engine) or self.ledger.quarantined > 0

    @property
    def awaits_writes(self) -> bool:
        """Whether any remote write may be in flight. Call with the lock held."""
        return bool(self.ledger.waiting or self.ledger.quarantined)


class PollWindow:
    """Until when a decode engine polls for transfers although no request waits for one.

    An idle engine makes no steps, and a NIXL connection is established only during steps. So a
    prefill worker that connects or tests its link first sends a `Listen`. The bridge's thread
    calls `extend`, the engine's thread everything else. now: monotonic.
    """

    def __init__(self, now: Callable[[], float]):
        self._now = now
        #: By the writer's lease id, monotonic seconds. Never changed, only replaced.
        self._until: dict[int, float] = {}

    def extend(self, listen: Listen) -> None:
        """The last message of each writer counts."""
        now = self._now()
        until = {**self._until, listen.writer_lease_id: now + listen.for_s}
        self._until = {writer: end for writer, end in until.items() if end > now}

    def __bool__(self) -> bool:
        until = self._until
        return bool(until) and max(until.values()) > self._now()
