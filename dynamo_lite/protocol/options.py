"""Sets of options that more than one place needs, each defined once; docs/configuration.md says
what each option means.

A section of the configuration file inherits a set, so that its keys stand there in
kebab-case. The engine's configuration carries a set whole, live options replace it whole
(`protocol/live_options.py`), and a recorded decision contains the thresholds that it used.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

_MOST, _LONGEST_S, _HEAVIEST = 10**9, 1e9, 1e6
NaturalOption = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
PositiveOption = Annotated[int, msgspec.Meta(gt=0, le=_MOST)]
SecondsOption = Annotated[float, msgspec.Meta(gt=0, le=_LONGEST_S)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=_HEAVIEST)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
#: 0: any free port.
PortOption = Annotated[int, msgspec.Meta(ge=0, le=65535)]


@dataclass(frozen=True, kw_only=True)
class DisaggOptions:
    """How a decode engine decides between local and remote prefill, and uses remote prefills."""

    max_local_prefill_length: NaturalOption = 512
    max_prefill_queue_size: NaturalOption = 8
    queue_view_max_age_s: SecondsOption = 3.0
    remote_prefill_timeout_s: SecondsOption = 30.0
    max_prefill_queue_tokens: NaturalOption = 0
    single_flight_min_length: NaturalOption | None = None
    max_remote_prefills: PositiveOption = 2
    max_queue_wait_s: SecondsOption = 2.0


@dataclass(frozen=True, kw_only=True)
class AdmissionOptions:
    """Limits beyond which new requests are refused."""

    max_in_flight_requests: PositiveOption
    max_queued_tokens: PositiveOption


@dataclass(frozen=True, kw_only=True)
class KvRoutingOptions:
    """How the KV-aware router weighs workers. Amounts are prompt tokens."""

    kv_weight: Weight = 2.0


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """How the planner chooses the numbers of workers."""

    budget_devices: PositiveOption = 8
    prefill_min: PositiveOption = 1
    prefill_max: PositiveOption = 8
    decode_min: PositiveOption = 1
    decode_max: PositiveOption = 8
    tick_s: SecondsOption = 5.0
    down_window_s: SecondsOption = 90.0
    cooldown_s: SecondsOption = 60.0
    prefill_up_share: Share = 0.8
    decode_up_share: Share = 0.85
    start_s: SecondsOption = 60.0
    start_timeout_s: SecondsOption = 600.0


def subset(kind: type[Options], options: Any) -> Options:
    """The set `kind`, with its values from `options`, which has these fields and others."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})
