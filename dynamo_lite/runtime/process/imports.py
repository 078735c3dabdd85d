"""Imports of large modules in a running process."""

import asyncio
import gc


async def import_in_thread(module: str) -> None:
    """Imports a module that takes seconds; the event loop, and so the lease, goes on meanwhile.

    Garbage collection pauses until then: vLLM's modules are more than half a million objects, which
    it would look at again and again and none of which goes away. Afterwards they are exempt from it
    (`gc.freeze`), so that later collections do not stop the event loop for long.
    """
    gc.disable()
    try:
        await asyncio.to_thread(__import__, module)
    finally:
        gc.freeze()
        gc.enable()
