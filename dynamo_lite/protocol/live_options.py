"""Options that may change while processes run, and the record in etcd that changes them.

A record holds what differs from the configuration file, for all processes of one
component. It has no lease: it outlives the processes that wrote and follow it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.options import (
    AdmissionOptions,
    DisaggOptions,
    KvRoutingOptions,
    Options,
    PlannerOptions,
)

#: Key, as in the component's section of the configuration file, to value. A key that is not there
#: has the value of the file; None is a value.
Values = Mapping[str, Any]


def _live(*sets: type, **sections: type) -> Mapping[str, Any]:
    """Key to type, with its range, of each field of these sets of options.

    sets: of the component's own section. sections: section to the set that stands in it.
    """
    return {
        _key(field, section): hint
        for section, kind in (*(("", kind) for kind in sets), *sections.items())
        for field, hint in get_type_hints(kind, include_extras=True).items()
    }


def _key(field: str, section: str) -> str:
    return (f"{section}.{field}" if section else field).replace("_", "-")


#: Component to its options that can be changed, each with its type.
LIVE_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "VllmWorker": _live(DisaggOptions, AdmissionOptions),
    # The section `kv-router` has an effect with `router: kv`.
    "Frontend": _live(AdmissionOptions, kv_router=KvRoutingOptions),
    "Router": _live(kv_router=KvRoutingOptions),
    "Planner": _live(PlannerOptions),
}


class LiveOptionsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """At `names.live_options_key(namespace, component)`."""

    values: dict[str, Any]


def applied(values: Values, options: Options, section: str = "") -> Options:
    """`options`, which stand in this section, with what is set instead."""
    keys = {field.name: _key(field.name, section) for field in dataclasses.fields(options)}
    changed = {name: values[key] for name, key in keys.items() if key in values}
    return dataclasses.replace(options, **changed)


def checked(component: str, key: str, value: Any) -> Any:
    """The value, as a record gives it to its readers. Raises ProtocolError."""
    if (kind := LIVE_OPTIONS[component].get(key)) is None:
        raise ProtocolError(f"{key}: unknown key")
    try:
        # Through JSON, which has no NaN and no infinity.
        return msgspec.json.decode(msgspec.json.encode(value), type=kind)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ProtocolError(f"{key}: {exc}") from exc


def decode_live_options(data: bytes, component: str) -> Values:
    """Raises ProtocolError."""
    record = decode_json(data, LiveOptionsRecord)
    return {key: checked(component, key, value) for key, value in record.values.items()}
