"""A graph started with compose's own command lines, files, secrets and servers.

Its engines compute nothing. For the part that vLLM's process has in a decode worker, the test sends
jobs and answers claims with the decode worker's rights.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from dynamo_lite.disagg.attempts.ledger import CLAIM_S
from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode, encode_json
from dynamo_lite.protocol.errors import StartupError, StoreUnavailable
from dynamo_lite.protocol.prefill import Done, Held, decode_claim, decode_done
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.builders import engine_metadata, prefill_job
from tests.deploy.compose import Compose, planes
from tests.ports import reserved_port
from tests.process.command import Serving, run, serving
from tests.process.null_graph import is_answer
from tests.started import VLLM_PATIENCE_S

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

GRAPH = "tests.process.rights_graph:Disagg"
NAMESPACE = "dynamo"
_TOKENS = 20


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    with planes(tmp_path_factory.mktemp("compose")) as made:
        yield made


@pytest.fixture(scope="module")
def services(compose: Compose) -> Iterator[dict[str, Serving]]:
    """What differs from the containers: null engines, the listening address, and the ports: each
    container has its own."""
    with ExitStack() as stack:
        started: dict[str, Serving] = {}
        for name in ("decode", "prefill", "frontend"):
            [serve, graph, *options] = compose.command(name)
            assert (serve, graph) == ("serve", "graphs.disagg:Frontend")
            [service] = [o.partition("=")[2] for o in options if o.startswith("--service-name=")]
            options += ["--Graph.bind-host=127.0.0.1"]
            options += [f"--{service}.ServiceArgs.status-port={reserved_port()}"]
            if name == "frontend":
                options += ["--Frontend.host=127.0.0.1", "--Frontend.port=0"]
            environment = {**os.environ, **compose.environment(name)}
            state_dir = compose.container(name).root / "state"
            serve_here = serving(state_dir, *options, graph=GRAPH, env=environment)
            started[name] = stack.enter_context(serve_here)
        for name in ("decode", "prefill"):
            started[name].wait_line("ready ", VLLM_PATIENCE_S)
        yield started


def operator(compose: Compose, *command: str) -> str:
    """The output of `docker compose run --rm operator ...`."""
    done = run(*command, env={**os.environ, **compose.environment("operator")})
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_request_is_answered(services: dict[str, Serving]) -> None:
    line = await asyncio.to_thread(services["frontend"].wait_line, "ready http", VLLM_PATIENCE_S)
    body = {"model": "tiny", "prompt": "hello", "max_tokens": _TOKENS, "temperature": 0}
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(f"{line.split()[1]}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert is_answer(reply.json()["choices"][0]["text"], _TOKENS)


async def test_a_prefill_worker_takes_a_job(compose: Compose, services: dict[str, Serving]) -> None:
    done: asyncio.Queue[Done] = asyncio.Queue()

    async def claim(payload: bytes) -> bytes:
        assert decode_claim(payload).attempt == "a1"
        return encode(Held(for_s=CLAIM_S))

    async def ended(payload: bytes) -> None:
        done.put_nowait(decode_done(payload))

    engine = NAMESPACE, "e1"
    queue = JetStreamQueue(compose.nats_url("decode"), NAMESPACE, QueueConfig(push_timeout_s=10.0))
    async with (
        asyncio.timeout(60),
        EtcdStore(compose.etcd_url("decode")) as store,
        NatsMessaging(compose.nats_url("decode")) as messaging,
        messaging.serve(names.claim_subject(*engine), claim),
        messaging.serve(names.done_subject(*engine), ended),
        store.lease(30) as lease,
        queue,
    ):
        metadata = encode_json(engine_metadata("e1", lease.id, num_blocks=16))
        await store.put(names.nixl_metadata_key(*engine), metadata, lease=lease)
        await queue.push(encode(prefill_job("a1", engine_id="e1")), message_id="a1")
        said = await done.get()
        assert (said.attempt, said.outcome) == ("a1", "written")


def test_the_operator_sees_it_and_nothing_was_refused(
    compose: Compose, services: dict[str, Serving]
) -> None:
    listed = operator(compose, "ps")
    assert listed.count(" ready ") >= 3, listed
    option = "VllmWorker.max-local-prefill-length"
    operator(compose, "config", "set", f"{option}=700")
    assert "700" in operator(compose, "config", "get")
    broker = (compose.container("nats").root / "nats-server.log").read_text()
    output = "".join(service.output for service in services.values())
    assert "violation" not in broker.lower()
    assert "permission denied" not in output.lower()
    assert "without TLS" not in output


def _parts(url: str) -> tuple[str, dict[str, str]]:
    """The servers; what is behind the `?`, by name, each as it is written."""
    servers, _, query = url.partition("?")
    return servers, {part.partition("=")[0]: part for part in query.split("&")}


def _with(servers: str, *parts: str) -> str:
    return f"{servers}?{'&'.join(parts)}" if parts else servers


async def test_strangers_get_nothing(compose: Compose) -> None:
    """Without TLS, without a login, with a wrong one, without a certificate."""
    nats, of_nats = _parts(compose.nats_url("frontend"))
    etcd, of_etcd = _parts(compose.etcd_url("frontend"))
    own = [of_nats[name] for name in ("ca", "cert", "key")]
    wrong = compose.folder / "wrong"
    wrong.write_text("dynamo-Frontend:guessed\n")
    wrong.chmod(0o600)
    for url in (
        nats.replace("tls://", "nats://"),
        nats,
        _with(nats, of_nats["ca"], of_nats["login"]),
        _with(nats, *own),
        _with(nats, *own, f"login={wrong}"),
    ):
        with pytest.raises(StartupError):
            async with asyncio.timeout(20), NatsMessaging(url, connect_timeout_s=2):
                pass
    for url in (
        etcd.replace("https://", "http://"),
        etcd,
        _with(etcd, of_etcd["ca"]),
        _with(etcd, of_etcd["ca"], of_etcd["login"]),
        _with(etcd, *own, f"login={wrong}"),
    ):
        with pytest.raises(StartupError):
            async with asyncio.timeout(20), EtcdStore(url, connect_timeout_s=2):
                pass


async def test_a_certificate_alone_gives_no_rights(compose: Compose) -> None:
    etcd, parts = _parts(compose.etcd_url("frontend"))
    url = _with(etcd, *(parts[name] for name in ("ca", "cert", "key")))
    async with EtcdStore(url, connect_timeout_s=5) as store:
        with pytest.raises(StoreUnavailable, match=r"permission denied|user name is empty"):
            await store.get(names.components_prefix(NAMESPACE))
