"""Passes a request's own deadline to the scheduler half of a decode engine.

Times are monotonic: the engine's process and its component are on one machine.
"""

import math
from typing import Any

from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.disagg.transfer_params import DecodeRequestParams, pack, unpack


def time_limit(timeout_s: float | None, now: float) -> dict[str, Any] | None:
    """The `kv_transfer_params` of a request with `timeout_s` left; None: without a limit."""
    return None if timeout_s is None else pack(DecodeRequestParams(deadline=now + timeout_s))


def time_left_s(request: Prompt, now: float) -> float:
    """Infinite for a request without a limit."""
    params = unpack(request, DecodeRequestParams)
    return math.inf if params is None else params.deadline - now
