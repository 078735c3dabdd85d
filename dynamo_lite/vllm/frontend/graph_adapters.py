"""LoRA adapters that clients load and unload, for all Frontends of a graph.

The routes are vLLM's: /v1/load_lora_adapter and /v1/unload_lora_adapter. An adapter has a record in
the store without a lease, and each Frontend enters the recorded ones into its list of models. One
whose name the configuration gives to another adapter is not served.
"""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from vllm import SamplingParams
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import ConfigError, DynamoLiteError, ProtocolError
from dynamo_lite.protocol.generate import Adapter
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.store import Store, WatchEvent, changes, following
from dynamo_lite.vllm.frontend.refusal import http_error

logger = logging.getLogger(__name__)

#: PEFT's configuration of an adapter.
CONFIG = "adapter_config.json"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass(frozen=True)
class AdapterStore:
    """Where the adapters of a graph are recorded.

    folder: clients may load adapters below it.
    """

    store: Store
    namespace: str
    folder: str
    on_drop: OnDrop

    def __post_init__(self) -> None:
        if not Path(self.folder).is_absolute():
            raise ConfigError([f"Frontend.adapter-folder: {self.folder} is no absolute path"])


class GraphAdapters:
    """models: the Frontend's list of models. client: sends requests to the workers."""

    def __init__(self, records: AdapterStore, models: OpenAIServingModels, client: EngineClient):
        self._store, self._folder = records.store, records.folder
        self._namespace, self._on_drop = records.namespace, records.on_drop
        self._models, self._client = models, client
        #: Those that this Frontend has entered for a record, by key.
        self._entered: dict[str, Adapter] = {}
        #: Held while the list of models is changed.
        self._changing = asyncio.Lock()

    def following(self) -> AbstractAsyncContextManager[None]:
        """Entering waits for the recorded adapters. Raises StoreUnavailable."""
        return following(self._store, names.adapters_prefix(self._namespace), self._take)

    async def load(self, request: LoadLoRAAdapterRequest) -> ErrorResponse | str:
        """Answers when one worker has loaded the adapter.

        Raises VLLMError when the path is not allowed, no worker can load it, or the store is away.
        """
        adapter = await self._asked(request)
        if adapter.name in self._models.lora_requests or self._models.is_base_model(adapter.name):
            return await self._models.load_lora_adapter(request)  # its error
        await self._try(adapter)
        key, value = names.adapter_key(self._namespace, adapter.name), encode_json(adapter)
        try:
            created = await self._store.create(key, value)
        except DynamoLiteError as exc:
            raise http_error(exc) from exc
        if not created:
            raise VLLMValidationError(f"a LoRA adapter {adapter.name!r} has already been loaded")
        await self._reread(key)
        return f"Success: LoRA adapter '{adapter.name}' added successfully."

    async def unload(self, request: UnloadLoRAAdapterRequest) -> str:
        """Raises VLLMError for an adapter that no client has loaded, or when the store is away."""
        name = request.lora_name
        key = names.adapter_key(self._namespace, name)
        try:
            there = await self._store.delete(key)
        except DynamoLiteError as exc:
            raise http_error(exc) from exc
        if not there and key not in self._entered:
            raise VLLMValidationError(f"no client has loaded a LoRA adapter {name!r}")
        await self._reread(key)
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _asked(self, request: LoadLoRAAdapterRequest) -> Adapter:
        """Raises VLLMValidationError."""
        if request.load_inplace or request.is_3d_lora_weight:
            raise VLLMValidationError(
                "load_inplace and is_3d_lora_weight are not served here: load changed files from"
                " another path"
            )
        if why := await asyncio.to_thread(self._unusable, request.lora_path):
            text = f"lora_path {request.lora_path!r}: {why}"
            raise VLLMValidationError(text, parameter="lora_path")
        try:
            return msgspec.convert(
                {"name": request.lora_name, "path": request.lora_path}, type=Adapter
            )
        except msgspec.ValidationError as exc:
            raise VLLMValidationError(str(exc)) from exc

    def _unusable(self, text: str) -> str:
        """Why clients may not load what is at this path; "" if they may."""
        folder, path = Path(self._folder).resolve(), Path(text)
        outside = f"it is not below {self._folder} (Frontend.adapter-folder)"
        if not path.is_absolute() or ".." in path.parts:
            return outside
        try:
            if folder not in path.resolve().parents:
                return outside
            # Where the folder is not on this host, the worker finds out.
            if folder.is_dir() and not (path / CONFIG).is_file():
                return f"it has no file {CONFIG}"
        except (OSError, RuntimeError, ValueError) as exc:
            return str(exc)
        return ""

    async def _try(self, adapter: Adapter) -> None:
        """Has a worker load the adapter. Raises VLLMError."""
        lora = LoRARequest(adapter.name, 1, adapter.path)
        prompt = TokensPrompt(prompt_token_ids=[0])
        params, request_id = SamplingParams(max_tokens=1), f"adapter-{uuid4().hex}"
        async for _ in self._client.generate(prompt, params, request_id, lora_request=lora):
            pass

    async def _take(self, event: WatchEvent) -> None:
        async with self._changing:
            for key, value in changes(event, self._entered).items():
                await self._apply(key, value)

    async def _reread(self, key: str) -> None:
        """Brings the list of models up to a record, which another Frontend may have changed since.
        Raises VLLMError when the store is away: the list follows when it is back."""
        async with self._changing:
            try:
                value = await self._store.get(key)
            except DynamoLiteError as exc:
                raise http_error(exc) from exc
            await self._apply(key, value)

    async def _apply(self, key: str, value: bytes | None) -> None:
        """value: the record; None: it is gone."""
        if value is None:
            return await self._leave(key)
        try:
            adapter = decode_json(value, Adapter)
            if key != names.adapter_key(self._namespace, adapter.name):
                raise ProtocolError("its key does not match its content")
        except ProtocolError as exc:
            logger.warning("skipped the malformed record at %s: %s", key, exc)
            self._on_drop("record")
            return
        if self._entered.get(key) == adapter:
            return
        await self._leave(key)
        why = await asyncio.to_thread(self._unusable, adapter.path)
        if not why:
            asked = LoadLoRAAdapterRequest(lora_name=adapter.name, lora_path=adapter.path)
            answer = await self._models.load_lora_adapter(asked)
            why = answer.error.message if isinstance(answer, ErrorResponse) else ""
        if why:
            logger.warning("LoRA adapter of %s is not served: %s", key, why)
        else:
            self._entered[key] = adapter

    async def _leave(self, key: str) -> None:
        """Takes the adapter of a record from the list of models, if it was entered there."""
        if (entered := self._entered.pop(key, None)) is not None:
            left = UnloadLoRAAdapterRequest(lora_name=entered.name)
            await self._models.unload_lora_adapter(left)


def add_routes(app: FastAPI, adapters: GraphAdapters) -> None:
    router = APIRouter()

    @router.post(LOAD)
    async def load(request: LoadLoRAAdapterRequest) -> Response:
        answer = await adapters.load(request)
        if isinstance(answer, ErrorResponse):
            return JSONResponse(answer.model_dump(), status_code=answer.error.code)
        return PlainTextResponse(answer)

    @router.post(UNLOAD)
    async def unload(request: UnloadLoRAAdapterRequest) -> Response:
        return PlainTextResponse(await adapters.unload(request))

    app.include_router(router)
