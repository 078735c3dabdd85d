"""Sets of options that more than one place needs, each defined once.

A section of the configuration file inherits a set, so that its keys stand there in
kebab-case. The engine's configuration carries a set whole, live options replace it whole
(`protocol/live_options.py`), and a recorded decision contains the thresholds that it used.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import annotated_types as at
import msgspec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_MOST, _LONGEST_S, _HEAVIEST = 10**9, 1e9, 1e6
# Each range is stated twice: pydantic reads the first form (configuration file), msgspec the
# second one (records).
NaturalOption = Annotated[int, at.Ge(0), at.Le(_MOST), msgspec.Meta(ge=0, le=_MOST)]
PositiveOption = Annotated[int, at.Gt(0), at.Le(_MOST), msgspec.Meta(gt=0, le=_MOST)]
SecondsOption = Annotated[float, at.Gt(0), at.Le(_LONGEST_S), msgspec.Meta(gt=0, le=_LONGEST_S)]
Weight = Annotated[float, at.Ge(0), at.Le(_HEAVIEST), msgspec.Meta(ge=0, le=_HEAVIEST)]
Share = Annotated[float, at.Gt(0), at.Le(1), msgspec.Meta(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class DecisionThresholds:
    """The thresholds of the decision between local and remote prefill."""

    #: Prompts with at most this many uncached tokens are prefilled locally.
    max_local_prefill_length: NaturalOption = 512
    #: With this many jobs in the queue or more, all prompts are prefilled locally.
    max_prefill_queue_size: NaturalOption = 8
    #: A view of the queue that is older counts as unknown, and unknown means local.
    queue_view_max_age_s: SecondsOption = 3.0
    #: Time limit of a remote prefill from the decision to the last block. The rest of the prompt
    #: is then prefilled locally.
    remote_prefill_timeout_s: SecondsOption = 30.0
    #: With this many tokens to compute in the queue or more, all prompts are prefilled locally; 0:
    #: no limit.
    max_prefill_queue_tokens: NaturalOption = 0


@dataclass(frozen=True, kw_only=True)
class DisaggOptions(DecisionThresholds):
    """How a decode engine uses remote prefills."""

    #: A prompt waits for the remote prefill of another one if they share at least this many
    #: uncached tokens, and most of either. None: max_local_prefill_length, in whole blocks.
    single_flight_min_length: NaturalOption | None = None
    #: How many prefill workers one prompt may ask, one after the other as they are lost, within
    #: remote_prefill_timeout_s.
    max_remote_prefills: PositiveOption = 2
    #: When none of this engine's remote prefills was claimed for so long, those that wait as long
    #: are taken back and computed locally.
    max_queue_wait_s: SecondsOption = 2.0


@dataclass(frozen=True, kw_only=True)
class AdmissionOptions:
    """Limits beyond which new requests are refused."""

    #: Sequences at a time.
    max_in_flight_requests: PositiveOption
    #: Prompt tokens, in total, of the sequences without a first token.
    max_queued_tokens: PositiveOption


@dataclass(frozen=True, kw_only=True)
class KvRoutingOptions:
    """How the KV-aware router weighs workers. Amounts are prompt tokens."""

    #: Value of a prompt token that a worker holds, in tokens that a worker has to compute before
    #: this prompt. Above 1, since a held token saves work and not only waiting.
    kv_weight: Weight = 2.0


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """How the planner chooses the numbers of workers."""

    #: Most devices of all workers together, starting and draining ones included. A worker without
    #: a device counts as one.
    budget_devices: PositiveOption = 8
    #: Fewest prefill workers.
    prefill_min: PositiveOption = 1
    #: Most prefill workers.
    prefill_max: PositiveOption = 8
    #: Fewest decode workers.
    decode_min: PositiveOption = 1
    #: Most decode workers.
    decode_max: PositiveOption = 8
    #: Time between two looks at the load.
    tick_s: SecondsOption = 5.0
    #: How long fewer workers must have been enough before one is removed.
    down_window_s: SecondsOption = 90.0
    #: After a worker was added, none of its role is removed for this long, or for the time of a
    #: start if that is longer; and the reverse.
    cooldown_s: SecondsOption = 60.0
    #: A prefill worker is added above this share of the prefill workers' measured rate.
    prefill_up_share: Share = 0.8
    #: A decode worker is added above this share of the KV blocks or of `max-num-seqs`.
    decode_up_share: Share = 0.85
    #: Time of a start.
    start_s: SecondsOption = 60.0
    #: A start that takes longer is withdrawn.
    start_timeout_s: SecondsOption = 600.0


def subset(kind: type[T], options: Any) -> T:
    """The set `kind`, with its values from `options`, which has these fields and others."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})
