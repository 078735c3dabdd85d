"""The clocks of a process, as one value that a simulation can replace."""

import time
from collections.abc import Callable
from dataclasses import dataclass


def boottime() -> float:
    """Seconds since the boot, the time in which the host was suspended included.

    CLOCK_MONOTONIC stands still while a host is suspended or hibernated. Whatever others
    may take back after a time (a lease, blocks under a fence) counts by this clock.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Clock:
    """monotonic: seconds, for durations and deadlines within one process; never jumps.

    wall: seconds since the epoch, for what other hosts read; may jump.
    boottime: see `boottime`.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    boottime: Callable[[], float] = boottime


SYSTEM_CLOCK = Clock()
