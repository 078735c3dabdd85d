"""The Kubernetes connector against an API server that takes only what the real one would."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dynamo_lite.planner.config import KubernetesOptions
from dynamo_lite.planner.kubernetes import KubernetesConnector
from dynamo_lite.protocol.errors import (
    ConfigError,
    DeadlineExceeded,
    ProtocolError,
    Refused,
    Unavailable,
)
from dynamo_lite.protocol.planner import RoleCounts
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.kubernetes import KubernetesApi
from tests.builders import endpoint_record, eventually
from tests.contract.planning import Bench, D, FakeSupervisor, P
from tests.external import Certificates

COST = "controller.kubernetes.io/pod-deletion-cost"
BASE = "/apis/apps/v1/namespaces/prod"


class ApiServer:
    """Deployments `p` and `d`, as replicas, ready pods and a resource version."""

    def __init__(self) -> None:
        self.replicas = {"p": 1, "d": 2}
        self.ready = {"p": 1, "d": 2}
        self.terminating = {"p": 0, "d": 0}
        self.versions = {"p": 10, "d": 20}
        self.token = "first"
        self.pods: dict[str, dict[str, str]] = {}
        self.mistakes: list[str] = []
        #: Instead of an answer: a status, a body, or "hang".
        self.faults: list[Any] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if self.faults and (fault := self.faults.pop(0)):
            if fault == "hang":
                await asyncio.Event().wait()
            if isinstance(fault, bytes):
                return web.Response(body=fault)
            return _status(fault, "told to")
        if (request.path, request.method) == ("/api/v1/namespaces/prod/pods", "GET"):
            return self._listed(request.query["labelSelector"])
        kind, _, name = request.path.rpartition("/pods/")
        if kind == "/api/v1/namespaces/prod":
            return await self._annotate(request, name)
        for one in self.replicas:
            if request.path == f"{BASE}/deployments/{one}" and request.method == "GET":
                return web.json_response(self._workload(one))
            if request.path == f"{BASE}/deployments/{one}/scale" and request.method == "PATCH":
                return await self._scale(request, one)
        return _status(404, f"{request.method} {request.path} is not found")

    def _workload(self, name: str) -> dict[str, Any]:
        return {
            "metadata": {"name": name, "resourceVersion": str(self.versions[name])},
            "spec": {
                "replicas": self.replicas[name],
                "selector": {"matchLabels": {"app": "dynamo-lite", "role": name}},
            },
            "status": {"replicas": self.replicas[name], "readyReplicas": self.ready[name]},
        }

    def _listed(self, selector: str) -> web.Response:
        labels = dict(label.split("=") for label in selector.split(","))
        assert labels.pop("app") == "dynamo-lite"
        name = labels.pop("role")
        ends = (datetime.now(UTC) + timedelta(seconds=30)).isoformat()
        ending = {"name": "old", "deletionTimestamp": ends}
        pods: list[dict[str, Any]] = [{"name": "new"}] * self.replicas[name]
        pods += [ending] * self.terminating[name]
        pods += [
            {"name": pod, "annotations": notes}
            for pod, notes in self.pods.items()
            if pod.startswith(f"{name}-")
        ]
        return web.json_response({"items": [{"metadata": pod} for pod in pods]})

    async def _scale(self, request: web.Request, name: str) -> web.Response:
        if request.content_type != "application/merge-patch+json":
            return _status(415, "the body of the request was in an unknown format")
        change = json.loads(await request.read())
        if set(change) != {"metadata", "spec"} or set(change["spec"]) != {"replicas"}:
            self.mistakes.append(f"changes more than the replicas: {change}")
        if change["metadata"] != {"resourceVersion": str(self.versions[name])}:
            return _status(409, "the object has been modified; please apply your changes to it")
        self.replicas[name] = change["spec"]["replicas"]
        self.versions[name] += 1
        return web.json_response(self._workload(name))

    async def _annotate(self, request: web.Request, name: str) -> web.Response:
        if request.content_type != "application/merge-patch+json":
            return _status(415, "the body of the request was in an unknown format")
        change = json.loads(await request.read())
        self.pods.setdefault(name, {}).update(change["metadata"]["annotations"])
        return web.json_response({"metadata": change["metadata"]})


def _status(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "message": message, "code": code}
    return web.json_response(body, status=code)


@pytest.fixture
async def server(certificates: Certificates) -> AsyncIterator[ApiServer]:
    fake = ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", fake.handle)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    folder = certificates.folder
    context.load_cert_chain(folder / "server.pem", folder / "server-key.pem")
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    fake.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()
    assert fake.mistakes == []


@pytest.fixture
def account(certificates: Certificates, tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("prod")
    (tmp_path / "ca.crt").write_bytes((certificates.folder / "ca.pem").read_bytes())
    return tmp_path


def connect(server: ApiServer, account: Path, timeout_s: float = 5.0) -> KubernetesConnector:
    options = KubernetesOptions(
        decode="deployments/d", prefill="deployments/p", decode_devices=2, prefill_devices=1
    )
    return KubernetesConnector(KubernetesApi(server.url, account, timeout_s), options)


async def test_numbers_are_read_and_changed(server: ApiServer, account: Path):
    connector = connect(server, account)
    server.ready["d"] = 1
    found = await connector.counts()
    assert found[D] == RoleCounts(starting=1, ready=1, devices_each=2, devices_free=100_000)
    assert (found[P].starting, found[P].ready) == (0, 1)
    await connector.change(D, 3)
    assert server.replicas == {"p": 1, "d": 3}
    await connector.counts()
    await connector.change(D, 2)
    assert server.replicas == {"p": 1, "d": 2}


async def test_a_change_by_another_client_is_a_conflict(server: ApiServer, account: Path):
    connector = connect(server, account)
    await connector.counts()
    server.replicas["d"], server.versions["d"] = 3, 21
    with pytest.raises(Unavailable, match="409 the object has been modified"):
        await connector.change(D, 1)
    assert server.replicas["d"] == 3
    await connector.counts()
    await connector.change(D, 4)
    assert server.replicas["d"] == 4


async def test_an_answer_of_another_shape_gives_no_numbers(server: ApiServer, account: Path):
    connector = connect(server, account)
    server.faults = [b'{"metadata": {"resourceVersion": "1"}, "spec": {}}']
    with pytest.raises(ProtocolError, match=r"not the expected answer: .*selector"):
        await connector.counts()


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (422, Refused, "422 told to"),
        (429, Unavailable, "429 told to"),
        (503, Unavailable, "503 told to"),
        ("hang", DeadlineExceeded, "no answer within 0.3 s"),
        (b"\xff not json", ProtocolError, "not a JSON object"),
    ],
)
async def test_each_failure_differs_from_the_others(
    server: ApiServer, account: Path, fault: Any, error: type[Exception], said: str
):
    connector = connect(server, account, timeout_s=0.3 if fault == "hang" else 5.0)
    await connector.counts()
    server.faults = [fault]
    with pytest.raises(error, match=said):
        await connector.change(D, 3)
    assert server.replicas["d"] == 2


async def test_a_new_token_is_used_at_once(server: ApiServer, account: Path):
    connector = connect(server, account)
    server.token = "second"
    with pytest.raises(Refused, match="401"):
        await connector.counts()
    (account / "token").write_text("second")
    await connector.counts()


async def test_the_server_s_certificate_is_checked(
    server: ApiServer, account: Path, certificates: Certificates
):
    (account / "ca.crt").write_bytes((certificates.folder / "stranger.pem").read_bytes())
    with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
        await connect(server, account).counts()


def pod(host: str) -> EndpointRecord:
    return endpoint_record(1, P, "prefill", host=host)


async def test_the_victim_is_marked_before_the_replicas_are_lowered(
    server: ApiServer, account: Path
):
    connector = connect(server, account)
    await connector.counts()
    server.faults = [None, 503]
    with pytest.raises(Unavailable):
        await connector.change(D, 1, pod("d-7f9-x2"))
    assert (server.pods, server.replicas["d"]) == ({"d-7f9-x2": {COST: "-1"}}, 2)
    server.terminating["d"] = 1
    await connector.change(D, 1, pod("d-7f9-x2"))
    server.ready["d"] = 1
    now = (await connector.counts())[D]
    assert (now.ready, now.draining) == (1, 1)
    with pytest.raises(ProtocolError, match="not the name of a pod"):
        await connector.change(D, 0, pod("../../secrets/x"))
    assert server.replicas["d"] == 1


async def test_the_last_mark_counts_and_not_that_of_an_order_that_failed(
    server: ApiServer, account: Path
):
    connector = connect(server, account)
    await connector.counts()
    server.faults = [None, 409]
    with pytest.raises(Unavailable):
        await connector.change(D, 1, pod("d-7f9-x2"))
    server.pods["d-7f9-x4"] = {COST: "5"}
    await connector.counts()
    await connector.change(D, 1, pod("d-7f9-x3"))
    marks = {name: int(notes[COST]) for name, notes in server.pods.items()}
    assert marks == {"d-7f9-x3": -2, "d-7f9-x2": -1, "d-7f9-x4": 5}


async def test_only_own_pods_are_removed(server: ApiServer, account: Path):
    connector = connect(server, account)

    server.pods = {"p-7f9-1": {}, "p-7f9-2": {}}
    await connector.counts()
    # The last one is of a Deployment `p-large`.
    hosts = ("p-7f9-1", "p-7f9-2", "q-1", "p-large-7f9-1")
    assert [host for host in hosts if connector.owns(pod(host))] == ["p-7f9-1", "p-7f9-2"]


def test_a_role_without_a_deployment_has_no_own_pods(account: Path):
    api = KubernetesApi("https://kubernetes.default.svc", account, 1.0)
    connector = KubernetesConnector(api, KubernetesOptions(decode="deployments/d"))
    assert not connector.owns(pod("p-1"))


@pytest.mark.parametrize("missing", ["token", "ca.crt", "namespace"])
def test_without_a_service_account_the_start_fails(account: Path, missing: str):
    (account / missing).unlink()
    with pytest.raises(ConfigError, match="no usable service account"):
        KubernetesApi("https://kubernetes.default.svc", account, 1.0)


@pytest.mark.parametrize(
    ("name", "content"), [("token", b"\xff\xfet\x00"), ("token", b"two\nlines"), ("namespace", b"")]
)
def test_a_file_with_other_contents_is_no_service_account(account: Path, name: str, content: bytes):
    (account / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} is not one line of printable ASCII"):
        KubernetesApi("https://kubernetes.default.svc", account, 1.0)


async def test_a_token_that_is_spoilt_later_is_a_failed_request(server: ApiServer, account: Path):
    connector = connect(server, account)
    (account / "token").write_bytes(b"\xff")
    with pytest.raises(Unavailable, match="token is not one line"):
        await connector.counts()
    (account / "token").write_text("first")
    await connector.counts()


async def test_a_planner_scales_a_deployment(
    server: ApiServer, account: Path, nats_url: str, etcd_url: str, namespace: str
):
    async with Bench(nats_url, etcd_url, namespace, FakeSupervisor()) as bench:
        connector = connect(server, account)
        connector.owns = lambda worker: True  # its workers are no pods
        server.faults = [500, 403]
        async with bench.planner(connector=connector):
            await bench.want(VllmWorker=3)
            await eventually(lambda: server.replicas["d"] == 3)
            server.ready["d"] = 3
            await bench.until_reached()
            victims = {f"host-{await bench.worker(D):x}" for _ in range(3)}
            await bench.want(VllmWorker=2)
            await eventually(lambda: server.replicas["d"] == 2)
            assert server.pods != {} and set(server.pods) < victims
            server.ready["d"] = 2
            await bench.until_reached()
