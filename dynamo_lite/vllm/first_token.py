"""Which requests' first tokens a prefill engine can compute for a decode engine, exactly.

Both engines compute the same logits of the last prompt token. The token of a greedy request is the
same if no other parameter changes these logits. Others get it from the decode engine.
"""

from importlib.metadata import entry_points

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from dynamo_lite.vllm.migratable import depends_on_output, is_causal
from dynamo_lite.vllm.wire import KV_TRANSFER_PARAMS


def stop_tokens(params: SamplingParams) -> frozenset[int]:
    """Tokens that end the answer, as in vLLM's `check_stop`."""
    ends = (*(params.stop_token_ids or ()), params.eos_token_id)
    return frozenset(token for token in ends if token is not None)


class FirstTokenRules:
    """The rules of one engine. one_group: whether its model has one KV group."""

    def __init__(self, config: VllmConfig, *, one_group: bool = True):
        #: The model's configuration; vLLM may reduce its length while it loads the model.
        self._model = model = config.model_config
        #: vLLM's CPU kernels for MLA give the last token of a prompt other values than a decoded
        #: one, and the decode engine decodes it.
        alike = not (model.use_mla and current_platform.is_cpu())
        #: With a sliding window vLLM frees the blocks before it when a prompt ends. With one more
        #: token in the prompt, one of them may still have to be written; and a layer's state would
        #: be that after it.
        whole = one_group and config.cache_config.sliding_window is None
        #: A request whose first tokens differ goes on from a longer prompt.
        self._plain = (alike and whole and is_causal(model)) and not (
            model.logits_processors or list(entry_points(group=LOGITSPROCS_GROUP))
        )

    def asks(self, params: SamplingParams, prompt_tokens: int) -> bool:
        """Whether a prefill engine is to compute the first token of this engine's request."""
        # The first token must not be the last one, because the last one carries the end of the
        # answer.
        several = params.max_tokens is not None and params.max_tokens > 1
        greedy = params.sampling_type is SamplingType.GREEDY
        return greedy and several and _is_plain(params) and self.gives(prompt_tokens + 1)

    def gives(self, prompt_tokens: int) -> bool:
        """Whether this prefill engine can compute a first token.

        prompt_tokens: length of the whole prompt.
        """
        return self._plain and prompt_tokens < self._model.max_model_len


def _is_plain(params: SamplingParams) -> bool:
    """Whether the first token of a greedy request depends on the logits only, and only the token
    itself is wanted."""
    return not (
        depends_on_output(params)
        # Parameters of custom logits processors and samplers.
        or (params.extra_args or {}).keys() - {KV_TRANSFER_PARAMS}
        or params.structured_outputs is not None
        or params.repetition_penalty != 1
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.min_tokens
        or params.logprobs is not None
        or params.logprob_token_ids is not None
        or params.prompt_logprobs is not None
        or params.prompt_logprob_token_ids is not None
        or params.skip_reading_prefix_cache
    )
