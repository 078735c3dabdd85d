"""How long an engine's steps take, and the file with these constants."""

import math
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Self

import msgspec

from dynamo_lite.protocol.errors import ConfigError

#: Of `vllm_version` in a file that is not a measurement.
ANY_VERSION = "any"
FORMAT = "dynamo-lite-timing/1"

ModelSeconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
RelativeError = Annotated[float, msgspec.Meta(ge=0, le=3600)]
PositiveCount = Annotated[int, msgspec.Meta(gt=0, le=10**12)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e15)]


class StepTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one engine step: `step_s + token_s p + attention_s a + stream_s d + kv_token_s K`.

    p: prefill tokens of the step. a: their attention work, `p_i (context_i + p_i / 2)` summed over
    the prompts. d: decoding sequences. K: KV tokens that these have before the step.
    """

    step_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    token_s: ModelSeconds = 0.0
    attention_s: ModelSeconds = 0.0
    stream_s: ModelSeconds = 0.0
    kv_token_s: ModelSeconds = 0.0

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
        return type(self)(**{name: getattr(self, name) * factor for name in self.__struct_fields__})


def total_s(first: float, growth: float, steps: int) -> float:
    """Seconds of `steps` steps, of which the first takes `first` and each later one `growth` more
    than the one before it."""
    return steps * first + growth * steps * (steps - 1) / 2


def steps_until(first: float, growth: float, after: float) -> int:
    """After how many whole steps `after` seconds have passed; at least 1. first: above 0."""
    if growth <= 0:
        steps = math.ceil(after / first)
    else:
        half = first - growth / 2
        steps = math.ceil((math.sqrt(half * half + 2 * growth * max(after, 0.0)) - half) / growth)
    steps = max(steps, 1)
    while steps > 1 and total_s(first, growth, steps - 1) >= after:
        steps -= 1
    while total_s(first, growth, steps) < after:
        steps += 1
    return steps


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine can hold and do in a step; vLLM's options of the same names."""

    kv_tokens: PositiveCount
    max_num_seqs: PositiveCount = 256
    max_num_batched_tokens: PositiveCount = 8192

    def mistakes(self) -> list[str]:
        if self.max_num_seqs >= self.max_num_batched_tokens:
            return [
                f"max_num_seqs is {self.max_num_seqs} and max_num_batched_tokens"
                f" {self.max_num_batched_tokens}; accepted: fewer sequences than tokens of a step"
            ]
        return []


class TransferTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of a remote prefill, without its computation."""

    #: From the decision until a free prefill worker computes.
    handover_s: ModelSeconds = 0.002
    #: From the last byte until the decode engine can schedule the request.
    commit_s: ModelSeconds = 0.002
    bytes_per_token: PositiveCount = 131_072
    #: Bandwidth of one worker's network interface, in each direction.
    bytes_per_s: Rate = 25e9


class FitErrors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Relative errors of predicted step times, on records that were not fitted."""

    records: PositiveCount
    median: RelativeError
    p95: RelativeError


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One timing file: a model on a device."""

    format: str
    model: str
    device: str
    #: `ANY_VERSION` where the constants come from elsewhere.
    vllm_version: str
    #: Where the constants come from.
    source: str
    step: StepTiming
    engine: EngineLimits
    transfer: TransferTiming = TransferTiming()
    #: Overhead of a request's first token: HTTP, tokeniser, routing and the way back.
    frontend_s: ModelSeconds = 0.0
    #: From the order until a new worker takes requests.
    start_s: ModelSeconds = 60.0
    held_out: FitErrors | None = None


def shipped() -> list[str]:
    """Names of the timing files in the package."""
    folder = files("dynamo_lite.capacity").joinpath("data")
    return sorted(one.name.removesuffix(".json") for one in folder.iterdir())


def _read(name: str) -> bytes:
    if name in shipped():
        return files("dynamo_lite.capacity").joinpath("data", f"{name}.json").read_bytes()
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            [
                f"timing {name!r} is not a file; accepted: a file that benchmarks/calibrate.py"
                f" wrote, or one of {', '.join(shipped())}"
            ]
        )
    return path.read_bytes()


def read_timing(name: str, *, model: str | None = None, vllm_version: str | None = None) -> Timing:
    """A timing file by its path, or a shipped one by its name. Raises ConfigError.

    model, vllm_version: what the file must be about; None: anything.
    """
    try:
        timing = msgspec.json.decode(_read(name), type=Timing)
    except msgspec.MsgspecError as exc:
        raise ConfigError([f"timing {name}: {exc}"]) from exc
    mistakes = [f"timing {name}: {mistake}" for mistake in timing.engine.mistakes()]
    if timing.format != FORMAT:
        mistakes.append(f"timing {name}: format is {timing.format!r}; accepted: {FORMAT!r}")
    if model is not None and timing.model != model:
        mistakes.append(
            f"timing {name} was measured with model {timing.model!r}, not {model!r};"
            " measure it with benchmarks/calibrate.py"
        )
    if vllm_version is not None and timing.vllm_version not in (vllm_version, ANY_VERSION):
        mistakes.append(
            f"timing {name} was measured with vLLM {timing.vllm_version}, not {vllm_version};"
            " measure it again with benchmarks/calibrate.py"
        )
    if mistakes:
        raise ConfigError(mistakes)
    return timing
