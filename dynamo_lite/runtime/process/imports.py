"""Imports of large modules in a running process."""

import asyncio
import gc


async def import_in_thread(module: str) -> None:
    """Imports a module that takes seconds; the event loop, and so the lease, goes on meanwhile.

    Garbage collection pauses until then: vLLM's modules make about a million objects, which it
    would look at again and again, and one in fifty of which is garbage. Afterwards all are exempt
    from it (`gc.freeze`), so that later collections do not stop the event loop for long.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        await asyncio.to_thread(__import__, module)
    finally:
        gc.freeze()
        if collects:
            gc.enable()
