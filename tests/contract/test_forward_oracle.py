"""The same requests through the Forwarder and through the field's own routers, in front of the same
engines: what the engines are sent is compared leg by leg.

`scripts/get_routers` installs `vllm-router` and `sglang-router`. Without them these tests are
skipped.
"""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynamo_lite.forward.protocols.base import Order
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.serve.processes import free_port
from tests.forwarding import Rig, rig
from tests.scripted import Fault, Leg

_PROGRAMS = Path(__file__).parents[2] / ".dynamo-lite" / "routers" / "bin"
_READY_S = 30.0

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
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", COMPLETION),
    "streamed completion": ("/v1/completions", COMPLETION | STREAMED),
    "token ids": ("/v1/completions", COMPLETION | {"prompt": [1, 2, 3]}),
    "chat": ("/v1/chat/completions", CHAT),
    "streamed chat": ("/v1/chat/completions", CHAT | STREAMED),
    "tools": (
        "/v1/chat/completions",
        CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    ),
}
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
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with (directory / "router.log").open("wb") as log:
        process = subprocess.Popen([*command(protocol, r), *where], stdout=log, stderr=log)
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


async def ask(r: Rig, url: str, route: str, body: dict[str, Any]) -> tuple[int, bytes, list[Leg]]:
    """Status, answer, and the legs that it took."""
    before = len(r.fleet.legs)
    async with r.session.post(f"{url}{route}", json=body) as answer:
        data = await answer.read()
    legs = [leg for leg in r.fleet.legs[before:] if leg.method == "POST"]
    return answer.status, data, legs


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


@pytest.mark.parametrize("protocol", ["nixl", "nixl-push", "mooncake", "sglang"])
async def test_engines_are_sent_what_the_router_sends_them(protocol: str, tmp_path: Path):
    async with rig(protocol) as r, oracle(protocol, r, tmp_path) as router:
        await r.text()  # a push knows its prefill engine now, as the router does
        for name, (route, body) in REQUESTS.items():
            if protocol == "sglang" and name == "token ids":
                continue  # sglang-router refuses them: 422
            for own in (body, body | FORGED) if protocol != "sglang" else (body,):
                status, answer, theirs = await ask(r, router, route, own)
                mine, got, ours = await ask(r, r.url, route, own)
                assert (mine, status) == (200, 200), name
                assert got.count(b'"text"') == answer.count(b'"text"'), name
                assert len(ours) == len(theirs) == 2, name
                if PROTOCOLS[protocol].order is Order.SERIAL:
                    assert [leg.engine.role for leg in ours] == ["prefill", "decode"]
                    assert [leg.engine.role for leg in theirs] == ["prefill", "decode"]
                for role, leg in by_role(ours).items():
                    compare(name, role, leg, by_role(theirs)[role])


def compare(name: str, role: str, ours: Leg, theirs: Leg) -> None:
    mine, other = described(ours), described(theirs)
    assert ours.route == theirs.route
    assert {key: other.get(key) for key in mine} == mine, (name, role)
    assert other.keys() - mine.keys() <= ADDED, (name, role)


#: What we do otherwise, on purpose: what happens, their status and prefill legs, ours.
DIFFERENCES: dict[
    str, tuple[dict[str, Any], dict[str, Fault], tuple[int, int], tuple[int, int]]
] = {
    # One set of parameters for two sequences, whose decode legs would race for it.
    "n": ({"n": 2}, {}, (200, 1), (200, 0)),
    "prompts": ({"prompt": ["a", "b"]}, {}, (200, 1), (200, 0)),
    "echo": ({"echo": True}, {}, (200, 1), (200, 0)),
    # No router of today falls back to the decode engine.
    "prefill 500": ({}, {"prefill": Fault("status", 500)}, (500, 1), (200, 1)),
    "prefill 503": ({}, {"prefill": Fault("status", 503)}, (500, 1), (200, 1)),
    "prefill cut": ({}, {"prefill": Fault("before_head")}, (500, 1), (200, 1)),
    # The same on both sides.
    "prefill 400": ({}, {"prefill": Fault("status", 400)}, (400, 1), (400, 1)),
    "decode 400": ({}, {"decode": Fault("status", 400)}, (400, 1), (400, 1)),
    "decode 500": ({}, {"decode": Fault("status", 500)}, (500, 1), (500, 1)),
    # An engine may have closed an idle connection: once more, with a new prefill.
    "decode cut": ({}, {"decode": Fault("before_head")}, (500, 1), (200, 2)),
}


async def test_differences_from_vllm_router_are_on_purpose(tmp_path: Path):
    async with rig("nixl") as r, oracle("nixl", r, tmp_path) as router:
        found: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
        for name, (fields, faults, *_) in DIFFERENCES.items():
            each: list[tuple[int, int]] = []
            for url in (router, r.url):
                for role, fault in faults.items():
                    engine = (r.prefill if role == "prefill" else r.decode)[0]
                    engine.faults.append(fault)
                status, _, legs = await ask(r, url, "/v1/completions", COMPLETION | fields)
                each.append((status, sum(leg.engine.role == "prefill" for leg in legs)))
            found[name] = (each[0], each[1])
        assert found == {name: (theirs, ours) for name, (_, _, theirs, ours) in DIFFERENCES.items()}
