"""The parameters that a component hands to its engine's scheduler half with a request.

vLLM carries them as a plain dict under one key of a request's `extra_args` and shows them as
`kv_transfer_params`. Parameters of a client never get there: `vllm/wire.py` removes them.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

import msgspec

from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.generate import Adapter
from dynamo_lite.protocol.prefill import (
    BlockId,
    EngineId,
    RemotePrefillRequest,
)
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.claim_cells import Cell

_Params = TypeVar("_Params", bound=msgspec.Struct)


class PrefillLength(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a job's parameters that says how long the job is."""

    #: Tokens that the decode engine holds; a multiple of `block_size`.
    num_computed_tokens: Annotated[int, msgspec.Meta(ge=0)]
    #: Tokens whose KV is wanted, from position 0. The request may have one more, to sample from it.
    num_tokens: Annotated[int, msgspec.Meta(ge=1)]


class PrefillJobParams(PrefillLength, frozen=True, kw_only=True):
    """A remote prefill, for the scheduler half of a prefill engine."""

    #: The decode engine that gets the KV.
    engine_id: EngineId
    #: The decode engine's block size in tokens.
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    #: The decode engine's blocks from position `num_computed_tokens` on; to be written.
    block_ids: list[BlockId]
    #: The decode engine's blocks before that position, if they may be read.
    prefix_block_ids: list[BlockId] = []
    #: `block_ids` of the other KV groups, see `RemotePrefillRequest`.
    other_groups: list[list[BlockId]] = []
    #: The decode engine's `EngineMetadata` in msgpack.
    target: bytes
    #: Of the attempt's claim.
    cell: Cell

    @classmethod
    def of(cls, job: RemotePrefillRequest, target: EngineMetadata, cell: Cell) -> Self:
        return cls(
            engine_id=job.engine_id,
            num_computed_tokens=job.num_computed_tokens,
            num_tokens=len(job.prompt_token_ids),
            block_size=target.block_size_tokens,
            block_ids=job.block_ids,
            prefix_block_ids=job.prefix_block_ids,
            other_groups=job.other_groups,
            target=encode(target),
            cell=cell,
        )


class DecodeRequestParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A client's request, for the scheduler half of a decode engine."""

    #: End of the request's time, in seconds on this host's monotonic clock; None: no limit.
    deadline: float | None = None
    #: Whether a prefill worker may compute the request's first token.
    first_token: bool = False
    #: The request's LoRA adapter, with the digest of this worker's files.
    adapter: Adapter | None = None

    def time_left_s(self, now: float) -> float:
        """Infinite without a limit. now: monotonic."""
        return math.inf if self.deadline is None else self.deadline - now


def pack(params: msgspec.Struct) -> dict[str, Any]:
    return msgspec.to_builtins(params, builtin_types=(bytes,))


def unpack(request: Prompt, kind: type[_Params]) -> _Params | None:
    """None for a request without parameters; unknown keys are ignored.

    Raises ProtocolError, which names the field, if the parameters are not of `kind`.
    """
    params = request.kv_transfer_params
    if not params:
        return None
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"request {request.request_id}: kv_transfer_params: {exc}") from exc


def decode_params(
    timeout_s: float | None, now: float, adapter: Adapter | None = None
) -> dict[str, Any] | None:
    """The `kv_transfer_params` of a request with `timeout_s` left; None: it needs none.

    now: monotonic. The engine's process and its component are on one machine.
    """
    if timeout_s is None and adapter is None:
        return None
    deadline = None if timeout_s is None else now + timeout_s
    return pack(DecodeRequestParams(deadline=deadline, adapter=adapter))


def with_first_token(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `kv_transfer_params` of a request whose first token a prefill worker may compute.

    params: from `decode_params`.
    """
    return {**(params or {}), "first_token": True}


def decode_params_of(request: Prompt) -> DecodeRequestParams:
    """Also for a request without parameters. Raises ProtocolError."""
    return unpack(request, DecodeRequestParams) or DecodeRequestParams()
