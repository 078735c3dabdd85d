"""Every subject and key is permitted to the components that need it, and no component has all."""

import inspect
from collections.abc import Callable

import pytest

from dynamo_lite.cli.access import etcd_commands, nats_configuration
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


STREAM = names.prefill_stream(NAMESPACE)


@pytest.mark.parametrize(
    ("subject", "senders"),
    [
        (names.prefill_jobs_subject(NAMESPACE), ["VllmWorker"]),
        (names.kv_subject(NAMESPACE, "VllmWorker"), ["VllmWorker"]),
        (names.claim_subject(NAMESPACE, "e1"), ["PrefillWorker"]),
        (names.done_subject(NAMESPACE, "e1"), ["PrefillWorker"]),
        (names.first_token_subject(NAMESPACE, "e1"), ["PrefillWorker"]),
        (f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.any", ["PrefillWorker"]),
        (names.endpoint_subject(NAMESPACE, "Router", "pick", 0x1A), ["Frontend"]),
        (names.fates_subject(NAMESPACE, 0x1A), ["Frontend"]),
        (names.explain_subject(NAMESPACE, "e1"), ["Operator"]),
    ],
)
def test_no_user_sends_what_another_component_sends(subject: str, senders: list[str]):
    may = [who for who, one in ALL.items() if any(matches(p, subject) for p in one.publish)]
    assert may == senders


def test_no_user_writes_the_keys_of_another_component():
    def writers(key: str) -> list[str]:
        return holders(lambda one: any(key.startswith(prefix) for prefix in one.write))

    metadata = names.nixl_metadata_key(NAMESPACE, "e1")
    assert holders(lambda one: any(metadata.startswith(p) for p in (*one.read, *one.write))) == [
        "VllmWorker",
        "PrefillWorker",
    ]
    assert writers(metadata) == ["VllmWorker"]
    assert writers(names.link_key(NAMESPACE, 0x1A, "e2")) == ["PrefillWorker"]
    for key in (
        names.planner_wanted_key(NAMESPACE),
        names.planner_leader_key(NAMESPACE),
    ):
        assert writers(key) == ["Planner"]
    for name in (name for name in ALL if name != "Operator"):
        own = [name, *(["Frontend"] if name == "Processor" else [])]
        assert set(writers(names.endpoint_key(NAMESPACE, name, "x", 0x1A))) == set(own)


def test_the_printed_text():
    one = [ALL["Forwarder"]]
    assert etcd_commands(NAMESPACE, one).splitlines()[2:] == [
        "etcdctl role add n-1-Forwarder",
        "etcdctl role grant-permission --prefix n-1-Forwarder read n-1/components/",
        "etcdctl role grant-permission --prefix n-1-Forwarder readwrite n-1/components/Forwarder/",
        "etcdctl user add n-1-Forwarder",
        "etcdctl user grant-role n-1-Forwarder n-1-Forwarder",
    ]
    text = nats_configuration(NAMESPACE, one)
    assert 'user: "n-1-Forwarder", password: $N_1_FORWARDER_PASSWORD' in text
    assert 'publish: { deny: [">"] }' in text and '"n-1_forward.*.explain"' in text
    assert "?login=FILE&inbox=_INBOX_n-1-Forwarder" in text and '"_INBOX_n-1-Forwarder.>"' in text
