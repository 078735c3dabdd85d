"""What an edge knows about an HTTP request beyond its body."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm.exceptions import VLLMError

from dynamo_lite.protocol.trace import TraceContext

#: Longest session id in characters; the rest of a longer one is dropped.
MAX_SESSION = 256


@dataclass
class RequestContext:
    """One HTTP request."""

    timeout_s: float
    #: End of the request's time, by the event loop's clock.
    deadline: float
    #: The client's session id.
    session: str | None = None
    #: The client's span; None if it has named none.
    trace: TraceContext | None = None
    #: With which a sequence has ended, or was refused.
    error: VLLMError | None = None
    #: Called each time before a sequence is sent to a worker.
    on_placing: Callable[[], None] = lambda: None
