"""A pytest plugin: an event loop that nobody closes is found when Python frees it, in whichever
test that happens. Its name in the warning therefore shows which test made it, and where."""

import asyncio
import os
import traceback


class _NamedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        stack = traceback.StackSummary.extract(
            traceback.walk_stack(None), limit=12, lookup_lines=False
        )
        self._made_at = [f"{frame.filename}:{frame.lineno}" for frame in stack]
        self._made_in = os.environ.get("PYTEST_CURRENT_TEST", "no test")

    def __repr__(self) -> str:
        return f"<{super().__repr__()} made in {self._made_in} at {' < '.join(self._made_at)}>"


class _Policy(asyncio.DefaultEventLoopPolicy):
    _loop_factory = _NamedLoop


def pytest_configure() -> None:
    asyncio.set_event_loop_policy(_Policy())
