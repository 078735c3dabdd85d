"""The two clocks of a process, as one value that a simulation can replace."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """monotonic: seconds, for durations and deadlines within one machine; never jumps.

    wall: seconds since the epoch, for what other hosts read; may jump.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


SYSTEM_CLOCK = Clock()
