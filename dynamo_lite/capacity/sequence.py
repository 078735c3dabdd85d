"""One request at one engine."""

from dataclasses import dataclass, field

from dynamo_lite.capacity.request import TraceRequest
from dynamo_lite.policy.routing.kv_chain import ChainHash


@dataclass(eq=False, slots=True)
class Sequence:
    """Written by the engine, except `first_at` and `note`."""

    request: TraceRequest
    #: Tokens that need KV before the next token: the prompt, and after a preemption the output.
    context: int
    #: Output tokens to be generated; 0 in a prefill engine.
    left: int
    #: A prefill engine computes it before others (`policy/decision/lanes.py`).
    short: bool = False
    #: Its KV comes from a prefill worker: only the last prompt token is computed here.
    remote: bool = False
    #: Tokens of `context` that have KV.
    computed: int = 0
    #: Blocks of the prefix cache that it uses, and tokens of its own.
    blocks: list[ChainHash] = field(default_factory=list[ChainHash])
    own: int = 0
    #: Number of the step after which it decodes, and of the one after which it ends.
    joined: int = -1
    ends: int = -1
    #: When the client got the first token; set before `arrived` if it came from elsewhere.
    first_at: float | None = None
    #: When the client got the last token, if the next one is late.
    token_at: float | None = None
    #: For the owner of the engine.
    note: object = None
