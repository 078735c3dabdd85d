"""The tokens of prompts: a Forwarder has no tokenizer, so it asks an engine (`POST /tokenize`)."""

import asyncio
import logging
from collections import Counter, OrderedDict
from typing import Any

import msgspec
from multidict import CIMultiDict
from xxhash import xxh3_128_digest

from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.client import Incoming
from dynamo_lite.forward.engines import KnownEngine, KnownEngines
from dynamo_lite.forward.failures import LegFailed
from dynamo_lite.forward.known_blocks import KnownBlocks, PromptTokens
from dynamo_lite.forward.protocols.base import CHAT, COMPLETIONS, TOKENS, Body
from dynamo_lite.forward.protocols.one_token import plain
from dynamo_lite.forward.upstream import Upstream

logger = logging.getLogger(__name__)

#: A prompt of fewer bytes fills no block worth looking for.
_MIN_BYTES = 256
#: Prompts and tokens that are remembered.
_MAX_PROMPTS = 512
_MAX_TOKENS = 4 << 20
#: How long a request waits for its tokens.
TIMEOUT_S = 0.5
#: After an engine did not answer, no engine is asked for this long.
_PAUSE_S = 5.0
#: Fields on which a chat's tokens depend.
_CHAT_FIELDS = (
    *("model", "messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "chat_template", "chat_template_kwargs"),
)
_COMPLETION_FIELDS = ("model", "prompt", "add_special_tokens")
#: Fields of requests whose KV depends on more than tokens.
_MEDIA = (b'"image_url"', b'"video_url"', b'"audio_url"', b'"input_audio"', b'"image_embeds"')


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class Tokenizer:
    """results: counts prompts by result."""

    def __init__(self, upstream: Upstream, engines: KnownEngines, known: KnownBlocks):
        self.results: Counter[str] = Counter()
        self._upstream, self._engines, self._known = upstream, engines, known
        self._remembered: OrderedDict[bytes, PromptTokens] = OrderedDict()
        self._remembered_tokens = 0
        self._asks_again_at = 0.0

    async def tokens(self, incoming: Incoming, request: ClientRequest) -> PromptTokens | None:
        """None if the tokens are not needed, or not known in time."""
        if not self._known.following or len(request.prompt) < _MIN_BYTES:
            return None
        asked = _question(request)
        if asked is None:
            self.results["unsuited"] += 1
            return None
        salt = plain(request.body.get("cache_salt"))
        salt = salt if isinstance(salt, str) else None
        if isinstance(asked, list):
            self.results["given"] += 1
            return _made(asked, salt)
        body = msgspec.json.encode(asked)
        key = xxh3_128_digest(body + (salt or "").encode())
        found = self._remembered.get(key)
        if found is not None:
            self._remembered.move_to_end(key)
            self.results["remembered"] += 1
            return found
        ids = await self._ask(incoming, body)
        found = None if ids is None else _made(ids, salt)
        self.results["failed" if found is None else "asked"] += 1
        if found is not None:
            self._remember(key, found)
        return found

    def _remember(self, key: bytes, tokens: PromptTokens) -> None:
        self._forget(key)
        self._remembered[key] = tokens
        self._remembered_tokens += len(tokens)
        while len(self._remembered) > _MAX_PROMPTS or self._remembered_tokens > _MAX_TOKENS:
            self._forget(next(iter(self._remembered)))

    def _forget(self, key: bytes) -> None:
        if (old := self._remembered.pop(key, None)) is not None:
            self._remembered_tokens -= len(old)

    async def _ask(self, incoming: Incoming, body: bytes) -> list[int] | None:
        now = asyncio.get_running_loop().time
        able = [e for e in self._engines.all if e.usable and e.decodes]
        if not able or now() < self._asks_again_at:
            return None
        engine = min(able, key=lambda e: e.requests)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._ask_one(engine, incoming, body)
        except (TimeoutError, LegFailed) as exc:
            self._asks_again_at = now() + _PAUSE_S
            logger.warning("engine %s has not tokenized a prompt: %s", engine.name, exc or "late")
            return None

    async def _ask_one(
        self, engine: KnownEngine, incoming: Incoming, body: bytes
    ) -> list[int] | None:
        """Returns None if the engine refuses the prompt. Raises LegFailed."""
        own = CIMultiDict({"content-type": "application/json"})
        if (key := incoming.headers.get("authorization")) is not None:
            own["authorization"] = key
        url = f"{engine.base}/tokenize"
        response = await self._upstream.open(engine, "check", "POST", url, own, body)
        try:
            data = await response.read()
        finally:
            response.close()
        if 400 <= response.status < 500 and response.status != 404:
            return None
        try:
            return msgspec.json.decode(data, type=_Tokenized).tokens
        except msgspec.DecodeError as exc:
            text = f"/tokenize answered {response.status}"
            raise LegFailed(engine, "check", "broken", text) from exc


def _made(ids: list[int], salt: str | None) -> PromptTokens | None:
    try:
        return PromptTokens(ids, salt)
    except (OverflowError, TypeError):
        return None


def _question(request: ClientRequest) -> list[int] | Body | None:
    """The tokens, or the request for `/tokenize`; None if the prompt cannot be tokenized."""
    body = request.body
    if request.route == CHAT:
        if any(medium in request.prompt for medium in _MEDIA):
            return None
        return {key: body[key] for key in _CHAT_FIELDS if key in body}
    if request.route == TOKENS:
        return _ids(plain(body.get("token_ids")))
    if request.route != COMPLETIONS:
        return None
    prompt = plain(body.get("prompt"))
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        given = {key: body[key] for key in _COMPLETION_FIELDS if key in body}
        return {**given, "prompt": prompt}
    return _ids(prompt)


def _ids(value: Any) -> list[int] | None:
    if isinstance(value, list) and all(isinstance(one, int) for one in value):
        return value
    return None
