"""Imports of large modules."""

import asyncio
import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator


async def import_in_thread(module: str) -> None:
    """Imports a module that takes seconds; the event loop, and so the lease, goes on meanwhile."""
    with _without_collections(module):
        await asyncio.to_thread(importlib.import_module, module)


def import_large(module: str) -> None:
    """Imports a module that takes seconds."""
    with _without_collections(module):
        importlib.import_module(module)


@contextlib.contextmanager
def _without_collections(module: str) -> Iterator[None]:
    """Garbage collection pauses: vLLM's modules make about a million objects, which it would look
    at again and again, and one in fifty of which is garbage. Afterwards all are exempt from it
    (`gc.freeze`), so that later collections do not stop the process for long.
    """
    if module in sys.modules:
        # What is frozen is never collected, and the process may have made garbage since.
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
