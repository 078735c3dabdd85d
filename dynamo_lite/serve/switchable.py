"""Whether the workers of a graph can change their role with the engine that they have."""

from collections.abc import Mapping
from typing import Any

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.serve.config import GraphConfig, ServiceConfig

#: The components whose workers change into each other.
_ROLES = ("VllmWorker", "PrefillWorker")


def check_switchable(config: GraphConfig) -> None:
    """Raises ConfigError, with the names of all options that an engine cannot change while it
    runs, if they differ between the roles of switchable workers."""
    found = [one for name in _ROLES if (one := config.get(name)) is not None]
    wanted = [one.service.name for one in found if one.options.get("switchable") is True]
    if not wanted:
        return
    if len(wanted) < len(_ROLES):
        raise ConfigError(
            [
                f"{wanted[0]}.switchable: workers change between {' and '.join(_ROLES)}; set"
                " switchable: true for both"
            ]
        )
    decode, prefill = found
    if mistakes := [*_differences(decode, prefill), *_not_served(decode)]:
        raise ConfigError(mistakes)


def _differences(decode: ServiceConfig, prefill: ServiceConfig) -> list[str]:
    """What is decided when an engine's process starts."""
    why = "with switchable: true it must be the same, because a running engine cannot change it"
    here, there = decode.service.name, prefill.service.name
    both = [
        *_unequal("", decode.flags, prefill.flags),
        *_unequal("ServiceArgs.", {"devices": decode.devices}, {"devices": prefill.devices}),
    ]
    return [
        *(f"{here}.{name} is {a}, {there}.{name} is {b}: {why}" for name, a, b in both),
        # Without values, which may be secrets.
        *(
            f"{here}.ServiceArgs.env.{name} and {there}.ServiceArgs.env.{name} differ: {why}"
            for name, _, _ in _unequal("", decode.later_env, prefill.later_env)
        ),
        *(
            f"{one.service.name}: {one.fixed_env}; {why}"
            for one in (decode, prefill)
            if one.fixed_env
        ),
    ]


def _not_served(decode: ServiceConfig) -> list[str]:
    mistakes: list[str] = []
    if not decode.options.get("remote_prefill"):
        mistakes.append(
            f"{decode.service.name}.remote-prefill is false: an engine without remote prefills has"
            " no connector, and cannot be switchable"
        )
    return mistakes


def _unequal(
    where: str, here: Mapping[str, Any], there: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    return [
        (f"{where}{name}", _shown(name, here.get(name)), _shown(name, there.get(name)))
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]


def _shown(name: str, value: Any) -> str:
    return "(a secret)" if value is not None and name.endswith("token") else repr(value)
