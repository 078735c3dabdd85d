"""What vLLM's sampling parameters mean for a request that loses its worker.

Read from vLLM's sampler: a choice that depends on nothing but the token ids of
prompt and output together survives a move of the output into the prompt;
whatever is kept per request besides (a generator, counts over the output only, a
grammar's state) does not.
"""

from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams, SamplingType

from dynamo_lite.policy.migration import Plan, SamplingFacts, plan

#: Architectures whose prompt tokens attend to all of the prompt (prefix LM). Only vLLM's
#: layers know that, and those live in an engine's process.
_PREFIX_LMS = frozenset({"HrmTextForCausalLM"})


def is_causal(model: ModelConfig) -> bool:
    """Whether no token of a text depends on those behind it."""
    return not model.is_diffusion and _PREFIX_LMS.isdisjoint(model.architectures)


def movable(params: SamplingParams, *, causal: bool = True) -> Plan:
    """How a sequence with these parameters goes on elsewhere. causal: see `is_causal`."""
    return plan(facts(params, causal=causal))


def facts(params: SamplingParams, *, causal: bool = True) -> SamplingFacts:
    return SamplingFacts(
        greedy=params.sampling_type is SamplingType.GREEDY,
        seeded=params.sampling_type is SamplingType.RANDOM_SEED,
        history_dependent=_remembers(params),
        grammar=params.structured_outputs is not None,
        causal=causal,
    )


def _remembers(params: SamplingParams) -> bool:
    """Whether the next token depends on where the prompt ends and the output begins.

    Not by `repetition_penalty`, which takes both alike, nor by `logit_bias`,
    `allowed_token_ids`, stops and `min_tokens` (whose rest is sent along).
    """
    words = params.bad_words_token_ids
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        # The first tokens of a bad word are looked for in the output.
        or (any(len(word) > 1 for word in words) if words is not None else bool(params.bad_words))
        or params.repetition_detection is not None
        or params.thinking_token_budget is not None
        or params.trace_decode_token_ids is not None
        or bool(params.watermarking)
        # For logits processors and samplers of the user's own, which may do anything.
        or bool(params.extra_args)
    )
