"""Prompts for which a decode engine has no free blocks, and those that go first meanwhile.

An engine asks about its waiting prompts in order, and stops at the first one that it finds no
blocks for: all those behind it wait as well, although they may be short. A prompt about which
it is told nothing yet, it skips. So a prompt that found no blocks is skipped until enough are
free, but no more often than `MAX_PASSED` others have gone before it. Then the engine stops at
it again, and the next free blocks are its own.
"""

from dataclasses import dataclass

#: Once so many prompts have gone before one that finds no blocks, nobody does any more.
MAX_PASSED = 32

#: So many prompts are skipped in a step: each is looked at in every step meanwhile.
MAX_SKIPPED = 16

#: So often the first one of them is tried though it may need more than what is free: of its
#: blocks some may be cached by now, and in use.
RETRY_STEPS = 16


@dataclass
class _Short:
    """most: blocks that it needs at most. passed: prompts that went before it."""

    most: int
    passed: int = 0


class Passing:
    """Runs on the engine's thread. Costs nothing while every prompt finds its blocks."""

    def __init__(self) -> None:
        #: Blocks that a new prompt must leave free. Set when the engine has its block pool.
        self.kept_free = 0
        self._short: dict[str, _Short] = {}
        self._skipped: list[str] = []
        #: Who was told something, and has no blocks yet.
        self._asked: tuple[str, int] | None = None
        self._step = self._retry = 0

    def skips(self, request_id: str, free: int) -> bool:
        """Whether the request is to be told nothing in this step. free: blocks, now."""
        short = self._short.get(request_id)
        if short is None or free >= short.most:
            return False
        if short.passed >= MAX_PASSED or len(self._skipped) >= MAX_SKIPPED:
            return False
        if self._step >= self._retry and not self._skipped:
            return False
        self._skipped.append(request_id)
        return True

    def told(self, request_id: str, most: int) -> None:
        """The engine looks for its blocks now. most: as many as it can need."""
        self._asked = request_id, most + self.kept_free

    def allocated(self, request_id: str) -> None:
        """A new prompt has found its blocks."""
        self._asked = None
        self._short.pop(request_id, None)
        for passed in self._skipped:
            if passed in self._short:
                self._short[passed].passed += 1

    def end_step(self, free: int) -> None:
        """The engine asks nobody any more. free: blocks, now."""
        self._step += 1
        self._skipped.clear()
        if self._asked is None:
            return
        (request_id, most), self._asked = self._asked, None
        if most > free:
            self._short.setdefault(request_id, _Short(most))
            if self._step > self._retry:
                self._retry = self._step + RETRY_STEPS - 1

    def finished(self, request_id: str) -> None:
        self._short.pop(request_id, None)
        if request_id in self._skipped:
            self._skipped.remove(request_id)
        if self._asked is not None and self._asked[0] == request_id:
            self._asked = None
