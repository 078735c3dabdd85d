"""The clocks of a process, in one object that a simulation can replace."""

import time
from collections.abc import Callable
from dataclasses import dataclass


def boottime() -> float:
    """Seconds since the boot, including the time in which the host was suspended.

    CLOCK_MONOTONIC stops while a host is suspended or hibernated. Deadlines after which others
    may reuse something (a lease, blocks under a claim) are measured by this clock.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Clock:
    """The clocks that a component uses. All return seconds."""

    #: For durations and deadlines within one process; never jumps.
    monotonic: Callable[[], float] = time.monotonic
    #: Since the epoch, for timestamps that other hosts read; may jump.
    wall: Callable[[], float] = time.time
    #: See `boottime`.
    boottime: Callable[[], float] = boottime


SYSTEM_CLOCK = Clock()
