"""The order of a supervisor to a running process: go on as another component."""

import asyncio
from pathlib import Path


class RoleOrder:
    """One order. plan: file with what the process becomes, a `ChildPlan`."""

    def __init__(self) -> None:
        self.plan: Path | None = None
        #: Why the process ends after its drain instead; empty while it will follow.
        self.refused = ""
        self._given = asyncio.Event()

    @property
    def stands(self) -> bool:
        """Whether the process goes on with `plan` after its drain."""
        return self.plan is not None and not self.refused

    def give(self, plan: Path) -> None:
        """Only the first one counts."""
        if self.plan is None:
            self.plan = plan
            self._given.set()

    def refuse(self, why: str) -> None:
        self.refused = self.refused or why

    async def given(self) -> Path:
        await self._given.wait()
        assert self.plan is not None
        return self.plan
