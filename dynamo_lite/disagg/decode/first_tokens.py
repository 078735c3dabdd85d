"""First tokens that prefill workers send ahead of the decode engine; runs in its component.

A prefill worker samples the first token of an answer while it computes the prompt. That token goes
to the client at once. The decode engine computes it as well, in its first step, and goes on from
there; its equal token is dropped. If the two differ, the client's token stands, and the request
goes on from it as a new request of the engine. A prefill worker's token that comes after the
engine's is dropped.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry, Counter

from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.generate import GenerateRequest, PrefillCounts, TokenDelta
from dynamo_lite.protocol.prefill import FirstToken
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger(__name__)


@dataclass
class _Awaited:
    """A request of the engine without output so far."""

    request: GenerateRequest
    #: Tokens that end the answer; None if no prefill worker's token is taken.
    stops: frozenset[int] | None
    #: Monotonic.
    began: float
    #: Whether the client has the counts of the prompt.
    told: bool = False
    #: The first token, if the client has it from a prefill worker.
    token: int | None = None


class FirstTokens:
    """Requests go by the engine's own names; deltas have the caller's.

    Used on the component's event loop.
    """

    def __init__(self, registry: CollectorRegistry, clock: Clock = SYSTEM_CLOCK):
        self._now: Callable[[], float] = clock.monotonic
        self._awaited: dict[str, _Awaited] = {}
        self._arrived = Counter(
            "dynamo_lite_first_tokens",
            "First tokens that came from prefill workers: sent (to the client), late (the decode"
            " engine's came before, or the request has ended), last (it ends the answer, so the"
            " decode engine's is sent)",
            ["outcome"],
            registry=registry,
        )
        self._different = Counter(
            "dynamo_lite_first_token_differences",
            "Sent first tokens from prefill workers that differed from the decode engine's; the"
            " answer went on from the sent one",
            registry=registry,
        )

    def __len__(self) -> int:
        """Requests that are awaited."""
        return len(self._awaited)

    def expect(self, own: str, request: GenerateRequest, stops: frozenset[int] | None) -> None:
        """A prefill worker may send the first token of this request.

        stops: tokens that end its answer; None: the request continues one whose first token was
        sent (see `settle`).
        """
        self._awaited[own] = _Awaited(request, stops, self._now(), told=stops is None)

    def forget(self, own: str) -> None:
        """The request was aborted. Unknown names are ignored."""
        self._awaited.pop(own, None)

    def take(
        self, first: FirstToken, *, caller: str | None, vocabulary: int, block_size: int
    ) -> TokenDelta | None:
        """The delta to be sent now, if any.

        caller: the caller's id of the request; None if it does not run. vocabulary: number of
        tokens of the model. block_size: tokens of a block of the prefix cache; 0 without one.
        Raises ProtocolError for a token that does not fit.
        """
        awaited = self._awaited.get(first.request_id)
        if caller is None or awaited is None or awaited.stops is None or awaited.token is not None:
            self._arrived.labels("late").inc()
            return None
        request, token = awaited.request, first.token_id
        prompt_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        cached = first.cached_tokens
        if token >= vocabulary or cached >= prompt_tokens:
            raise ProtocolError(
                f"first token of {first.request_id}: token {token} of a vocabulary of"
                f" {vocabulary}, {cached} cached tokens of a prompt of {prompt_tokens}"
            )
        if token in awaited.stops:
            self._arrived.labels("last").inc()
            return None
        self._arrived.labels("sent").inc()
        awaited.token, awaited.told = token, True
        return TokenDelta(
            request_id=caller,
            token_ids=[token],
            # The engine would report these counts for a remote prefill, but has not scheduled the
            # request yet.
            prefill=PrefillCounts(
                prompt_tokens=prompt_tokens,
                local_cached_tokens=cached,
                external_cached_tokens=prompt_tokens - 1 - cached,
                waited_s=self._now() - awaited.began,
                cached_tokens=cached,
                created_cache_tokens=(
                    max(0, prompt_tokens - prompt_tokens % block_size - cached) if block_size else 0
                ),
            ),
        )

    def settle(self, own: str, delta: TokenDelta) -> TokenDelta | GenerateRequest:
        """What is left to send of an engine's output, perhaps an empty delta.

        A request: the engine has sampled another first token than the client got.
        Its request is to be aborted, and this one submitted in its place, which goes on from the
        client's token; see `expect`.
        """
        awaited = self._awaited.get(own)
        if awaited is None:
            return delta
        if delta.token_ids or delta.finish_reason is not None:
            del self._awaited[own]
        if awaited.told:
            delta = msgspec.structs.replace(delta, prefill=None)
        if awaited.token is not None and delta.token_ids:
            if delta.token_ids[0] == awaited.token:
                delta = msgspec.structs.replace(delta, token_ids=delta.token_ids[1:])
            elif delta.finish_reason == "error":
                delta = msgspec.structs.replace(delta, token_ids=[])
            else:
                return self._continuation(awaited, delta.token_ids[0])
        return delta

    def _continuation(self, awaited: _Awaited, other: int) -> GenerateRequest:
        self._different.inc()
        request, token = awaited.request, awaited.token
        assert token is not None
        logger.warning(
            "request %s: its first token from the prefill worker is %d, the decode engine's %d:"
            " it continues from the prefill worker's token, which the client has",
            request.request_id,
            token,
            other,
        )
        left_s = request.timeout_s
        if left_s is not None:
            left_s = max(0.0, left_s - (self._now() - awaited.began))
        return msgspec.structs.replace(
            request, output_token_ids=[*request.output_token_ids, token], timeout_s=left_s
        )
