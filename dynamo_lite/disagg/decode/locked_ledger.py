"""What the engine's thread and the bridge's share of a decode engine: the ledger, locked."""

import threading
from collections.abc import Iterable

from dynamo_lite.policy.instructions import FOR_ENGINE, Instruction
from dynamo_lite.policy.ledger import Ledger


class LockedLedger:
    """The ledger with its lock, and the engine-side instructions waiting for a step."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.lock = threading.Lock()
        self._for_engine: list[Instruction] = []

    def leave_for_engine(self, instructions: Iterable[Instruction]) -> None:
        """Keeps those that the engine's next step carries out. Call with the lock held."""
        self._for_engine += [i for i in instructions if isinstance(i, FOR_ENGINE)]

    def take_for_engine(self) -> list[Instruction]:
        """Call with the lock held."""
        taken, self._for_engine = self._for_engine, []
        return taken

    @property
    def busy(self) -> bool:
        """Whether the engine must keep stepping because of the ledger."""
        with self.lock:  # both under one lock, because an entry turns into an instruction
            return bool(self._for_engine) or self.ledger.quarantined > 0

    @property
    def awaits_writes(self) -> bool:
        """Whether any remote write may be in flight. Call with the lock held."""
        return bool(self.ledger.waiting or self.ledger.quarantined)
