"""A sidecar in front of scripted engines: headers name the prefill engine."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from aiohttp import web

from dynamo_lite.forward import sidecar
from dynamo_lite.forward.attempt import ForwardParts
from dynamo_lite.forward.commands import SidecarProtocol
from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
from dynamo_lite.forward.sidecar import SidecarConfig
from tests.builders import eventually
from tests.external import Certificates
from tests.forwarding import COMPLETION, TEXT, Asked, asked_engines
from tests.ports import reserved_port
from tests.scripted import ScriptedEngine, anything

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

HEADER = "x-prefiller-host-port"


@dataclass(kw_only=True)
class Beside(Asked):
    """A sidecar with its engines."""

    #: Of the sidecar's own metrics; 0: none.
    metrics_port: int = 0

    def header(self, *numbers: int) -> dict[str, str]:
        return {HEADER: ",".join(self.prefill[n].address for n in numbers or (0,))}

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(f"{self.url}{path}") as answer:
            return answer.status, await answer.json(content_type=None)

    async def own(self, path: str) -> str:
        """A page of the sidecar's own metrics."""
        async with self.session.get(f"http://127.0.0.1:{self.metrics_port}{path}") as answer:
            return await answer.text()

    async def until(self, path: str, status: int) -> None:
        async def answered() -> bool:
            return (await self.get(path))[0] == status

        await eventually(answered)

    def legs(self) -> list[int]:
        """Of the prefill engines."""
        return [len(engine.legs) for engine in self.prefill]


def prefillers(scheme: str = "http", **options: Any) -> EngineOptions:
    return EngineOptions(url=f"{scheme}://localhost:1", role="prefill", **options)


@asynccontextmanager
async def beside(
    protocol: str = "nixl",
    *,
    prefill: int = 1,
    https: Certificates | None = None,
    options: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Beside]:
    """https: of all engines. options: of `ForwarderConfig`. engine: of the decode engine. config:
    of `SidecarConfig`."""
    async with AsyncExitStack() as stack:
        made = await asked_engines(stack, protocol, prefill, 1, https)
        if protocol == "mooncake":
            config["prefillers"] = prefillers(transfer_port=made["prefill"][0].port)
        given = {"role": "decode", "transfer_host": "127.0.0.1", **(engine or {})}
        forwarder = ForwarderConfig(
            protocol=protocol,  # type: ignore[arg-type]
            port=0,
            engines=(EngineOptions(url=made["decode"][0].url, **given),),
            **{"health_interval_s": 0.05, **(options or {})},
        )
        one = sidecar.sidecar(SidecarConfig(forwarder=forwarder, **config))
        url = (await stack.enter_async_context(one)).url
        b = Beside(**made, url=url, metrics_port=config.get("metrics_port", 0))
        await b.until("/ready", 200)
        yield b
        await b.fleet.ends_well()


@pytest.mark.parametrize("name", get_args(SidecarProtocol))
async def test_the_named_engine_computes_the_prompt(name: str):
    async with beside(name) as b:
        for _ in range(3):  # a push is serial until its prefill engine is known
            assert await b.text(b.header()) == TEXT
        assert len(b.prefill[0].legs) == len(b.decode[0].legs) == 3
        assert not any(HEADER in leg.headers for leg in b.fleet.legs)


async def test_without_the_header_the_decode_engine_is_alone():
    """Fields that only a forwarder may set are removed."""
    async with beside("sglang") as b:
        b.decode[0].handover = anything
        assert await b.text() == TEXT
        assert await b.text({HEADER: " , "}, kv_transfer_params={"do_remote_prefill": True}) == TEXT
        assert b.prefill[0].legs == []
        assert [leg.body for leg in b.decode[0].legs] == [COMPLETION] * 2


async def test_the_first_of_several_is_taken():
    async with beside(prefill=2) as b:
        first, second = (engine.address for engine in b.prefill)
        for headers in (
            {HEADER: f"{first}, {second}"},
            [(HEADER, first), (HEADER, second)],
            {HEADER: f"http://{first},{second}"},
        ):
            assert await b.text(headers) == TEXT
        assert b.legs() == [3, 0]


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "100.100.100.200", "[fd00:ec2::254]", "8.8.8.8", "metadata"),
        "[::ffff:8.8.8.8]",
    ],
)
async def test_foreign_hosts_are_refused(host: str):
    async with beside() as b:
        for value in (f"{host}:80", f"{b.prefill[0].address},{host}:80"):
            status, answer = await b.ask(headers={HEADER: value})
            message = answer["error"]["message"]
            assert status == 403
            assert "10.0.0.0/8" in message and "--allow-prefiller" in message
        assert b.fleet.legs == []


async def test_only_listed_hosts_are_accepted():
    async with beside(allowed=("10.1.0.0/16", "prefill-0")) as b:
        status, answer = await b.ask(headers=b.header())
        assert status == 403 and "10.1.0.0/16, prefill-0" in answer["error"]["message"]
    async with beside(allowed=("127.0.0.1",)) as b:
        assert await b.text(b.header()) == TEXT


async def test_malformed_names_and_too_many_are_refused():
    async with beside() as b:
        for value in (
            "x",
            "127.0.0.1",
            ":80",
            "a:b",
            "u@h:1",
            "h:1/p",
            "h:99999",
            "[fd00:ec2::254%1]:80",
        ):
            status, answer = await b.ask(headers={HEADER: value})
            assert status == 400 and "expected HOST:PORT" in answer["error"]["message"]
        value = ",".join(f"127.0.0.1:{port}" for port in range(1000, 1100))
        status, answer = await b.ask(headers={HEADER: value})
        assert status == 400 and "at most 64" in answer["error"]["message"]
        assert b.fleet.legs == []


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
async def test_an_engine_that_is_not_there_costs_no_answer(name: str):
    async with beside(name) as b:
        header = b.header()
        await b.prefill[0].stop()
        for _ in range(2):
            assert await b.text(header) == TEXT
        await b.prefill[0].start()
        async with asyncio.timeout(10):
            while not b.prefill[0].legs:  # it is used again, whatever happened before
                assert await b.text(header) == TEXT


async def test_all_requests_wait_for_the_ids_of_an_engine_whichever_client_leaves(
    monkeypatch: pytest.MonkeyPatch,
):
    asked, answers, handle = asyncio.Event(), asyncio.Event(), ScriptedEngine.handle

    async def held(self: ScriptedEngine, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/query":
            asked.set()
            await answers.wait()
        return await handle(self, request)

    monkeypatch.setattr(ScriptedEngine, "handle", held)
    async with beside("mooncake") as b:
        leaves = asyncio.create_task(b.text(b.header()))
        await asyncio.wait_for(asked.wait(), 30)
        stay = [asyncio.create_task(b.text(b.header())) for _ in range(3)]
        leaves.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaves
        answers.set()
        assert await asyncio.gather(*stay) == [TEXT] * 3
        assert len(b.prefill[0].legs) == 3


async def test_no_request_waits_for_an_engine_that_is_forgotten_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sidecar, "MAX_PREFILLERS", 1)
    async with beside("mooncake", prefill=2) as b:
        assert await asyncio.wait_for(b.text(b.header(1, 0)), 20) == TEXT


async def test_an_engine_is_forgotten_when_it_is_not_named_any_more(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sidecar, "_NAMED_S", 0.1)
    async with beside(metrics_port=reserved_port()) as b:
        known = b.prefill[0].address

        async def is_forgotten() -> bool:
            return known not in json.loads(await b.own("/health"))["engines"]

        for times in (1, 2):
            assert await b.text(b.header()) == TEXT
            assert b.legs() == [times]
            await eventually(is_forgotten)


async def test_engines_without_a_prefill_of_their_own_need_one_that_answers():
    async with beside("sglang", prefill=2) as b:
        await b.prefill[0].stop()
        status, answer = await b.ask(headers=b.header())
        assert status == 503 and "prefill" in answer["error"]["message"]
        # It has just refused, so another one that is named is asked.
        assert await b.text(b.header(0, 1)) == TEXT
        assert b.legs() == [0, 1]
        status, answer = await b.ask(headers=b.header(1), echo=True)
        assert status == 501 and "with sglang none of these engines" in answer["error"]["message"]


async def test_other_routes_pass_through():
    async with beside() as b:
        for headers in (b.header(), {HEADER: "nonsense"}):
            passed = {"passed": "/tokenize", "body": COMPLETION}
            assert await b.ask(headers=headers, route="/tokenize") == (200, passed)
        async with b.session.get(f"{b.url}/metrics") as page:
            assert "vllm:num_requests_running" in await page.text()
        assert b.prefill[0].legs == []


async def test_its_health_is_the_decode_engines():
    async with beside() as b:
        assert (await b.get("/health"))[0] == 200
        await b.decode[0].stop()
        await b.until("/health", 503)
        _, facts = await b.get("/ready")
        assert b.decode[0].address in facts["checks"]["engine"]["detail"]
        assert (await b.get("/live"))[0] == 200
        status, answer = await b.ask(headers=b.header())
        assert status == 503 and "decode engine" in answer["error"]["message"]


async def test_many_engines_are_not_remembered_for_ever():
    engines = (EngineOptions(url="http://localhost:1", role="decode"),)
    config = SidecarConfig(forwarder=ForwarderConfig(engines=engines))
    parts = ForwardParts(config.forwarder, by_load=False)
    known = sidecar.NamedPrefillers(parts, config)
    async with parts:
        [first] = await known.find(["10.0.0.1:1"])
        ports = range(1, sidecar.MAX_PREFILLERS + 1)
        for port in ports:
            await known.find([f"10.0.0.1:{port}"])
        assert await known.find(["10.0.0.1:1"]) == [first]
        assert len(parts.engines.all) == 1 + len(ports)
        await known.find(["10.0.0.2:1"])
        assert await known.find(["10.0.0.1:1"]) == [first]
        assert len(parts.engines.all) == 1 + len(ports)
        assert "10.0.0.1:2" not in {engine.name for engine in parts.engines.all}


async def test_it_speaks_https_to_all_sides(certificates: Certificates):
    cert, key = (str(file) for file in certificates.files())
    ca = str(certificates.folder / "ca.pem")
    async with beside(
        https=certificates,
        options={"tls_cert": cert, "tls_key": key},
        engine={"ca_file": ca},
        prefillers=prefillers("https", ca_file=ca),
    ) as b:
        assert b.url.startswith("https://")
        assert await b.text(b.header()) == TEXT
        assert b.legs() == [1]
