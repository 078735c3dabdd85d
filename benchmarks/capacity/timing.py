"""How long the parts of a graph take."""

import math
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Seconds of one engine step: `step_s + token_s p + attention_s a + stream_s d + kv_token_s K`.

    p: prefill tokens of the step. a: their attention work, `p_i (context_i + p_i / 2)` summed over
    the prompts. d: decoding sequences. K: KV tokens that these have before the step.
    """

    #: Above 0.
    step_s: float
    token_s: float = 0.0
    attention_s: float = 0.0
    stream_s: float = 0.0
    kv_token_s: float = 0.0

    def one(
        self, *, tokens: float = 0, attention: float = 0, streams: int = 0, kv: float = 0
    ) -> float:
        """Seconds of one step."""
        return (
            self.step_s
            + self.token_s * tokens
            + self.attention_s * attention
            + self.stream_s * streams
            + self.kv_token_s * kv
        )

    def scaled(self, factor: float) -> Self:
        return type(self)(**{one.name: getattr(self, one.name) * factor for one in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A model on a device."""

    step: StepTiming
    #: What one engine can hold, and do in a step. There are fewer sequences than tokens of a step.
    kv_tokens: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    #: From the decision until a free prefill worker computes.
    handover_s: float = 0.002
    #: From the last byte until the decode engine can schedule the request.
    commit_s: float = 0.002
    bytes_per_token: int = 131_072
    #: Bandwidth of one worker's network interface, in each direction.
    bytes_per_s: float = 25e9
    #: Overhead of a request's first token: HTTP, tokeniser, routing and the way back.
    frontend_s: float = 0.0

    def prefill_s(self, tokens: int) -> float:
        """Seconds of a prompt alone in an engine."""
        steps, step = math.ceil(tokens / self.max_num_batched_tokens), self.step
        return steps * step.step_s + step.token_s * tokens + step.attention_s * tokens * tokens / 2


#: A GPU in general, and no measurement. From the polynomials of ai-dynamo/dynamo's mocker
#: (lib/mocker/src/common/perf_model.rs): prefill 4.209989e-7 n^2 + 1.518344e-2 n + 16.50142 ms;
#: decode -25.74 u^2 + 54.01 u + 5.74 ms, u = KV use. token_s and attention_s are those of the
#: prefill polynomial (a = n^2/2). step_s and kv_token_s are the least-squares line through the
#: decode polynomial over u in [0, 1] (10.03 + 28.27 u ms) at 524288 KV tokens. The limits of the
#: engine are the mocker's; the KV size and the transfer are round numbers.
GPU_LIKE = Timing(
    step=StepTiming(
        step_s=0.01003, token_s=1.518344e-5, attention_s=8.419978e-10, kv_token_s=5.392e-8
    ),
    kv_tokens=524_288,
    frontend_s=0.005,
)
