"""One request on its way."""

from dataclasses import dataclass, field

from dynamo_lite.forward.bodies import Request
from dynamo_lite.forward.client import Client, Incoming
from dynamo_lite.forward.placing import Tried


@dataclass(slots=True, kw_only=True)
class Job:
    """What one request is, where its answer goes, and what it has met so far."""

    incoming: Incoming
    request: Request
    client: Client
    tried: Tried = field(default_factory=Tried)
    #: Decode engines that failed.
    failed: int = 0
