"""Loads for the planner, made of what workers report. Pure.

What a worker does not report is unknown and not 0: the sums are then only what is needed at least,
and something beside them is left out, so that no worker is removed.
"""

from collections.abc import Sequence

from dynamo_lite.planner.policy.inputs import DecodeLoad
from dynamo_lite.runtime.overview.model import LiveProcess


def decode_load(workers: Sequence[LiveProcess], remote: int | None) -> DecodeLoad:
    """Without rates. remote: requests that wait for a remote prefill; None: not known."""
    known = [
        (w, w.running, w.waiting)
        for w in workers
        if w.running is not None and w.waiting is not None
    ]
    if not known:
        return DecodeLoad()
    running = sum(running for _, running, _ in known)
    waiting = sum(waiting for _, _, waiting in known)
    usages = [w.kv_usage for w, _, _ in known if w.kv_usage is not None]
    used = sum(usages)
    # Those that wait for a remote prefill hold their blocks already.
    without_blocks = max(waiting - (remote or 0), 0)
    waiting_known = remote is not None or not waiting
    each = used / running if running else 0.0
    complete = len(known) == len(workers)
    return DecodeLoad(
        kv_used=used if usages else None,
        kv_waiting=(
            each * without_blocks if waiting_known and len(usages) == len(workers) else None
        ),
        running=running,
        waiting=waiting if complete else None,
        queued=without_blocks if waiting_known and complete else None,
        max_running=min((w.max_running for w in workers if w.max_running), default=None),
    )
