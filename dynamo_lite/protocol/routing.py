"""Messages between Frontends and a router in a process of its own.

A Frontend's roster has no routers of another wire version, so it asks none of them.
"""

from typing import Annotated

import msgspec

from dynamo_lite.protocol.codec import Decoder
from dynamo_lite.protocol.generate import Adapter, RequestId, TokenId
from dynamo_lite.protocol.records import LeaseId


class PickRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Frontend to router: which of these workers is to take this request?"""

    #: The Frontend's lease.
    client: LeaseId
    request_id: RequestId
    prompt_token_ids: list[TokenId]
    #: Leases of the workers to choose from.
    candidates: list[LeaseId]
    cache_salt: str | None = None
    adapter: Adapter | None = None
    #: Its KV depends on images or other media, or embeddings.
    media: bool = False
    session: Annotated[str, msgspec.Meta(max_length=256)] | None = None


class Chosen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker. The router counts the request there until it receives its outcome."""

    lease_id: LeaseId
    reason: str


class NobodyKnown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The router knows none of the candidates."""


class RequestOutcomes(msgspec.Struct, frozen=True, kw_only=True):
    """Frontend to router: outcomes of requests that it was asked about."""

    client: LeaseId
    #: Requests with a first token.
    answered: list[RequestId] = []
    #: Requests that have ended, or were not accepted.
    released: list[RequestId] = []


decode_pick_request: Decoder[PickRequest] = Decoder(PickRequest)
decode_pick_reply: Decoder[Chosen | NobodyKnown] = Decoder(Chosen | NobodyKnown)
decode_fates: Decoder[RequestOutcomes] = Decoder(RequestOutcomes)
