"""How vLLM's sampling parameters determine the migration of a request that loses its worker.

To migrate, the generated tokens are appended to the prompt. According to vLLM's sampler, a
choice that depends only on the token ids of prompt and output together stays the same. Other
state of a request (a generator, counts over the output only, a grammar's state) is lost.
"""

from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams, SamplingType

from dynamo_lite.request_plane.migrating_request import MigrationPlan

#: Architectures whose prompt tokens attend to all of the prompt (prefix LM). This is known only
#: to vLLM's layers, in the engine's process.
_PREFIX_LMS = frozenset({"HrmTextForCausalLM"})


def is_causal(model: ModelConfig) -> bool:
    """Whether no token's KV depends on later tokens."""
    return not model.is_diffusion and _PREFIX_LMS.isdisjoint(model.architectures)


def migration_plan(params: SamplingParams, *, causal: bool = True) -> MigrationPlan:
    """How a sequence with these parameters can be migrated. causal: see `is_causal`."""
    grammar = params.structured_outputs is not None
    if params.sampling_type is SamplingType.GREEDY:
        # `extra_args` are those of custom logits processors and samplers, which may do anything.
        has_history = depends_on_output(params) or bool(params.extra_args)
        return MigrationPlan(replay=grammar or has_history or not causal)
    if params.sampling_type is SamplingType.RANDOM_SEED:
        return MigrationPlan(replay=True)
    if grammar:
        return MigrationPlan(
            stay="random without a seed under a grammar, whose state cannot migrate"
        )
    if not causal:
        return MigrationPlan(stay="random without a seed, and the model is not causal")
    return MigrationPlan()  # without a seed, any continuation is as good


def depends_on_output(params: SamplingParams) -> bool:
    """Whether the next token depends on where the prompt ends and the output begins, by vLLM's own
    parameters.

    It does not depend on it with `repetition_penalty`, which treats both alike, `logit_bias`,
    `allowed_token_ids`, stops and `min_tokens` (the number that is left is sent along).
    """
    words = params.bad_words_token_ids
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        # vLLM looks for the first tokens of a bad word in the output only.
        or (any(len(word) > 1 for word in words) if words is not None else bool(params.bad_words))
        or params.repetition_detection is not None
        or params.thinking_token_budget is not None
        or params.trace_decode_token_ids is not None
    )
