"""What the engine's thread and the bridge's share of a decode engine: the ledger."""

import threading
from collections.abc import Iterable

from dynamo_lite.disagg.attempts.attempt import AttemptState
from dynamo_lite.disagg.attempts.instructions import FOR_ENGINE, Instruction
from dynamo_lite.disagg.attempts.ledger import Ledger


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
