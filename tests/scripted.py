"""Scripted stock engines that check their handover protocol strictly, and can fail at each point.

Engines of one `Fleet` share what their real counterparts share through the KV transfer: which
handovers were offered, taken and used up. What a strict engine does not accept is answered with
500 and noted in `Fleet.violations`, so that a test fails whatever the forwarder makes of it.
"""

import asyncio
import itertools
import json
import re
import ssl
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from tests.builders import eventually

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOKENS = "/inference/v1/generate"
GENERATES = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, TOKENS, "/generate")

#: `no_output`: a stream fails in place of its first output, as vLLM's when the KV was not loaded.
Stage = Literal["before_head", "after_head", "mid_stream", "status", "no_output"]


@dataclass(eq=False)
class Leg:
    """One request that an engine has got."""

    engine: "ScriptedEngine"
    number: int
    method: str
    route: str
    headers: dict[str, str]
    body: Any
    raw: bytes
    #: Of `Fleet.clock` at the end; None while it runs.
    ended: int | None = None
    #: Whether the other side has closed the connection before the end of the answer.
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def params(self) -> Any:
        return self.body.get("kv_transfer_params")


@dataclass
class Fault:
    """What the next request of an engine meets. hold: it waits for this first. seen: a cut in the
    middle of a stream waits for this, since what is not read yet is lost with the connection."""

    stage: Stage | None = None
    status: int = 500
    hold: asyncio.Event | None = None
    seen: asyncio.Event | None = None
    body: Any = None


class Violation(Exception):
    """The forwarder has broken the protocol."""


#: A leg that waits longer than this for its other one is a failure of the test.
_PAIR_S = 10.0


class Fleet:
    def __init__(self) -> None:
        self.violations: list[str] = []
        self.legs: list[Leg] = []
        self.engines: list[ScriptedEngine] = []
        self.clock = itertools.count()
        #: Names of handovers, and what became of them.
        self.offered: dict[str, Any] = {}
        self.used: Counter[str] = Counter()
        self._arrived: dict[str, asyncio.Event] = {}

    def arrived(self, name: str) -> asyncio.Event:
        return self._arrived.setdefault(name, asyncio.Event())

    async def meet(self, own: str, other: str) -> None:
        """Both sides of a handover wait for each other."""
        self.arrived(own).set()
        async with asyncio.timeout(_PAIR_S):
            await self.arrived(other).wait()

    async def ends_well(self) -> None:
        """Fails if an engine has seen its protocol broken, or if a leg is left open."""
        assert self.violations == []
        await eventually(lambda: all(leg.ended is not None for leg in self.legs), 5)

    def once(self, name: str) -> None:
        self.used[name] += 1
        if self.used[name] > 1:
            raise Violation(f"{name} is used a second time")


Handover = Callable[["ScriptedEngine", Leg], Awaitable[dict[str, Any]]]


class ScriptedEngine:
    """Async context manager. handover: checks a leg and returns the `kv_transfer_params` (or other
    fields) of its answer. tokens: of an answer. tls: it speaks HTTPS. Tests replace `handle`,
    `answer`, `stream`, `events`, `whole` and `text` to script what no `Fault` says."""

    def __init__(
        self,
        fleet: Fleet,
        role: Literal["prefill", "decode"],
        handover: Handover,
        *,
        tokens: int = 4,
        model: str = "m",
        tls: ssl.SSLContext | None = None,
    ):
        self.fleet, self.role, self.handover, self.tls = fleet, role, handover, tls
        self.tokens, self.model = tokens, model
        self.faults: deque[Fault] = deque()
        self.engine_id = f"engine-{next(fleet.clock)}"
        self.bootstrap_ids = {"0": {"engine_id": self.engine_id}}
        self.healthy = True
        #: vLLM's `--enable-request-id-headers`.
        self.returns_ids = False
        #: Of its streams.
        self.line_end = b"\n"
        #: A comment before the first output of its streams.
        self.keep_alive = b""
        #: Running and waiting requests.
        self.load: tuple[int, int] = (0, 0)
        self.legs: list[Leg] = []
        self.port = 0
        self._runner: web.ServerRunner | None = None
        fleet.engines.append(self)

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://{self.address}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def kvt_port(self) -> int:
        """KVT's usual one; where there is no such port, its HTTP port."""
        usual = self.port + 20_000
        return usual if usual <= 65535 else self.port

    async def __aenter__(self) -> "ScriptedEngine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """At the same port again after `stop`."""
        server = web.Server(self.handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self.tls
        )
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if request.path == "/query":
            return web.json_response(self.bootstrap_ids)
        if request.path == "/metrics":
            running, waiting = self.load
            return web.Response(
                text=f'vllm:num_requests_running{{engine="0"}} {running}.0\n'
                f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0\n'
            )
        if request.path == "/v1/models" and "x-client" not in request.headers:
            return web.json_response({"data": [{"id": self.model}]})
        return await self._leg(request)

    async def _leg(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.read()
        malformed = False
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body, malformed = None, True
        leg = Leg(
            engine=self,
            number=next(self.fleet.clock),
            method=request.method,
            route=request.path_qs,
            headers={name.lower(): value for name, value in request.headers.items()},
            body=body,
            raw=raw,
        )
        self.legs.append(leg)
        self.fleet.legs.append(leg)
        try:
            if malformed:
                return web.json_response({"error": {"message": "malformed"}}, status=400)
            return await self.answer(request, leg)
        except asyncio.CancelledError:
            leg.aborted.set()
            raise
        except (TimeoutError, ConnectionError):
            leg.aborted.set()
            return web.Response(status=500)
        finally:
            leg.ended = next(self.fleet.clock)

    async def answer(self, request: web.BaseRequest, leg: Leg) -> web.StreamResponse:
        fault = self.faults.popleft() if self.faults else Fault()
        if fault.hold is not None:
            await fault.hold.wait()
        if fault.stage == "status":
            body = fault.body or {"error": {"message": f"scripted {fault.status}"}}
            return web.json_response(body, status=fault.status, headers=self._ids(leg))
        if fault.stage == "before_head":
            return _cut(request)
        if not isinstance(leg.body, dict) or leg.route not in GENERATES:
            return web.json_response({"passed": leg.route, "body": leg.body})
        try:
            extra = await self.handover(self, leg)
        except Violation as exc:
            self.fleet.violations.append(f"{self.role} {leg.route}: {exc}")
            return web.json_response({"error": {"message": str(exc)}}, status=500)
        if leg.body.get("stream"):
            return await self.stream(request, leg, fault)
        if fault.stage in ("after_head", "mid_stream"):
            response = web.StreamResponse(headers={"content-length": "100"})
            await response.prepare(request)
            await response.write(b"{")
            return _cut(request)
        whole = self.whole(leg)
        return web.json_response({**whole, **extra} if extra else whole, headers=self._ids(leg))

    def _ids(self, leg: Leg) -> dict[str, str]:
        given = leg.headers.get("x-request-id", "")
        return {"X-Request-Id": given} if self.returns_ids and given else {}

    def text(self, number: int) -> str:
        return f" t{number}"

    def _limit(self, leg: Leg) -> int:
        if leg.route == RESPONSES:
            limit = leg.body.get("max_output_tokens")
        elif leg.route == TOKENS:
            limit = leg.body.get("sampling_params", {}).get("max_tokens")
        else:
            limit = leg.body.get("max_completion_tokens", leg.body.get("max_tokens"))
        return self.tokens if limit is None else min(limit, self.tokens)

    def _usage(self, leg: Leg) -> dict[str, Any]:
        return {"prompt_tokens": 5, "completion_tokens": self._limit(leg)}

    def _native(self, leg: Leg) -> list[dict[str, Any]]:
        """SGLang's own answer."""
        one = {"text": "t", "meta_info": {"id": "1"}}
        texts = leg.body["text"]
        if isinstance(texts, list):
            return [{**one, "index": number} for number in range(len(texts))]
        return [one]

    def whole(self, leg: Leg) -> Any:
        if leg.route == "/generate":
            found = self._native(leg)
            return found if isinstance(leg.body["text"], list) else found[0]
        text = "".join(self.text(n) for n in range(self._limit(leg)))
        return {
            "id": f"cmpl-{leg.headers.get('x-request-id', 'none')}",
            "choices": [{"index": 0, "text": text, "finish_reason": "length"}],
            "usage": self._usage(leg),
        }

    async def stream(self, request: web.BaseRequest, leg: Leg, fault: Fault) -> web.StreamResponse:
        head = {"content-type": "text/event-stream", **self._ids(leg)}
        response = web.StreamResponse(headers=head)
        response.enable_chunked_encoding()
        await response.prepare(request)
        if fault.stage == "after_head":
            return _cut(request)
        beginning, events = _beginning(leg), self.events(leg)
        for event in beginning:
            await response.write(self._framed(event))
        if self.keep_alive:
            await response.write(self.keep_alive + self.line_end * 2)
        if fault.stage == "no_output":
            if leg.route == RESPONSES:  # vLLM 0.32 fails to encode its error here
                return _cut(request)
            error: dict[str, Any] = {"error": {"message": "Internal server error", "code": 500}}
            if leg.route == MESSAGES:
                error = {"type": "error", "error": {"type": "internal_error"}}
            await response.write(self._framed(json.dumps(error).encode()))
            events = []
        for number, event in enumerate(events):
            if fault.stage == "mid_stream" and number == 2:
                if fault.seen is not None:
                    await fault.seen.wait()
                return _cut(request)
            await response.write(self._framed(event))
        await response.write(self._framed(b"[DONE]"))
        await response.write_eof()
        return response

    def _framed(self, event: bytes) -> bytes:
        named = re.match(rb'\{"type": "([a-z_.]+)"', event)
        lines = [b"event: " + named[1]] if named else []
        return self.line_end.join([*lines, b"data: " + event, b"", b""])

    def events(self, leg: Leg) -> list[bytes]:
        if leg.route == "/generate":
            repeated = 1 if self.role == "prefill" else 2
            return [json.dumps(one).encode() for one in self._native(leg)] * repeated
        limit = self._limit(leg)
        if leg.route in (RESPONSES, MESSAGES):
            kind = "response.output_text.delta" if leg.route == RESPONSES else "content_block_delta"
            texts = map(self.text, range(limit))
            return [json.dumps({"type": kind, "delta": text}).encode() for text in texts]
        name = f"cmpl-{leg.headers.get('x-request-id', 'none')}"
        events: list[dict[str, Any]] = [
            {
                "id": name,
                "choices": [
                    {
                        "index": 0,
                        **(
                            {"delta": {"content": self.text(n)}}
                            if leg.route == CHAT
                            else {"text": self.text(n)}
                        ),
                        "finish_reason": "length" if n == limit - 1 else None,
                    }
                ],
            }
            for n in range(limit)
        ]
        if (leg.body.get("stream_options") or {}).get("include_usage"):
            events.append({"id": name, "choices": [], "usage": self._usage(leg)})
        return [json.dumps(event).encode() for event in events]


def says(engine: ScriptedEngine, *pieces: bytes) -> None:
    """The engine's next stream is these pieces, one after the other."""
    stream = engine.stream

    async def said(request: web.BaseRequest, leg: Leg, fault: Fault) -> web.StreamResponse:
        engine.stream = stream  # type: ignore[method-assign]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.05)  # so that the next one comes by itself
        await response.write_eof()
        return response

    engine.stream = said  # type: ignore[method-assign]


async def anything(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
    """Checks nothing, and hands nothing over."""
    return {}


def _beginning(leg: Leg) -> list[bytes]:
    """The events of a stream before its first output."""
    events: list[dict[str, Any]] = []
    if leg.route == CHAT:
        name = f"cmpl-{leg.headers.get('x-request-id', 'none')}"
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        events = [{"id": name, "choices": [choice]}]
    elif leg.route == RESPONSES:
        events = [{"type": "response.created"}, {"type": "response.in_progress"}]
    elif leg.route == MESSAGES:
        events = [{"type": "message_start", "message": {"role": "assistant", "content": []}}]
    return [json.dumps(event).encode() for event in events]


def _cut(request: web.BaseRequest) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def check(condition: bool, text: str) -> None:
    if not condition:
        raise Violation(text)


def one_token(leg: Leg) -> None:
    body = leg.body
    check(body["stream"] is False and "stream_options" not in body, "the prefill leg streams")
    if leg.route == RESPONSES:  # which has no `min_tokens`
        check(body["max_output_tokens"] == 1, "more than one token")
        check(body.get("store") is False, "the prefill leg's answer is stored")
        return
    if leg.route == TOKENS:
        body = body["sampling_params"]
    check(body["max_tokens"] == 1 and body["min_tokens"] == 1, "more than one token")
    check(body.get("max_completion_tokens", 1) == 1, "max_completion_tokens")


def plain_decode(engine: ScriptedEngine, leg: Leg) -> bool:
    """A decode leg without a handover."""
    return engine.role == "decode" and leg.params is None


async def nixl(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
    """NixlConnector: params are valid for one decode leg."""
    fleet = engine.fleet
    if plain_decode(engine, leg):
        return {}
    if engine.role == "prefill":
        one_token(leg)
        check(leg.params["do_remote_decode"] is True, "do_remote_decode")
        check(leg.params["do_remote_prefill"] is False, "do_remote_prefill")
        name = f"cmpl-{leg.headers['x-request-id']}-0-deadbeef"
        check(name not in fleet.offered, "the request id is not unique")
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": engine.engine_id,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "transfer_mode": "pull",
            "unknown": {"kept": [1.0, None]},
        }
        fleet.offered[name] = params
        return {"kv_transfer_params": params}
    name = leg.params["remote_request_id"]
    check(leg.params == fleet.offered.get(name), "params are not those of the prefill engine")
    fleet.once(name)
    return {}


async def push(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
    """NixlPushConnector: the legs are paired by their request id."""
    fleet = engine.fleet
    if plain_decode(engine, leg):
        return {}
    # vLLM's Responses API takes a request's id from its body.
    name = leg.body.get("request_id") if leg.route == RESPONSES else leg.headers["x-request-id"]
    check(name is not None, "the engine draws an id, by which nothing is paired")
    identity = {
        "remote_engine_id": engine.engine_id,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
    }
    if engine.role == "prefill":
        one_token(leg)
        check(leg.params["do_remote_decode"] is True, "do_remote_decode")
        fleet.once(f"P {name}")
        fleet.offered[engine.engine_id] = identity
        fleet.arrived(f"P {name}").set()
        answer = {
            **identity,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]],
            "remote_request_id": name,
            "transfer_mode": "push",
            # Of vLLM's scheduler, whatever the connector.
            "remote_prefill_cached_tokens": 0,
        }
        return {"kv_transfer_params": answer}
    params = dict(leg.params)
    check(params.pop("do_remote_prefill") is True, "do_remote_prefill")
    check(params.pop("do_remote_decode") is False, "do_remote_decode")
    check(params.pop("remote_request_id") == leg.headers["x-request-id"], "remote_request_id")
    check("remote_block_ids" not in params, "blocks")
    check(params == fleet.offered.get(params["remote_engine_id"]), "identity")
    fleet.once(f"D {name}")
    await fleet.meet(f"D {name}", f"P {name}")
    return {}


async def mooncake(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
    fleet = engine.fleet
    if plain_decode(engine, leg):
        return {}
    name = leg.params["transfer_id"]
    check(re.fullmatch(r"xfer-[0-9a-f-]{32,36}", name) is not None, "transfer_id")
    if engine.role == "prefill":
        one_token(leg)
        check(leg.params["do_remote_decode"] is True, "do_remote_decode")
        rank = leg.headers.get("x-data-parallel-rank", "0")
        fleet.offered[name] = engine.bootstrap_ids[rank]["engine_id"]
        fleet.once(f"P {name}")
        fleet.arrived(f"P {name}").set()
        return {}
    check(leg.params["do_remote_prefill"] is True, "do_remote_prefill")
    check("x-data-parallel-rank" not in leg.headers, "the prefill engine's rank")
    fleet.once(f"D {name}")
    await fleet.meet(f"D {name}", f"P {name}")
    check(leg.params["remote_engine_id"] == fleet.offered[name], "remote_engine_id")
    check(leg.params["remote_bootstrap_addr"].startswith("http://127.0.0.1:"), "bootstrap addr")
    return {}


_MORIIO = re.compile(
    r"___prefill_addr_host:127.0.0.1,handshake:6301,notify:61005"
    r"___decode_addr_host:127.0.0.1,handshake:6301,notify:61005_([0-9a-f]{32})"
)


async def moriio_read(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
    fleet = engine.fleet
    if plain_decode(engine, leg):
        return {}
    found = _MORIIO.fullmatch(leg.headers["x-request-id"])
    check(found is not None, f"request id {leg.headers['x-request-id']}")
    assert found is not None
    name = leg.params["transfer_id"]
    check(name == f"tx-{found[1]}", "transfer_id")
    if engine.role == "prefill":
        one_token(leg)
        check(leg.params["do_remote_decode"] is True, "do_remote_decode")
        fleet.offered[name] = ("p-engine", [4, 5])
        return {"kv_transfer_params": {"remote_engine_id": "p-engine", "remote_block_ids": [4, 5]}}
    fleet.once(name)
    given = (leg.params["remote_engine_id"], leg.params["remote_block_ids"])
    check(given == fleet.offered.get(name), "the prefill engine's answer")
    check(leg.params["do_remote_prefill"] is True, "do_remote_prefill")
    return {}


async def moriio_write(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
    fleet = engine.fleet
    if plain_decode(engine, leg):
        return {}
    check(_MORIIO.fullmatch(leg.headers["x-request-id"]) is not None, "request id")
    name = leg.params["transfer_id"]
    fleet.once(f"{engine.role} {name}")
    await fleet.meet(
        f"{engine.role} {name}", f"{'decode' if engine.role == 'prefill' else 'prefill'} {name}"
    )
    return {}


async def sglang(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
    """A live room has one prefill and one decode leg with equal bodies; neither can end alone."""
    fleet = engine.fleet
    rooms = leg.body.get("bootstrap_room")
    check(rooms is not None, "no room: this engine has no prefill of its own")
    each = rooms if isinstance(rooms, list) else [rooms]
    hosts, ports = leg.body["bootstrap_host"], leg.body["bootstrap_port"]
    if isinstance(rooms, list):
        check(hosts == ["127.0.0.1"] * len(each), "hosts")
        check(ports == [8998] * len(each), "ports")
        prompts = leg.body.get("prompt") or leg.body.get("text")
        expected = leg.body.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1)
        check(len(each) == expected, "one room per sequence")
    else:
        check((hosts, ports) == ("127.0.0.1", 8998), "host and port")
    other = "decode" if engine.role == "prefill" else "prefill"
    for room in each:
        check(isinstance(room, int) and 0 <= room < 1 << 63, "room")
        fleet.once(f"{engine.role} {room}")
    fleet.offered[f"{engine.role} {each[0]}"] = leg.raw
    await fleet.meet(f"{engine.role} {each[0]}", f"{other} {each[0]}")
    check(fleet.offered[f"{other} {each[0]}"] == leg.raw, "the bodies differ")
    return {}


#: A UUID, with or without its dashes.
_NEURON_ID = r"cmpl-[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}"


async def neuron_static(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
    """Both legs have the same id."""
    name = leg.headers.get("x-request-id", "")
    check(re.fullmatch(_NEURON_ID, name) is not None, f"request id {name!r}")
    return await _neuron(engine, leg, name)


async def neuron_dynamic(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
    """Each leg's id ends with the address of the other one's engine."""
    given = leg.headers.get("x-request-id", "")
    found = re.fullmatch(f"({_NEURON_ID})_(.+)", given)
    check(found is not None, f"request id {given!r}")
    assert found is not None
    name, peer = found[1], found[2]
    fleet, other = engine.fleet, _other(engine)
    known = {each.address for each in fleet.engines if each.role == other}
    check(peer in known, f"there is no {other} engine at {peer}")
    fleet.offered[f"{engine.role} addresses {name}"] = (engine.address, peer)
    answer = await _neuron(engine, leg, name)
    theirs = fleet.offered[f"{other} addresses {name}"]
    check(theirs == (peer, engine.address), "each engine gets the other one's address")
    return answer


async def _neuron(engine: ScriptedEngine, leg: Leg, name: str) -> dict[str, Any]:
    """Both legs at once: neither engine can answer without the other one. The decode engine
    generates what the prefill engine has read, so the bodies differ in their limits alone."""
    fleet, other, body = engine.fleet, _other(engine), leg.body
    check(leg.route in (COMPLETIONS, CHAT), "the route has no handover")
    check("kv_transfer_params" not in body, "kv_transfer_params")
    check("stream_options" not in body or body.get("stream") is True, "stream_options")
    if engine.role == "prefill":
        check(body.get("max_tokens") == 1, "max_tokens")
        check(body.get("max_completion_tokens", 1) == 1, "max_completion_tokens")
        # vLLM refuses more than `max_tokens`.
        check((body.get("min_tokens") or 0) <= 1, "min_tokens")
    fleet.once(f"{engine.role} {name}")
    limits = ("max_tokens", "max_completion_tokens", "min_tokens")
    rest = {key: value for key, value in body.items() if key not in limits}
    fleet.offered[f"{engine.role} {name}"] = (leg.route, rest)
    try:
        await fleet.meet(f"{engine.role} {name}", f"{other} {name}")
    except TimeoutError:
        raise Violation(f"the {other} leg has not come") from None
    check(fleet.offered[f"{other} {name}"] == (leg.route, rest), "the legs differ")
    return {}


def _other(engine: ScriptedEngine) -> str:
    return "decode" if engine.role == "prefill" else "prefill"


async def kvt_batch(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
    check(engine.role == "decode", "a prefill engine is asked by the decode engine alone")
    if leg.params is not None:
        check(set(leg.params) == {"remote_host", "remote_port"}, "params")
        check(leg.params["remote_port"] > 20_000, "the port of KVT")
    return {}


async def kvt_staged(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
    fleet = engine.fleet
    if plain_decode(engine, leg):
        return {}
    name = leg.headers["x-request-id"]
    if engine.role == "prefill":
        one_token(leg)
        check(leg.params == {"do_remote_decode": True}, "params")
        fleet.offered[name] = engine.kvt_port
        return {}
    check(leg.params["remote_port"] == fleet.offered.get(name), "the prefill engine's port")
    check(leg.params["do_remote_prefill"] is True, "do_remote_prefill")
    fleet.once(name)
    return {}


HANDOVERS: dict[str, Handover] = {
    "nixl": nixl,
    "nixl-push": push,
    "mooncake": mooncake,
    "llumnix-mooncake": nixl,
    "moriio-read": moriio_read,
    "moriio-write": moriio_write,
    "sglang": sglang,
    "neuron-static": neuron_static,
    "neuron-dynamic": neuron_dynamic,
    "kvt-batch": kvt_batch,
    "kvt-staged": kvt_staged,
}
