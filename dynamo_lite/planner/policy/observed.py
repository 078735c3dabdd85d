"""Loads for the planner, made of what workers report. Pure.

What a worker does not report is unknown and not 0: the sums are then only what is needed at least,
and something beside them is left out, so that no worker is removed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_lite.planner.policy.inputs import DecodeLoad
from dynamo_lite.runtime.overview.model import LiveProcess


@dataclass(frozen=True, kw_only=True)
class Outstanding:
    """Remote prefills that have not ended, of all decode workers."""

    jobs: int = 0
    tokens: int = 0


def decode_load(workers: Sequence[LiveProcess], outstanding: Outstanding | None) -> DecodeLoad:
    """Without rates. outstanding: None: not known, and so not how many requests wait for a remote
    prefill."""
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
    sizes = [w.kv_tokens for w in workers if w.kv_tokens]
    remote = outstanding or Outstanding()
    parked = remote.tokens * len(sizes) / sum(sizes) if sizes else 0.0
    # Those that wait for a remote prefill hold their blocks already.
    without_blocks = max(waiting - remote.jobs, 0)
    waiting_known = outstanding is not None or not waiting
    each = used / running if running else 0.0
    complete = len(known) == len(workers)
    return DecodeLoad(
        kv_used=used if usages else None,
        kv_parked=None if outstanding is None else min(parked, used),
        kv_waiting=(
            each * without_blocks if waiting_known and len(usages) == len(workers) else None
        ),
        running=running,
        waiting=waiting if complete else None,
        queued=without_blocks if waiting_known and complete else None,
        max_running=min((w.max_running for w in workers if w.max_running), default=None),
    )
