"""Options that may change while processes run, and the record in etcd that changes them.

A record holds what differs from the configuration file, for all processes of one
component. It has no lease: it outlives the processes that wrote and follow it.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, cast, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from dynamo_lite.protocol import records
from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.options import (
    AdmissionOptions,
    DisaggOptions,
    KvRoutingOptions,
    PlannerOptions,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


class LiveValues(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename="kebab",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The live options of a component. UNSET: as in the configuration file."""

    def applied_to(self, options: Options) -> Options:
        """`options` with every field replaced that is set here."""
        values = {f.name: getattr(self, f.name, UNSET) for f in dataclasses.fields(options)}
        changed = {name: value for name, value in values.items() if value is not UNSET}
        return dataclasses.replace(options, **changed)


def _live(name: str, *sets: type, **sections: type) -> type[LiveValues]:
    """Every field of these sets of options, with its range, or UNSET.

    sets: their keys are those of the component's own section. sections: section
    (snake_case) to the set that stands in it.
    """
    fields: list[tuple[str, Any, Any]] = []
    for section, kind in (*sections.items(), *(("", kind) for kind in sets)):
        prefix = f"{section.replace('_', '-')}." if section else ""
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            key = prefix + field.name.replace("_", "-")
            default = msgspec.field(default=UNSET, name=key)
            fields.append((field.name, hints[field.name] | UnsetType, default))
    made = msgspec.defstruct(
        name, fields, bases=(LiveValues,), module=__name__, frozen=True, kw_only=True
    )
    return cast("type[LiveValues]", made)


VllmWorkerLiveOptions = _live("VllmWorkerLiveOptions", DisaggOptions, AdmissionOptions)
RouterLiveOptions = _live("RouterLiveOptions", kv_router=KvRoutingOptions)
#: The section `kv-router` has an effect with `router: kv`.
FrontendLiveOptions = _live("FrontendLiveOptions", AdmissionOptions, kv_router=KvRoutingOptions)
PlannerLiveOptions = _live("PlannerLiveOptions", PlannerOptions)

#: Component to its options that can be changed.
LIVE_OPTIONS: Mapping[str, type[LiveValues]] = MappingProxyType(
    {
        "VllmWorker": VllmWorkerLiveOptions,
        "Frontend": FrontendLiveOptions,
        "Router": RouterLiveOptions,
        "Planner": PlannerLiveOptions,
    }
)

T = TypeVar("T", bound=msgspec.Struct)


class LiveOptionsRecord(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """At `names.live_options_key(namespace, component)`."""

    values: T
    #: Grows by one with each change.
    version: records.Positive
    #: USER@HOST of the last change.
    by: Annotated[str, msgspec.Meta(max_length=256)] = ""
    #: Of the last change, in seconds since the epoch; for display.
    at: float = 0.0


def encode_live_options(record: LiveOptionsRecord[T]) -> bytes:
    """Raises ProtocolError when its readers would refuse the record."""
    data = encode_json(record)
    if decode_live_options(data, type(record.values)) != record:
        raise ProtocolError("live options: a value does not round-trip through JSON")
    return data


def decode_live_options(data: bytes, kind: type[T]) -> LiveOptionsRecord[T]:
    """Raises ProtocolError."""
    return decode_json(data, LiveOptionsRecord[kind])
