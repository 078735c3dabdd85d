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
    frontend, router, *others = _others(namespace)
    found = (frontend, router, *_workers(namespace), *others)
    return {permissions.component: permissions for permissions in found}


def _others(namespace: str) -> tuple[Permissions, ...]:
    members, links = names.components_prefix(namespace), names.links_prefix(namespace)
    notices, health = names.kv_subject(namespace, _DECODE), names.health_subject(namespace, _DECODE)
    explain = (names.explain_subject, names.forward_explain_subject)
    outcomes, routers = _of_any(namespace, names.fates_subject), _endpoints(namespace, "Router")

    def own(component: str) -> str:
        return f"{members}{component}/"

    def options(component: str) -> str:
        return names.live_options_key(namespace, component)

    return (
        Permissions(
            "Frontend",
            publish=(routers, *outcomes, _snapshots(namespace)),
            subscribe=(health, notices),
            read=(members, links, options("Frontend")),  # the dashboard shows failed links
            write=(own("Frontend"), own("Processor"), names.adapters_prefix(namespace)),
        ),
        Permissions(
            "Router",
            publish=(_snapshots(namespace),),
            subscribe=(routers, *outcomes, notices),
            read=(members, options("Router")),
            write=(own("Router"),),
        ),
        Permissions(
            "Planner",
            read=(members, links, options("Planner")),  # as the dashboard
            write=(own("Planner"), names.planner_prefix(namespace)),
        ),
        Permissions(
            "Forwarder",
            subscribe=_of_any(namespace, names.forward_explain_subject),
            read=(members,),
            write=(own("Forwarder"),),
        ),
        # Of `dynamo-lite join`, which sends no messages.
        *(
            Permissions(component, read=(members,), write=(own(component),))
            for component in ("Engine", "PrefillEngine", "DecodeEngine")
        ),
        Permissions(OPERATOR, publish=_of_any(namespace, *explain), write=(f"{namespace}/",)),
    )


def _workers(namespace: str) -> tuple[Permissions, ...]:
    members, links = names.components_prefix(namespace), names.links_prefix(namespace)
    decode, prefill = (names.health_subject(namespace, one) for one in (_DECODE, _PREFILL))
    stream, jobs = names.prefill_stream(namespace), names.prefill_jobs_subject(namespace)
    metadata = names.nixl_metadata_prefix(namespace)
    describe = _of_any(namespace, names.describe_subject)
    own_engine = (*_of_any(namespace, names.leave_subject), *describe)
    from_prefill = (names.claim_subject, names.done_subject, names.first_token_subject)
    to_decode = _of_any(namespace, *from_prefill)
    queue = _queue_api(stream)
    return (
        Permissions(
            _DECODE,
            publish=(
                *(decode, names.kv_subject(namespace, _DECODE), *own_engine),
                *(jobs, f"{jobs}.*", *queue, f"$JS.API.STREAM.MSG.DELETE.{stream}"),
            ),
            subscribe=(
                *(_endpoints(namespace, _DECODE), _snapshots(namespace), prefill),
                *(*own_engine, *to_decode, *_of_any(namespace, names.explain_subject)),
            ),
            read=(members, links, names.live_options_key(namespace, _DECODE)),
            write=(f"{members}{_DECODE}/", metadata),
        ),
        Permissions(
            _PREFILL,
            publish=(
                *(prefill, *describe, *to_decode, *queue),
                *(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*", f"$JS.ACK.{stream}.>"),
            ),
            subscribe=describe,
            read=(members, metadata),
            write=(f"{members}{_PREFILL}/", links),
        ),
    )


def _endpoints(namespace: str, component: str) -> str:
    """All endpoints of all instances."""
    return names.endpoint_subject(namespace, component, "any", 0).rpartition(".")[0] + ".*"


def _snapshots(namespace: str) -> str:
    return names.kv_snapshot_subject(namespace, _DECODE, 0).replace(".0.", ".*.")


def _of_any(namespace: str, *subjects: Callable[[str, Any], str]) -> tuple[str, ...]:
    """The subjects of all engines, or of all processes."""
    return tuple(subject(namespace, 0).replace(".0.", ".*.") for subject in subjects)


def _queue_api(stream: str) -> tuple[str, ...]:
    """Requests of JetStream that make a queue, add replicas to it, or look at it."""
    return (
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.CREATE.{stream}",
        f"$JS.API.STREAM.UPDATE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.>",
    )
