"""The probes of a process: whether it must be restarted (`/live`), and whether it accepts
work (`/ready`).

Owns the checks that every process has, and the format of the replies. The checks use local
state only, without any network request.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.store import Lease

#: A lease is refreshed ten times per time-to-live. When this share of it has passed without a
#: refresh, the store counts as unavailable.
_STORE_LATE = 0.3

#: Check to what is wrong and what to do about it; empty when nothing is wrong.
Checks = Mapping[str, str]
#: The JSON body. Its `ok` decides between status 200 and 503.
ProbeBody = dict[str, Any]


#: Path to what makes its reply: `/live` and `/ready`.
Probes = Mapping[str, Callable[[], ProbeBody]]


def answer(checks: Checks) -> ProbeBody:
    return {
        "ok": not any(checks.values()),
        "checks": {name: {"ok": not detail, "detail": detail} for name, detail in checks.items()},
    }


def liveness(facts: Mapping[str, Any]) -> ProbeBody:
    """facts: from the component's `health`. Any reply shows that the event loop runs.
    Unavailable servers and a drain are no reason for a restart."""
    return answer({"event_loop": "", "engine": facts.get("dead", "")})


def readiness(
    facts: Mapping[str, Any], *, state: str, lease: Lease, messaging: Messaging
) -> ProbeBody:
    """facts: from the component's `health`. state: "starting", "ready" or "draining".

    A missing broker only adds its detail if `without_broker` of the facts says how requests are
    served meanwhile.
    """
    own = facts.get("checks")
    if own is None:
        failed = facts.get("error") or "it is unhealthy: see its log"
        own = {"component": "" if facts.get("ok", True) else failed}
    meanwhile = facts.get("without_broker", "")
    broker_counts = not messaging.connected and not meanwhile
    reply = answer(
        {
            "process": _STATES.get(state, ""),
            "store": _store(lease),
            "broker": _NO_BROKER if broker_counts else "",
            **own,
        }
    )
    if not messaging.connected and meanwhile:
        reply["checks"]["broker"]["detail"] = f"{_NO_BROKER} {meanwhile}"
    return reply


_NO_BROKER = "NATS is not connected: is it up, and can it be reached from here?"

_STATES = {
    "starting": "still starting: wait until it is registered",
    "draining": "draining: it finishes running requests and exits; send requests elsewhere",
}


def _store(lease: Lease) -> str:
    if lease.loss is not None:
        return f"the lease is {lease.loss.value}: this process exits"
    left_s = lease.remaining_s()
    if left_s >= (1 - _STORE_LATE) * lease.ttl_s:
        return ""
    return (
        f"etcd has not answered for about {lease.ttl_s - left_s:.0f} s: is it up? The lease"
        f" ends in {left_s:.0f} s, and this process with it"
    )
