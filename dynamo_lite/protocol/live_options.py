"""Options that may change while processes run, and the record in etcd that changes them.

A record holds what differs from the configuration file, of all processes of one
component. It hangs on no lease: it outlives those who wrote it and those who
follow it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeVar

import annotated_types as at
import msgspec
from msgspec import UNSET, UnsetType

from dynamo_lite.protocol import records
from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import ProtocolError

_MOST, _LONGEST_S, _HEAVIEST = 10**9, 1e9, 1e6
# Said twice: the reader of the YAML file knows one language, that of records the other.
Natural = Annotated[int, at.Ge(0), at.Le(_MOST), msgspec.Meta(ge=0, le=_MOST)]
Positive = Annotated[int, at.Gt(0), at.Le(_MOST), msgspec.Meta(gt=0, le=_MOST)]
Seconds = Annotated[float, at.Gt(0), at.Le(_LONGEST_S), msgspec.Meta(gt=0, le=_LONGEST_S)]
Weight = Annotated[float, at.Ge(0), at.Le(_HEAVIEST), msgspec.Meta(ge=0, le=_HEAVIEST)]
Share = Annotated[float, at.Gt(0), at.Le(1), msgspec.Meta(gt=0, le=1)]


class VllmWorkerLiveOptions(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename="kebab",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """See `VllmWorkerConfig`, whose fields these are. UNSET: as in the file."""

    max_local_prefill_length: Natural | UnsetType = UNSET
    max_prefill_queue_size: Natural | UnsetType = UNSET
    max_prefill_queue_tokens: Natural | UnsetType = UNSET
    remote_prefill_timeout_s: Seconds | UnsetType = UNSET
    queue_view_max_age_s: Seconds | UnsetType = UNSET
    single_flight_min_length: Natural | UnsetType | None = UNSET
    max_remote_prefills: Positive | UnsetType = UNSET
    max_in_flight_requests: Positive | UnsetType = UNSET
    max_queued_tokens: Positive | UnsetType = UNSET


def _weight(option: str) -> Any:
    """A field of the section `kv-router`."""
    return msgspec.field(default=UNSET, name=f"kv-router.{option}")


class RouterLiveOptions(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename="kebab",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """See `KvRouterOptions`, whose fields these are. UNSET: as in the file."""

    kv_weight: Weight | UnsetType = _weight("kv-weight")
    load_weight: Weight | UnsetType = _weight("load-weight")
    request_load_tokens: Natural | UnsetType = _weight("request-load-tokens")
    temperature: Weight | UnsetType = _weight("temperature")
    max_kv_usage: Share | UnsetType = _weight("max-kv-usage")


class FrontendLiveOptions(RouterLiveOptions, frozen=True, kw_only=True):
    """See `FrontendConfig`, whose fields these are. UNSET: as in the file.

    What is `RouterLiveOptions`'s holds with `router: kv`.
    """

    max_in_flight_requests: Positive | UnsetType = UNSET
    max_queued_tokens: Positive | UnsetType = UNSET


#: Component to what of its options can be changed.
TUNABLE: Mapping[str, type[msgspec.Struct]] = MappingProxyType(
    {
        "VllmWorker": VllmWorkerLiveOptions,
        "Frontend": FrontendLiveOptions,
        "Router": RouterLiveOptions,
    }
)

T = TypeVar("T", bound=msgspec.Struct)


class LiveOptionsRecord(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """At `names.tuning_key(namespace, component)`.

    version: one more with each change. by: USER@HOST of the last one; at: seconds
    since the epoch, for display.
    """

    values: T
    version: records.Positive
    by: Annotated[str, msgspec.Meta(max_length=256)] = ""
    at: float = 0.0


def encode_tuning(record: LiveOptionsRecord[T]) -> bytes:
    """Raises ProtocolError when whoever reads it would refuse it."""
    data = encode_json(record)
    if decode_tuning(data, type(record.values)) != record:
        raise ProtocolError("a value changes on its way")
    return data


def decode_tuning(data: bytes, kind: type[T]) -> LiveOptionsRecord[T]:
    """Raises ProtocolError."""
    return decode_json(data, LiveOptionsRecord[kind])
