"""Imports of large modules."""

import asyncio
import gc
import importlib
import sys


async def import_in_thread(module: str) -> None:
    """Imports a module that takes seconds; the event loop, and so the lease, goes on meanwhile."""
    await asyncio.to_thread(import_large, module)


def import_large(module: str) -> None:
    """Imports a module that takes seconds.

    Garbage collection pauses: vLLM's modules make about a million objects, which it would look
    at again and again, and one in fifty of which is garbage. Afterwards all are exempt from it
    (`gc.freeze`), so that later collections do not stop the process for long.
    """
    if module in sys.modules:
        # What is frozen is never collected, and the process may have made garbage since.
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(module)
    finally:
        gc.freeze()
        if collects:
            gc.enable()
