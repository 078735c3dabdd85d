"""Every subject and key is permitted to the components that need it, and no component has all."""

import inspect
from collections.abc import Callable

import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.permissions import Permissions, all_permissions

NAMESPACE = "n-1"
ALL = all_permissions(NAMESPACE)
#: Examples of arguments, by name.
_ARGUMENTS = {
    "namespace": NAMESPACE,
    "engine_id": "e1",
    "lease_id": 0x1A,
    "router_lease_id": 0x1A,
    "prefill_lease_id": 0x1A,
    "adapter": "a",
}
#: Other programs ask this.
_SERVED_ONLY = {("endpoint_subject", "VllmWorker")}
_COMPONENTS = {
    "endpoint_subject": ("Router", "VllmWorker"),
    "endpoint_key": tuple(name for name in ALL if name != "Operator"),
    "health_subject": ("VllmWorker", "PrefillWorker"),
    "kv_subject": ("VllmWorker",),
    "kv_snapshot_subject": ("VllmWorker",),
    "live_options_key": ("VllmWorker", "Frontend", "Router", "Planner"),
}


def matches(pattern: str, subject: str) -> bool:
    """As NATS compares them."""
    wanted, parts = pattern.split("."), subject.split(".")
    for i, token in enumerate(wanted):
        if token == ">":
            return len(parts) > i
        if i >= len(parts) or token not in ("*", parts[i]):
            return False
    return len(wanted) == len(parts)


def examples(suffix: str) -> list[tuple[str, str, str]]:
    """(function, component or empty, example) of each function of `names` with this ending."""
    found: list[tuple[str, str, str]] = []
    for name, function in inspect.getmembers(names, inspect.isfunction):
        if not name.endswith(suffix):
            continue
        for component in _COMPONENTS.get(name, ("",)):
            given = {**_ARGUMENTS, "component": component, "endpoint": "some/endpoint"}
            wanted = inspect.signature(function).parameters
            found.append((name, component, function(**{key: given[key] for key in wanted})))
    return found


def holders(holds: Callable[[Permissions], bool]) -> list[str]:
    return [name for name, permissions in ALL.items() if name != "Operator" and holds(permissions)]


@pytest.mark.parametrize(("name", "component", "subject"), examples("_subject"))
def test_each_subject_has_a_sender_and_a_receiver(name: str, component: str, subject: str):
    receivers = holders(lambda one: any(matches(p, subject) for p in one.subscribe))
    senders = [who for who, one in ALL.items() if any(matches(p, subject) for p in one.publish)]
    if name == "prefill_jobs_subject":  # JetStream receives it
        assert senders == ["VllmWorker"] and receivers == []
        return
    assert receivers
    assert senders or (name, component) in _SERVED_ONLY


@pytest.mark.parametrize(("name", "component", "key"), examples("_key"))
def test_each_key_has_who_reads_and_writes_it(name: str, component: str, key: str):
    writers = [who for who, one in ALL.items() if any(key.startswith(p) for p in one.write)]
    readers = [
        who for who, one in ALL.items() if any(key.startswith(p) for p in (*one.read, *one.write))
    ]
    assert writers and readers
    if name == "live_options_key":
        assert writers == ["Operator"] and readers == [component, "Operator"]


def test_permissions_end_with_the_namespace():
    for one in ALL.values():
        for subject in (*one.publish, *one.subscribe):
            assert subject.startswith(f"{NAMESPACE}_") or f".{NAMESPACE}_prefill_queue" in subject
            assert subject.split(".")[0] not in ("*", ">")
        assert all(prefix.startswith(f"{NAMESPACE}/") for prefix in (*one.read, *one.write))
