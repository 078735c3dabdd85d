"""A pytest plugin: test modules import vLLM, torch and transformers, about a million objects, and
Python looks at each of them again and again. While they are imported it does not collect garbage;
while tests run, and at the end of the process, it leaves them out."""

import atexit
import gc
import os
import sys

_code: int | None = None


def pytest_configure() -> None:
    gc.disable()
    # Handlers that are registered later run before it.
    atexit.register(_leave)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(exitstatus: int) -> None:
    global _code
    _code = int(exitstatus)


def _leave() -> None:
    """Python's end frees the heap object by object, which takes seconds."""
    if _code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_code)
