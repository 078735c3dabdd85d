"""A request's own time limit, on its way to the scheduler half of a decode engine.

Times are monotonic: the engine's process and the one in front of it are on one machine.
"""

import math

from dynamo_lite.disagg.engine_api import Prompt

_DEADLINE = "deadline"


def time_limit(timeout_s: float | None, now: float) -> dict[str, float] | None:
    """The `kv_transfer_params` of a request that has so much time left; None: any."""
    return None if timeout_s is None else {_DEADLINE: now + timeout_s}


def time_left_s(request: Prompt, now: float) -> float:
    """Infinite for a request without a limit."""
    params = request.kv_transfer_params
    return params[_DEADLINE] - now if params else math.inf
