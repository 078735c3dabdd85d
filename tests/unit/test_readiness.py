"""What a process reports at `/live` and `/ready`."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from starlette.routing import Route
from starlette.testclient import TestClient

from dynamo_lite.runtime.process.readiness import liveness, readiness
from dynamo_lite.serve.services.frontend.frontend import Frontend, probe
from dynamo_lite.serve.services.frontend.http_entry import OwnPages
from tests.twins.servers import MemoryMessaging
from tests.unit.process_run import Run, get

WELL = {"ok": True, "dead": "", "checks": {"model": "", "engine": ""}}


@dataclass
class Lease:
    left_s: float = 30.0
    loss: Any = None
    ttl_s: float = 30.0

    def remaining_s(self) -> float:
        return self.left_s


@dataclass
class Process:
    facts: Mapping[str, Any] = field(default_factory=lambda: WELL)
    state: str = "ready"
    lease: Any = field(default_factory=Lease)
    messaging: MemoryMessaging = field(default_factory=MemoryMessaging)

    def ready(self) -> dict[str, Any]:
        return readiness(self.facts, state=self.state, lease=self.lease, messaging=self.messaging)

    def failing(self) -> dict[str, str]:
        answer = self.ready()
        failing = {k: c["detail"] for k, c in answer["checks"].items() if not c["ok"]}
        assert answer["ok"] is not bool(failing)
        return failing


async def test_each_check_fails_by_itself_and_says_what_to_do() -> None:
    async with MemoryMessaging() as messaging:
        assert Process(messaging=messaging).failing() == {}
        said = {
            "process": Process(state="draining", messaging=messaging),
            "store": Process(lease=Lease(left_s=20.0), messaging=messaging),
            "engine": Process(facts={**WELL, "checks": {"engine": "stuck"}}, messaging=messaging),
        }
        for check, process in said.items():
            assert list(process.failing()) == [check]
        assert "send requests elsewhere" in said["process"].failing()["process"]
        assert "not answered for about 10 s" in said["store"].failing()["store"]
        assert "starting" in Process(state="starting", messaging=messaging).failing()["process"]
        # A component without checks of its own has one.
        assert Process(facts={"ok": True}, messaging=messaging).failing() == {}
        failing = Process(facts={"ok": False, "error": "KeyError: 1"}, messaging=messaging)
        assert failing.failing() == {"component": "KeyError: 1"}
        messaging.set_connected(False)
        assert "NATS is not connected" in Process(messaging=messaging).failing()["broker"]


async def test_a_missing_broker_is_a_detail_only_where_requests_are_served_without_it() -> None:
    async with MemoryMessaging() as messaging:
        served = Process(facts={**WELL, "without_broker": "2 of 2"}, messaging=messaging)
        assert served.ready()["checks"]["broker"] == {"ok": True, "detail": ""}
        messaging.set_connected(False)
        assert served.failing() == {}
        broker = served.ready()["checks"]["broker"]
        assert broker["ok"] and "NATS is not connected" in broker["detail"]
        assert broker["detail"].endswith(" 2 of 2")
        unserved = Process(facts={**WELL, "without_broker": ""}, messaging=messaging)
        assert "NATS is not connected" in unserved.failing()["broker"]


def test_only_what_a_restart_heals_is_against_liveness() -> None:
    assert liveness(WELL)["ok"] and liveness({"ok": False})["ok"]
    dead = liveness({**WELL, "dead": "no step"})
    assert not dead["ok"] and dead["checks"]["engine"] == {"ok": False, "detail": "no step"}


async def test_a_process_answers_from_its_start_to_its_end() -> None:
    run, starting = Run(), asyncio.Event()
    go_on, leave = asyncio.Event(), asyncio.Event()

    async def start(_: Any) -> None:
        starting.set()
        await go_on.wait()

    run.worker.on_start, run.worker.on_drain = start, leave.wait
    exit_code = run.start()
    await starting.wait()
    assert run.worker.host
    url = run.worker.host.status_url
    assert [(await get(f"{url}/{path}"))[0] for path in ("live", "ready")] == [200, 503]
    go_on.set()
    await run.until("ready")
    assert [(await get(f"{url}/{path}"))[0] for path in ("live", "ready")] == [200, 200]
    run.messaging.set_connected(False)
    status, body = await get(f"{url}/ready")
    assert status == 503 and b"NATS is not connected" in body
    assert (await get(f"{url}/live"))[0] == 200
    status, body = await get(f"{url}/health")
    assert status == 503 and b'"nats_connected":false' in body
    run.messaging.set_connected(True)
    run.worker.host.stop("enough")
    await run.until("draining")
    assert [(await get(f"{url}/{path}"))[0] for path in ("live", "ready")] == [200, 503]
    leave.set()
    assert await exit_code == 0


def test_the_http_port_answers_probes_and_passes_the_rest_on() -> None:
    answers = {"live": {"ok": True}, "ready": {"ok": False, "checks": {}}}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        status = 405 if scope["method"] == "HEAD" else 418
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"app"})

    client = TestClient(
        OwnPages(app, [Route(f"/{name}", probe(partial(answers.get, name))) for name in answers])
    )
    assert client.get("/live").status_code == 200
    unready = client.get("/ready")
    assert (unready.status_code, unready.json()) == (503, answers["ready"])
    head = client.head("/ready")
    assert (head.status_code, head.content) == (503, b"")
    passed_on = client.get("/health"), client.head("/health")
    assert [answer.status_code for answer in passed_on] == [418, 418]
    assert client.post("/ready").status_code == 405


def test_an_edge_that_does_not_answer_is_no_reason_to_end_the_frontend() -> None:
    frontend = Frontend({})
    edge: Any = SimpleNamespace(trouble="", unhealthy="timeout", in_flight=0)
    nobody: Any = SimpleNamespace(members=(), responsive=(), transport=None)
    frontend._app = edge
    frontend._roster = frontend._health = frontend._failover = nobody
    assert "edge" not in frontend.health()["checks"]
    frontend._rust = edge
    facts = frontend.health()
    assert not facts["ok"] and facts["checks"]["edge"] == "timeout"
    assert liveness(facts)["ok"], "it may recover"
