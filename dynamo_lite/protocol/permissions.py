"""What each component needs of NATS and etcd, and no more.

Subjects and keys are those of `names.py`; `*` stands for one part, `>` for the rest. Every
component may also receive on its own inbox, and answer requests (`allow_responses`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo_lite.protocol import names

_DECODE, _PREFILL = "VllmWorker", "PrefillWorker"
#: Who uses the commands of `dynamo-lite`.
OPERATOR = "Operator"


@dataclass(frozen=True)
class Permissions:
    """Of the processes of one component, their engines among them."""

    component: str
    #: NATS subjects.
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    #: Prefixes of etcd's keys, and those that may also be changed.
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()


def inbox_of(user: str) -> str:
    """The prefix of the subjects on which this user receives replies."""
    return f"_INBOX_{user}"


def all_permissions(namespace: str) -> dict[str, Permissions]:
    """By component. `Operator` is who uses the commands of `dynamo-lite`."""
    found = (
        _frontend(namespace),
        _router(namespace),
        _decode_worker(namespace),
        _prefill_worker(namespace),
        _planner(namespace),
        _forwarder(namespace),
        *(
            _joined(namespace, component)
            for component in ("Engine", "PrefillEngine", "DecodeEngine")
        ),
        _operator(namespace),
    )
    return {permissions.component: permissions for permissions in found}


def _frontend(namespace: str) -> Permissions:
    return Permissions(
        "Frontend",
        publish=(
            _endpoints(namespace, "Router"),
            _of_any(names.fates_subject, namespace),
            _snapshots(namespace),
        ),
        subscribe=(
            _endpoints(namespace, "Processor"),
            names.health_subject(namespace, _DECODE),
            names.kv_subject(namespace, _DECODE),
        ),
        # The dashboard shows all members and failed links.
        read=(
            names.components_prefix(namespace),
            names.links_prefix(namespace),
            names.live_options_key(namespace, "Frontend"),
        ),
        write=(_own_keys(namespace, "Frontend"), _own_keys(namespace, "Processor")),
    )


def _router(namespace: str) -> Permissions:
    return Permissions(
        "Router",
        publish=(_snapshots(namespace),),
        subscribe=(
            _endpoints(namespace, "Router"),
            _of_any(names.fates_subject, namespace),
            names.kv_subject(namespace, _DECODE),
        ),
        read=(names.components_prefix(namespace), names.live_options_key(namespace, "Router")),
        write=(_own_keys(namespace, "Router"),),
    )


def _decode_worker(namespace: str) -> Permissions:
    stream = names.prefill_stream(namespace)
    depth = names.depth_subject(namespace)
    own_engine = (names.leave_subject, names.describe_subject)
    from_others = (
        names.claim_subject,
        names.done_subject,
        names.explain_subject,
        names.first_token_subject,
    )
    return Permissions(
        _DECODE,
        publish=(
            names.health_subject(namespace, _DECODE),
            names.kv_subject(namespace, _DECODE),
            *(_of_any(name, namespace) for name in own_engine),
            depth,
            names.prefill_jobs_subject(namespace),
            f"{names.prefill_jobs_subject(namespace)}.*",
            *_queue_api(stream),
            f"$JS.API.STREAM.MSG.DELETE.{stream}",
        ),
        subscribe=(
            _endpoints(namespace, _DECODE),
            _snapshots(namespace),
            *(_of_any(name, namespace) for name in (*own_engine, *from_others)),
            names.health_subject(namespace, _PREFILL),
            depth,
        ),
        read=(
            names.components_prefix(namespace),
            names.links_prefix(namespace),
            names.live_options_key(namespace, _DECODE),
        ),
        write=(_own_keys(namespace, _DECODE), names.nixl_metadata_prefix(namespace)),
    )


def _prefill_worker(namespace: str) -> Permissions:
    stream = names.prefill_stream(namespace)
    describe = _of_any(names.describe_subject, namespace)
    to_others = (
        names.claim_subject,
        names.done_subject,
        names.first_token_subject,
    )
    return Permissions(
        _PREFILL,
        publish=(
            names.health_subject(namespace, _PREFILL),
            describe,
            *(_of_any(name, namespace) for name in to_others),
            *_queue_api(stream),
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
            f"$JS.ACK.{stream}.>",
        ),
        subscribe=(describe,),
        read=(names.components_prefix(namespace), names.nixl_metadata_prefix(namespace)),
        write=(_own_keys(namespace, _PREFILL), names.links_prefix(namespace)),
    )


def _planner(namespace: str) -> Permissions:
    return Permissions(
        "Planner",
        read=(names.live_options_key(namespace, "Planner"),),
        # It revokes leases, for which etcd demands that it may delete their keys.
        write=(
            names.planner_prefix(namespace),
            names.components_prefix(namespace),
            names.nixl_metadata_prefix(namespace),
            names.links_prefix(namespace),
        ),
    )


def _forwarder(namespace: str) -> Permissions:
    return Permissions(
        "Forwarder",
        subscribe=(_of_any(names.forward_explain_subject, namespace),),
        read=(names.components_prefix(namespace),),
        write=(_own_keys(namespace, "Forwarder"),),
    )


def _joined(namespace: str, component: str) -> Permissions:
    """Of `dynamo-lite join`, which sends no messages."""
    return Permissions(
        component,
        read=(names.components_prefix(namespace),),
        write=(_own_keys(namespace, component),),
    )


def _operator(namespace: str) -> Permissions:
    return Permissions(
        OPERATOR,
        publish=(
            _of_any(names.explain_subject, namespace),
            _of_any(names.forward_explain_subject, namespace),
        ),
        write=(f"{namespace}/",),
    )


def _endpoints(namespace: str, component: str) -> str:
    """All endpoints of all instances."""
    return names.endpoint_subject(namespace, component, "any", 0).rpartition(".")[0] + ".*"


def _own_keys(namespace: str, component: str) -> str:
    return f"{names.components_prefix(namespace)}{component}/"


def _snapshots(namespace: str) -> str:
    return names.kv_snapshot_subject(namespace, _DECODE, 0).replace(".0.", ".*.")


def _of_any(name: Callable[[str, Any], str], namespace: str) -> str:
    """The subject of all engines, or of all processes."""
    subject = name(namespace, 0)
    head, _, last = subject.rpartition(".0.")
    return f"{head}.*.{last}"


def _queue_api(stream: str) -> tuple[str, ...]:
    """Requests of JetStream that make a queue, add replicas to it, make it again when a cluster
    has lost its jobs, or look at it."""
    return (
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.CREATE.{stream}",
        f"$JS.API.STREAM.UPDATE.{stream}",
        f"$JS.API.STREAM.DELETE.{stream}",
        f"$JS.API.CONSUMER.LIST.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.>",
    )
