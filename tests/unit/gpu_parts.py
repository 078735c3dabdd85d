"""Parts of `scripts/gpu_check` that end in ways that those which ship should not."""

import os
import signal
import time

from gpu_check.bench import Bench
from gpu_check.report import CheckFailed, Figures, Skip


def good(bench: Bench) -> Figures:
    return {"device": bench.here}


def missing(_bench: Bench) -> Figures:
    raise Skip("no such library")


def wrong(_bench: Bench) -> Figures:
    raise CheckFailed("3 of 8 bytes are wrong")


def broken(_bench: Bench) -> Figures:
    raise RuntimeError("no such device")


def gone(_bench: Bench) -> Figures:
    raise SystemExit("did not come up")


def crash(_bench: Bench) -> Figures:
    print("about to fall", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hang(_bench: Bench) -> Figures:
    time.sleep(600)
    return {}
