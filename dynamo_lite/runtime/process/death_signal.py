"""Death signals: a child process gets a signal from the kernel when its parent ends (Linux)."""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(sig: int = signal.SIGTERM) -> None:
    """Asks the kernel to send `sig` to this process when its parent ends (Linux).

    The parent may have ended before the call: compare `os.getppid()` afterwards.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0)


def death_signal_hook(sig: int = signal.SIGTERM) -> Callable[[], None]:
    """A `preexec_fn` that sets a death signal for any program.

    It runs between fork and exec, so it makes only two system calls.
    """
    parent = os.getpid()

    def hook() -> None:
        die_with_parent(sig)
        if os.getppid() != parent:
            os._exit(1)

    return hook
