"""When the kernels of a step have really run."""

from collections.abc import Callable

import torch


def step_ended(*, on_gpu: bool) -> Callable[[], bool]:
    """When what was launched last, a step or one of its layers, has really left its KV.

    On a CPU it has ended. On a GPU it is queued: an event behind it tells.
    """
    if not on_gpu:
        return lambda: True
    event = torch.cuda.Event()
    event.record()
    return event.query
