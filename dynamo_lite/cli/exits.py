"""Exit codes of the commands of `dynamo-lite`, and how Ctrl-C ends one.

0: done or drained, 1: could not start or operate, 2: bad input, 130: killed by a second signal, or
interrupted.
"""

import contextlib
import sys
from collections.abc import Iterator

import typer

#: Also where the answer to a command's question is no.
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
#: A worker has left, and its grace was over before its work.
EXIT_CUT_OFF = 3
EXIT_INTERRUPTED = 130


@contextlib.contextmanager
def interruptible(says: str) -> Iterator[None]:
    """After Ctrl-C in the body `says` is printed, and the command ends with EXIT_INTERRUPTED."""
    try:
        yield
    except KeyboardInterrupt:
        print(says, file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
