"""One request in flight."""

from dataclasses import dataclass, field

from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.client import Client, Incoming
from dynamo_lite.forward.notes import NotedClient, RequestNote
from dynamo_lite.forward.placing import Tried


@dataclass(slots=True, kw_only=True)
class ForwardJob:
    """One request, the client that gets its answer, and the engines that it has tried."""

    incoming: Incoming
    request: ClientRequest
    client: Client
    tried: Tried = field(default_factory=Tried)
    #: For `explain`.
    note: RequestNote
    #: Decode engines that failed.
    failed: int = 0


def noted(incoming: Incoming, request: ClientRequest, client: Client) -> ForwardJob:
    """A job whose answer and legs are noted."""
    tried = Tried()
    note = RequestNote(request.route, incoming.client_id, tried.choices)
    return ForwardJob(
        incoming=incoming,
        request=request,
        client=NotedClient(client, note),
        tried=tried,
        note=note,
    )
