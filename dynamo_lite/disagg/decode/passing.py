"""Lets short prompts pass a prompt for which a decode engine has too few free blocks.

An engine schedules its waiting prompts in order and stops at the first one that does not fit
into its free blocks: all prompts behind it wait as well, even short ones. The engine skips a
prompt if the scheduler half gives no answer for it. So a prompt that did not fit is skipped
until enough blocks are free, but only until `MAX_PASSED` other prompts have passed it. Then
the engine stops at it again, and the next free blocks go to it.
"""

from dataclasses import dataclass

#: How many prompts may pass one that does not fit.
MAX_PASSED = 32

#: How many prompts are skipped in one step. The engine looks at each of them in every step.
MAX_SKIPPED = 16

#: The first skipped prompt is tried again after this many steps, even if it may need more blocks
#: than are free: some of its blocks may be cached by now, and in use.
RETRY_STEPS = 16


@dataclass
class _Short:
    #: The most blocks that the prompt can need.
    most: int
    #: How many prompts have passed it.
    passed: int = 0


class Passing:
    """Runs on the engine's thread. Costs nothing while every prompt fits.

    kept_free: blocks that a new prompt must leave free.
    """

    def __init__(self, kept_free: int = 0):
        self._kept_free = kept_free
        self._short: dict[str, _Short] = {}
        self._skipped: list[str] = []
        #: The request that got an answer and has no blocks yet, and the most that it can need.
        self._trying: tuple[str, int] | None = None
        self._step = self._retry = 0

    def skips(self, request_id: str, free: int) -> bool:
        """Whether the request gets no answer in this step. free: blocks that are free now."""
        short = self._short.get(request_id)
        if short is None or free >= short.most:
            return False
        if short.passed >= MAX_PASSED or len(self._skipped) >= MAX_SKIPPED:
            return False
        if self._step >= self._retry and not self._skipped:
            return False
        self._skipped.append(request_id)
        return True

    def answered(self, request_id: str, most: int) -> None:
        """The engine allocates the request's blocks next. most: the most that it can need."""
        self._trying = request_id, most + self._kept_free

    def allocated(self, request_id: str) -> None:
        """A new prompt has its blocks."""
        self._trying = None
        self._short.pop(request_id, None)
        for passed in self._skipped:
            if passed in self._short:
                self._short[passed].passed += 1

    def end_step(self, free: int) -> None:
        """The engine schedules no further prompt in this step. free: blocks that are free now."""
        self._step += 1
        self._skipped.clear()
        if self._trying is None:
            return
        (request_id, most), self._trying = self._trying, None
        if most > free:
            self._short.setdefault(request_id, _Short(most))
            if self._step > self._retry:
                self._retry = self._step + RETRY_STEPS - 1

    def finished(self, request_id: str) -> None:
        """The request has ended."""
        self._short.pop(request_id, None)
        if request_id in self._skipped:
            self._skipped.remove(request_id)
        if self._trying is not None and self._trying[0] == request_id:
            self._trying = None
