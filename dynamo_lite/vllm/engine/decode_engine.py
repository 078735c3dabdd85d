"""Stock vLLM as a decode engine: requests in, one batch of deltas per engine step out."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason

from dynamo_lite.disagg.decode.first_tokens import FirstTokens
from dynamo_lite.disagg.request_ids import RequestIds
from dynamo_lite.protocol.errors import ProtocolError, Refused
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.prefill import FirstToken
from dynamo_lite.vllm import requests
from dynamo_lite.vllm.engine.core import VllmEngine
from dynamo_lite.vllm.engine.process import EngineContext
from dynamo_lite.vllm.first_token import stop_tokens
from dynamo_lite.vllm.inputs import most_embeds
from dynamo_lite.vllm.wire import delta_from_output

logger = logging.getLogger(__name__)


def _unkept(params: SamplingParams, config: VllmConfig) -> str:
    """Which of a request's parameters the engine's configuration does not keep; "" if it keeps all.
    vLLM checks these in its front half, which here does not have the engine's configuration."""
    if params.prompt_logprobs is not None and config.cache_config.kv_sharing_fast_prefill:
        return "prompt_logprobs would be wrong: this engine has kv-sharing-fast-prefill"
    reasoning = config.reasoning_config
    if params.thinking_token_budget is not None and (reasoning is None or not reasoning.enabled):
        return "thinking_token_budget: the workers have no reasoning-parser"
    return ""


class VllmDecodeEngine(VllmEngine):
    """Implements DecodeEngine.

    publishes_kv: whether it publishes KV events. takes_first_tokens: whether it takes first tokens
    from prefill workers.
    """

    def __init__(
        self,
        context: EngineContext,
        *,
        publishes_kv: bool = False,
        takes_first_tokens: bool = False,
    ):
        super().__init__(context, publishes_kv=publishes_kv)
        self._first_tokens = FirstTokens(context.registry) if takes_first_tokens else None
        self._ids = RequestIds()
        #: What the engine compiles all grammars with: the backend of its first one.
        self._backend: str | None = None
        #: See `most_embeds`.
        self._most_embeds: Mapping[str, int] = {}

    def _configure(self) -> VllmConfig:
        config = super()._configure()
        self._most_embeds = most_embeds(config)
        return config

    async def submit(self, request: GenerateRequest) -> None:
        """Raises Refused if this engine cannot take the request. If it is cancelled, the caller
        must abort the request."""
        made = await self._engine_request(request)
        self._check_backend(made)
        made.request_id = self._ids.enter(request.request_id)
        if self._first_tokens is not None:
            self._expect_first_token(self._first_tokens, request, made)
        try:
            await self._add(made)
        except Exception:
            self._leave([request.request_id])
            raise
        # After a cancel the engine's process may already have the request, and `abort` needs its
        # name.

    async def _engine_request(self, request: GenerateRequest) -> EngineCoreRequest:
        """Raises Refused."""
        made = requests.generation(
            request,
            self.config.model_config,
            connected=self._engine_config is not None,
            loaded=await self._loaded(request.adapter),
            most_embeds=self._most_embeds,
            speculation=self.config.speculative_config,
        )
        if made.sampling_params is not None and (why := _unkept(made.sampling_params, self.config)):
            raise Refused(why, elsewhere=False)
        return made

    def _check_backend(self, made: EngineCoreRequest) -> None:
        """Raises Refused for a grammar that was checked for another backend than the engine's."""
        params = made.sampling_params
        if params is None or params.structured_outputs is None:
            return
        backend = params.structured_outputs._backend
        self._backend = self._backend or backend
        if backend != self._backend:
            raise Refused(
                f"this engine compiles grammars with {self._backend}, not {backend}: give all"
                " Frontends the same structured-outputs-config, and restart the worker",
                elsewhere=True,
            )

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._abort(self._leave(request_ids))

    def first_token(self, first: FirstToken) -> TokenDelta | None:
        if self._first_tokens is None:
            raise ProtocolError(f"first token of {first.request_id}, which did not ask for it")
        cache = self.config.cache_config
        return self._first_tokens.take(
            first,
            caller=self._ids.running(first.request_id),
            vocabulary=self.config.model_config.get_vocab_size(),
            block_size=cache.block_size if cache.enable_prefix_caching else 0,
        )

    async def steps(self) -> AsyncIterator[list[TokenDelta]]:
        """Ends when the engine is closed. Raises EngineDied if its process ended by itself."""
        while (outputs := await self._next()) is not None:
            if outputs.outputs:
                deltas, instead = self._deltas(outputs)
                for request in instead:
                    deltas += await self._go_on(request)
                yield deltas

    def _expect_first_token(
        self, first_tokens: FirstTokens, request: GenerateRequest, made: EngineCoreRequest
    ) -> None:
        """made: the engine's request."""
        assert self._rules is not None and made.sampling_params is not None
        params = made.sampling_params
        if self._rules.asks(params, len(made.prompt_token_ids or ())):
            first_tokens.expect(made.request_id, request, stop_tokens(params))
            requests.ask_first_token(made)

    def _leave(self, request_ids: Sequence[str]) -> list[str]:
        """Forgets requests. Returns the engine's names of those that ran."""
        left = self._ids.leave(request_ids)
        if self._first_tokens is not None:
            for own in left:
                self._first_tokens.forget(own)
        return left

    async def _go_on(self, request: GenerateRequest) -> list[TokenDelta]:
        """Submits a request again that goes on from the first token that the client has.

        Returns the end of the answer if that is not possible.
        """
        assert self._first_tokens is not None
        caller = request.request_id
        before = self._ids.leave([caller])
        if not before:
            return []  # aborted meanwhile
        own = self._ids.enter(caller)
        self._first_tokens.expect(own, request, None)
        await self._abort(before)
        try:
            made = await self._engine_request(request)
            made.request_id = own
            if self._ids.running(own) is not None:
                await self._add(made)
        except Refused as exc:
            logger.error("request %s: cannot continue from its first token: %s", caller, exc)
            self._leave([caller])
            return [TokenDelta(request_id=caller, token_ids=[], finish_reason="error")]
        if self._ids.running(own) is None:  # aborted, perhaps before the engine had it
            await self._abort([own])
        return []

    def _deltas(self, outputs: EngineCoreOutputs) -> tuple[list[TokenDelta], list[GenerateRequest]]:
        """The deltas of one step, for requests that still run; and requests to be submitted in
        place of those with their ids, see `FirstTokens.settle`."""
        deltas: list[TokenDelta] = []
        instead: list[GenerateRequest] = []
        for output in outputs.outputs:
            own = output.request_id
            if (caller := self._ids.running(own)) is None:
                continue
            if output.finish_reason is FinishReason.ABORT:
                # Nobody has asked for it: vLLM ends this rank, because another one has died, and
                # reports that afterwards. Then the request is lost, and can be migrated.
                continue
            output.request_id = caller
            left = delta = delta_from_output(output, outputs.timestamp)
            if delta.prefill is not None:
                self._metrics.first_token(delta.prefill)
            if self._first_tokens is not None:
                left = self._first_tokens.settle(own, delta)
            if isinstance(left, GenerateRequest):
                instead.append(left)
                continue
            if delta.finish_reason is not None:
                self._ids.leave([caller])
            deltas.append(left)
        return deltas, instead
