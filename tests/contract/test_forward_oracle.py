"""The same requests through the Forwarder and through the field's own routers, in front of the same
engines: what the engines are sent is compared leg by leg.

`scripts/get_routers` installs `vllm-router` and `sglang-router`. Without them these tests are
skipped.
"""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynamo_lite.forward.protocols.registry import PROTOCOLS
from tests.forwarding import Rig, rig
from tests.ports import reserved_port
from tests.scripted import CHAT as CHATS
from tests.scripted import MESSAGES, RESPONSES, Leg

pytestmark = pytest.mark.heavy

_PROGRAMS = Path(__file__).parents[2] / ".dynamo-lite" / "routers" / "bin"
_READY_S = 80.0

#: What the routers add to every body: defaults of their own request types.
ADDED = {
    *("echo", "no_stop_trim", "ignore_eos", "skip_special_tokens", "return_hidden_states"),
    *("separate_reasoning", "stream_reasoning", "include_reasoning", "continue_final_message"),
    *("logprobs", "stream", "tool_choice"),
}

COMPLETION: dict[str, Any] = {
    "model": "m",
    "prompt": "hello",
    "max_tokens": 4,
    "min_tokens": 3,
    "seed": 7,
}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "max_completion_tokens": 4,
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
#: `store`: vllm-router also stores the prefill engine's answer, unless the client forbids it.
RESPONSE: dict[str, Any] = {"model": "m", "input": "hi", "max_output_tokens": 4, "store": False}
MESSAGE: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4,
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", COMPLETION),
    "streamed completion": ("/v1/completions", COMPLETION | STREAMED),
    "token ids": ("/v1/completions", COMPLETION | {"prompt": [1, 2, 3]}),
    "chat": (CHATS, CHAT),
    "streamed chat": (CHATS, CHAT | STREAMED),
    "tools": (
        CHATS,
        CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    ),
    "response": (RESPONSES, RESPONSE),
    "streamed response": (RESPONSES, RESPONSE | {"stream": True}),
    "message": (MESSAGES, MESSAGE),
    "streamed message": (MESSAGES, MESSAGE | {"stream": True}),
}
#: What sglang-router does not serve, or refuses.
REFUSED_BY_SGLANG_ROUTER = {
    *("token ids", "response", "streamed response", "message", "streamed message")
}
#: Without `min_tokens` Mooncake's prefill leg may end with the end of the sequence.
ALONE_WITH_MOONCAKE = (RESPONSES, MESSAGES)
PROTOCOLS_OF_ROUTERS = ("nixl", "nixl-push", "mooncake", "sglang")
#: For a protocol of vLLM: a client's own parameters are overwritten by both.
FORGED = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.9"}}


def program(name: str) -> str:
    found = shutil.which(name, path=str(_PROGRAMS))
    if found is None:
        pytest.skip(f"{name} is not installed: see scripts/get_routers")
    return found


def command(protocol: str, r: Rig) -> list[str]:
    prefill, decode = r.prefill[0], r.decode[0]
    if protocol == "sglang":
        python = Path(program("sglang-router")).with_name("python")
        router = [str(python), "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        engines = ["--prefill", prefill.url, "8998", "--decode", decode.url]
    else:
        router = [program("vllm-router"), "--vllm-pd-disaggregation"]
        engines = ["--prefill", prefill.url]
        if protocol == "mooncake":
            router += ["--kv-connector", "mooncake"]
            engines += [str(prefill.port)]
        engines += ["--decode", decode.url]
    return [*router, *engines, "--policy", "round_robin", "--disable-retries"]


@asynccontextmanager
async def oracle(protocol: str, r: Rig, directory: Path) -> AsyncIterator[str]:
    """The URL of a router in front of the rig's engines."""
    port = reserved_port()
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(reserved_port())]
    with (directory / "router.log").open("wb") as log:
        process = subprocess.Popen(
            [*command(protocol, r), *where],
            stdout=log,
            stderr=log,
            env=os.environ | {"OPENAI_API_KEY": "router"},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(_READY_S):
            while not await _ready(r, url):
                assert process.poll() is None, (directory / "router.log").read_text()
                await asyncio.sleep(0.1)
        yield url
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


async def _ready(r: Rig, url: str) -> bool:
    try:
        async with r.session.post(f"{url}/v1/completions", json=COMPLETION) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def ask(r: Rig, url: str, route: str, body: Any) -> tuple[int, bytes, list[Leg]]:
    """Status, answer, and the legs that it took."""
    before = len(r.fleet.legs)
    async with r.session.post(f"{url}{route}", json=body) as answer:
        data = await answer.read()
    legs = [leg for leg in r.fleet.legs[before:] if leg.method == "POST"]
    return answer.status, data, legs


def shown(answer: bytes) -> list[bytes]:
    """The tokens of a whole or streamed answer."""
    return re.findall(rb" t\d", answer)


def described(leg: Leg) -> dict[str, Any]:
    """The body with its random parts replaced."""
    own = leg.headers.get("x-request-id", "none")
    body = replaced(leg.body, own)
    if "bootstrap_room" in body:
        body["bootstrap_room"] = type(body["bootstrap_room"]).__name__
    return body


def replaced(value: Any, own: str) -> Any:
    if isinstance(value, dict):
        return {
            key: "TRANSFER" if key == "transfer_id" else replaced(inner, own)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [replaced(inner, own) for inner in value]
    return value.replace(own, "ID") if isinstance(value, str) else value


def by_role(legs: list[Leg]) -> dict[str, Leg]:
    found = {leg.engine.role: leg for leg in legs}
    assert len(found) == len(legs)
    return found


@pytest.mark.parametrize("protocol", PROTOCOLS_OF_ROUTERS)
async def test_engines_are_sent_what_the_router_sends_them(protocol: str, tmp_path: Path):
    async with rig(protocol) as r, oracle(protocol, r, tmp_path) as router:
        await r.text()  # a push knows its prefill engine now, as the router does
        for name, (route, body) in REQUESTS.items():
            if protocol == "sglang" and name in REFUSED_BY_SGLANG_ROUTER:
                continue
            if protocol == "nixl-push" and route == RESPONSES:
                continue  # the router does not pair these legs, and an engine waits in vain
            for own in (body, body | FORGED) if protocol != "sglang" else (body,):
                status, answer, theirs = await ask(r, router, route, own)
                mine, got, ours = await ask(r, r.url, route, own)
                assert (mine, status) == (200, 200), name
                assert shown(got) == shown(answer) == [b" t0", b" t1", b" t2", b" t3"], name
                assert len(theirs) == 2, name
                if protocol == "mooncake" and route in ALONE_WITH_MOONCAKE:
                    assert [(leg.engine.role, leg.body) for leg in ours] == [("decode", body)]
                    continue
                assert len(ours) == 2, name
                if PROTOCOLS[protocol].order == "serial":
                    assert [leg.engine.role for leg in ours] == ["prefill", "decode"]
                    assert [leg.engine.role for leg in theirs] == ["prefill", "decode"]
                for role, leg in by_role(ours).items():
                    compare(name, role, leg, by_role(theirs)[role])


def compare(name: str, role: str, ours: Leg, theirs: Leg) -> None:
    mine, other = described(ours), described(theirs)
    assert ours.route == theirs.route
    assert {key: other.get(key) for key in mine} == mine, (name, role)
    assert other.keys() - mine.keys() <= ADDED, (name, role)


async def test_best_of_takes_one_room_with_either(tmp_path: Path):
    async with rig("sglang") as r, oracle("sglang", r, tmp_path) as router:
        for url in (router, r.url):
            status, _, legs = await ask(r, url, "/v1/completions", COMPLETION | {"best_of": 2})
            assert status == 200
            assert [type(leg.body["bootstrap_room"]) for leg in legs] == [int, int]
