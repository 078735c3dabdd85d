"""Which requests' first tokens a prefill engine can sample for a decode engine, exactly.

Both engines compute the same logits of the last prompt token. The sampled token is the same if it
depends on nothing but the parameters in `FirstTokenSampling`. A request with other parameters gets
its first token from the decode engine.
"""

from importlib.metadata import entry_points

import msgspec
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from dynamo_lite.protocol.prefill import FirstTokenSampling
from dynamo_lite.vllm.migratable import depends_on_output, is_causal
from dynamo_lite.vllm.wire import KV_TRANSFER_PARAMS


def stop_tokens(params: SamplingParams) -> frozenset[int]:
    """Tokens that end the answer, as in vLLM's `check_stop`."""
    stops = set(params.stop_token_ids or ())
    if params.eos_token_id is not None:
        stops.add(params.eos_token_id)
    return frozenset(stops)


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
        self._draws = config.speculative_config is None
        #: vLLM samples after each chunk of a prompt and then resets the random generator. It
        #: cannot reset a CPU's generator, and the engine crashes.
        self._chunked_draws = self._draws and not current_platform.is_cpu()

    def sampling(self, params: SamplingParams, prompt_tokens: int) -> FirstTokenSampling | None:
        """How a prefill engine is to sample the first token of this engine's request; None if it
        cannot."""
        if not self._plain or not _is_plain(params):
            return None
        # The first token must not be the last one, because the last one carries the end of the
        # answer.
        if params.max_tokens is None or params.max_tokens < 2:
            return None
        if prompt_tokens + 1 >= self._model.max_model_len:
            return None
        if params.sampling_type is SamplingType.GREEDY:
            return FirstTokenSampling()
        if params.sampling_type is not SamplingType.RANDOM_SEED or not self._draws:
            return None
        drawn = {
            name: getattr(params, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "seed")
        }
        drawn["top_k"] = max(drawn["top_k"], 0)  # -1 is another name of 0
        try:
            return msgspec.convert(drawn, FirstTokenSampling)
        except msgspec.ValidationError:
            return None

    def samples(self, wanted: FirstTokenSampling, prompt_tokens: int) -> bool:
        """Whether this prefill engine can sample a first token with these parameters.

        prompt_tokens: length of the whole prompt.
        """
        if not self._plain or prompt_tokens >= self._model.max_model_len:
            return False
        return wanted.seed is None or self._chunked_draws


def first_token_params(wanted: FirstTokenSampling) -> SamplingParams:
    """Parameters of the one-token request of a prefill engine. Raises VLLMError."""
    params = SamplingParams(
        max_tokens=1,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        seed=wanted.seed,
        detokenize=False,
    )
    params.watermarking = False
    return params


def _is_plain(params: SamplingParams) -> bool:
    """Whether the first token depends only on temperature, top_p, top_k, min_p and seed, and
    only the token itself is wanted."""
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
