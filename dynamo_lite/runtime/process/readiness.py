"""Two questions about a process, each with a cheap answer: must it be started again
(`/live`), and may it be given work (`/ready`).

Owns the checks that every process has, and the form of the answers. They are made from
what is known already: nothing is asked over the network for them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.store import Lease

#: A lease is refreshed ten times in its life: with so much of it gone, the store has not
#: answered for a while.
_STORE_LATE = 0.3

#: Check to what is wrong there, and what to do about it; empty: nothing.
Checks = Mapping[str, str]
#: The JSON body; its `ok` decides between 200 and 503.
Answer = dict[str, Any]


@dataclass(frozen=True)
class Probes:
    """What a process answers at `/live` and `/ready`."""

    live: Callable[[], Answer]
    ready: Callable[[], Answer]

    def at(self, path: str) -> Answer | None:
        """None for any other path."""
        match path:
            case "/live":
                return self.live()
            case "/ready":
                return self.ready()
            case _:
                return None


def answer(checks: Checks) -> Answer:
    return {
        "ok": not any(checks.values()),
        "checks": {name: {"ok": not detail, "detail": detail} for name, detail in checks.items()},
    }


def liveness(facts: Mapping[str, Any]) -> Answer:
    """facts: of the component's `health`. That there is an answer at all shows that the
    event loop runs; servers that are away, and a drain, are no reason for a restart."""
    return answer({"event_loop": "", "engine": facts.get("dead", "")})


def readiness(
    facts: Mapping[str, Any], *, state: str, lease: Lease, messaging: Messaging
) -> Answer:
    """facts: of the component's `health`. state: "starting", "ready" or "draining"."""
    own = facts.get("checks")
    if own is None:
        failed = facts.get("error") or "it cannot work; its log says why"
        own = {"component": "" if facts.get("ok", True) else failed}
    return answer(
        {
            "process": _STATES.get(state, ""),
            "store": _store(lease),
            "broker": ""
            if messaging.connected
            else "NATS is not connected: is it up, and can it be reached from here?",
            **own,
        }
    )


_STATES = {
    "starting": "still starting: wait until it is registered",
    "draining": "draining: it finishes what it has and ends; send requests elsewhere",
}


def _store(lease: Lease) -> str:
    if lease.loss is not None:
        return f"the lease is {lease.loss.value}: this process ends"
    left_s = lease.remaining_s()
    if left_s >= (1 - _STORE_LATE) * lease.ttl_s:
        return ""
    return (
        f"etcd has not answered for about {lease.ttl_s - left_s:.0f} s: is it up? The lease"
        f" ends in {left_s:.0f} s, and this process with it"
    )
