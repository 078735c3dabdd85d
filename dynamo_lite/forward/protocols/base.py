"""What a handover protocol is: a few pure functions that make the bodies of both legs.

A request has up to two legs: one to a prefill engine, which computes the prompt's KV, and one to
a decode engine, which gets that KV and generates. A protocol says what each leg is sent, and in
which order. It does no I/O: the workflow (`forward/workflow.py`) does all of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

#: The top-level fields of a JSON body. Unchanged values are `msgspec.Raw`: the bytes of the client,
#: which are neither decoded nor encoded again.
Body: TypeAlias = dict[str, Any]
#: The `kv_transfer_params` of a prefill leg's answer, not decoded; `null` if it has none.
Params: TypeAlias = msgspec.Raw

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOKENS = "/inference/v1/generate"
SGLANG_GENERATE = "/generate"

#: Where stock vLLM reads `kv_transfer_params`.
VLLM_ROUTES = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES, TOKENS})
#: Those of them with `min_tokens`. Without it the first token of a prefill leg may be the end of
#: the sequence. Some connectors then drop the KV, and a decode engine that got its leg at the same
#: time waits for it until a timeout.
MIN_TOKENS_ROUTES = frozenset({CHAT, COMPLETIONS, TOKENS})

#: When the legs are sent. Serial: the decode leg needs the prefill leg's answer. Parallel: both at
#: once; the decode engine waits for the KV by itself. Single: only the decode leg; the decode
#: engine asks the prefill engine itself. Alone: there is no prefill engine.
LegOrder = Literal["serial", "parallel", "single", "alone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The facts about an engine that a protocol may use."""

    #: HOST:PORT of its HTTP server.
    address: str
    #: Where the engine's side of the handover listens.
    host: str
    port: int
    #: A second port, of MoRIIO only.
    notify_port: int = 0
    #: The engine's own identity, which is constant for one of its processes.
    identity: Mapping[str, Any] | None = None
    #: Ids of its data-parallel ranks.
    engine_ids: Mapping[int, str] = field(default_factory=dict[int, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverAttempt:
    """One try of one request, with ids of its own: engines pair legs by them."""

    route: str
    #: 32 hexadecimal digits, new for every attempt.
    unique: str
    #: The client's X-Request-Id, if it has a valid one.
    client_id: str
    #: One random number below 2^63 for each sequence of the request.
    rooms: tuple[int, ...]
    prefill: Peer
    decode: Peer

    @property
    def request_id(self) -> str:
        """Like the client's id, but unique."""
        return f"{self.client_id}-{self.unique}" if self.client_id else self.unique

    @property
    def decode_headers(self) -> Mapping[str, str]:
        """Of a decode leg that is not paired by its id: the client's own stays, and is in its
        answer."""
        return {} if self.client_id else {"x-request-id": self.request_id}


@dataclass(frozen=True, slots=True)
class Leg:
    """The request to one engine. headers: in addition to the client's own, in lower case."""

    body: Body
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    #: A request id with addresses, which the client must not see, and what it sees.
    hidden: tuple[str, str] | None = None

    def shows(self, data: bytes) -> bytes:
        """A whole answer, or whole events of it, without that id."""
        if self.hidden is None:
            return data
        found, shown = self.hidden
        return data.replace(found.encode(), shown.encode())


@dataclass(frozen=True, kw_only=True)
class ForwardProtocol:
    """One protocol; see docs/forwarding.md for how to add one."""

    name: str
    order: LegOrder
    routes: frozenset[str]
    #: Port of an engine's handover where the configuration names none; None: its HTTP port plus
    #: `port_offset`.
    default_port: int | None = None
    port_offset: int = 0
    prefill: Callable[[Body, HandoverAttempt], Leg]
    #: The last argument is that of `extract`; None in every order but serial.
    decode: Callable[[Body, HandoverAttempt, Any], Leg]
    #: What the decode leg needs of the prefill leg's answer; None if that has it not.
    extract: Callable[[Params], Any] = lambda params: None
    #: `transfer_mode` in the prefill leg's answer, where vLLM tells it, from 0.32 on. An answer of
    #: the other mode never reaches a decode engine, which would end or wait for minutes.
    transfer_mode: str = ""
    #: Parallel only: the engine's identity in an answer (`Peer.identity`), if it has one. Until it
    #: is known, the legs of the prefill engine are serial. None: legs need no identity.
    learn: Callable[[Params], Mapping[str, Any] | None] | None = None
    #: The prefill engine has to be asked for `Peer.engine_ids` at this path of its own port.
    query_path: str = ""
    #: Whether a decode engine can compute a prompt itself.
    decodes_alone: bool = True
    #: Whether one request may have several sequences (`n`, lists of prompts).
    batches: bool = False
    #: Whether the client's first token comes from the prefill leg.
    first_token_from_prefill: bool = False
    #: Serial only: the prefill leg names the decode engine, so no other one can take the KV.
    names_decode: bool = False
    #: Serial only: the decode engine is chosen after the prefill leg, with the load of that moment.
    staged: bool = False

    def order_for(self, prefill: Peer) -> LegOrder:
        if self.learn is not None and prefill.identity is None:
            return "serial"
        return self.order
