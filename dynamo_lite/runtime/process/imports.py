"""Imports of large modules."""

import gc
import importlib
import sys


def import_large(module: str) -> None:
    """Imports a module that takes seconds; in a thread where an event loop runs.

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
