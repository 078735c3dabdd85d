"""vLLM's OpenAI HTTP app without an engine in its process.

Turns vLLM's command-line flags into a configuration that needs no device and no KV cache,
and assembles vLLM's FastAPI app over a remote engine core. Routes, request validation,
templates, tools and error bodies are vLLM's.
"""

import asyncio
import logging
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import NoReturn

import vllm.envs as envs
from fastapi import FastAPI
from starlette.datastructures import Headers, State
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.config import LoRAConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.exceptions import GracefulHTTPError, VLLMError
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.vllm import compat
from dynamo_lite.vllm.frontend.bodies import Bodies, BodyLimits, body_limit
from dynamo_lite.vllm.frontend.edge import Edge
from dynamo_lite.vllm.frontend.fail_fast import fail_fast_routes, limit_batches
from dynamo_lite.vllm.frontend.graph_adapters import (
    LOAD,
    UNLOAD,
    AdapterStore,
    GraphAdapters,
    add_routes,
)
from dynamo_lite.vllm.frontend.intake import OpenIntake
from dynamo_lite.vllm.frontend.refusal import CLOSE, refuse
from dynamo_lite.vllm.frontend.remote_client import RemoteEngineClient
from dynamo_lite.vllm.frontend.remote_core import Deliveries, RemoteCore, SequenceEnd
from dynamo_lite.vllm.http_options import HttpOptions, http_options
from dynamo_lite.vllm.inputs import takes_media
from dynamo_lite.vllm.migratable import is_causal

logger = logging.getLogger(__name__)


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"vLLM's arguments: {message}"])


@dataclass(frozen=True)
class OpenAiApp:
    """The ASGI app and what its server needs."""

    asgi: ASGIApp
    #: The state of vLLM's app; the server sets `server` on it.
    state: State
    client: RemoteEngineClient
    #: The first name under which the model is served.
    served_model: str
    #: A key that the app accepts; None if it requires none.
    api_key: str | None
    #: Options of the HTTP server.
    http: HttpOptions

    @property
    def trouble(self) -> str:
        """Why no request can be answered any more; empty if nothing is wrong."""
        if self.client.errored:
            return "the task that delivers tokens to requests has ended; see the log"
        return ""

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return self.client.get_num_unfinished_requests()


def parse_args(flags: Sequence[str]) -> Namespace:
    """The flags of `vllm serve`. Raises ConfigError for wrong ones."""
    args = compat.make_arg_parser(_Parser(prog="vllm serve")).parse_args(list(flags))
    assert args is not None  # typed as optional by vLLM
    if args.model_tag is not None:
        args.model = args.model_tag
    args.enable_lora = args.enable_lora or bool(args.lora_modules)
    try:
        for plugin, load in (
            (args.tool_parser_plugin, ToolParserManager.import_tool_parser),
            (args.reasoning_parser_plugin, ReasoningParserManager.import_reasoning_parser),
        ):
            if plugin:
                load(plugin)
        compat.validate_parsed_serve_args(args)
        validate_api_server_args(args)
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError([f"vLLM's arguments: {exc}"]) from exc
    return args


def frontend_config(args: Namespace) -> VllmConfig:
    """The configuration of vLLM's front half, without device and KV cache.

    Raises StartupError when the model cannot be read.
    """
    engine_args = AsyncEngineArgs.from_cli_args(args)
    # There is no KV cache here; this stops the CPU platform from sizing one.
    envs.VLLM_CPU_KVCACHE_SPACE = 0
    try:
        model_config = engine_args.create_model_config()
        # Only workers run quantised kernels; the checks for these need a device.
        model_config.quantization = None
        outputs = compat.structured_outputs(engine_args)
        # An engine compiles all grammars with the backend of its first one: if each chose its own,
        # an answer would depend on what a worker was asked before.
        if outputs.backend == "auto":
            outputs.backend = "xgrammar"
        engine_args._set_default_reasoning_config_args()
        config = VllmConfig(
            model_config=model_config,
            # Allows requests with adapters; what else it says is read by workers only.
            lora_config=LoRAConfig() if args.enable_lora else None,
            structured_outputs_config=outputs,
            reasoning_config=engine_args.reasoning_config,
            observability_config=engine_args.create_observability_config(),
            logging_config=engine_args.create_logging_config(),
        )
    except (OSError, ValueError, VLLMError) as exc:
        raise StartupError(f"model {args.model!r}: {exc}") from exc
    # vLLM's way for several API servers: what was sent before is sent again, because another worker
    # may get it.
    config.parallel_config._api_process_count = 2
    # Otherwise vLLM may number images, in each Frontend from 1: workers would take one for another.
    config.cache_config.enable_prefix_caching = True
    scheduler = config.scheduler_config
    scheduler.stream_interval = engine_args.stream_interval
    scheduler.max_num_queued_reqs = engine_args.max_num_queued_reqs
    scheduler.max_num_queued_tokens = engine_args.max_num_queued_tokens
    return config


#: SageMaker's route validates by itself, and collects all errors of a body. The others know nothing
#: of other Frontends, and take any path.
_NOT_SERVED = frozenset({"/invocations", LOAD, UNLOAD, "/adapters", "/adapters/{adapter_name}"})


def drop_routes(app: FastAPI) -> None:
    routes = app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", None) not in _NOT_SERVED]


@asynccontextmanager
async def open_app(
    flags: Sequence[str],
    open_intake: OpenIntake,
    *,
    default_timeout_s: float = 600.0,
    max_timeout_s: float = 3600.0,
    max_body_bytes: int | None = None,
    adapters: AdapterStore | None = None,
) -> AsyncIterator[OpenAiApp]:
    """Runs the app while the context is open. Raises ConfigError or StartupError.

    open_intake: called once.
    default_timeout_s, max_timeout_s: for each request, see `Edge`.
    max_body_bytes: largest body of a request; None for the result of `body_limit`.
    adapters: where those are recorded that clients load; None: they may load none.
    """
    args = parse_args(flags)
    args.enable_lora = args.enable_lora or adapters is not None
    http = http_options(args, envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE)
    # In a thread: a model from the hub may have to be downloaded first.
    config = await asyncio.to_thread(frontend_config, args)
    deliveries = Deliveries()
    intake = await open_intake(
        deliveries.put_nowait,
        lambda request_id, error: deliveries.put_nowait(SequenceEnd(request_id, error)),
    )
    core = RemoteCore(intake, deliveries, causal=is_causal(config.model_config))
    stats, requests = not args.disable_log_stats, args.enable_log_requests
    client = await asyncio.to_thread(
        RemoteEngineClient, config, core, log_stats=stats, log_requests=requests
    )
    client.start()
    stack = AsyncExitStack()
    stack.push_async_callback(client.close)
    async with stack:
        tasks = await client.get_supported_tasks()
        app = build_app(args, tasks, client.model_config)
        drop_routes(app)
        await init_app_state(client, app.state, args, tasks)
        if adapters is not None:
            models = GraphAdapters(adapters, app.state.openai_serving_models, client)
            await stack.enter_async_context(models.following())
            add_routes(app, models)
        fail_fast_routes(app)
        limit_batches(app.state)
        keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        if max_body_bytes is None:
            model = client.model_config
            max_body_bytes = body_limit(model.max_model_len, media=takes_media(model))
        held_bytes = max(BodyLimits().held_bytes, max_body_bytes)
        # Wrapped, not added as middleware: vLLM has already built its middleware stack.
        asgi: ASGIApp = Bodies(app, BodyLimits(max_bytes=max_body_bytes, held_bytes=held_bytes))
        if keys:  # checked first: without one no body is received
            asgi = KeyGuard(asgi, keys, args.root_path or "")
        yield OpenAiApp(
            asgi=Edge(asgi, default_timeout_s=default_timeout_s, max_timeout_s=max_timeout_s),
            state=app.state,
            client=client,
            served_model=(args.served_model_name or [args.model])[0],
            api_key=keys[0] if keys else None,
            http=http,
        )


#: Paths without a key: health and metrics of the server.
OPEN_PATHS = frozenset({"/health", "/ping", "/live", "/ready", "/metrics", "/version"})


class KeyGuard(AuthenticationMiddleware):
    """Every route but `OPEN_PATHS` requires a key.

    vLLM's own middleware only protects a few prefixes, and its app has other routes that take
    prompts (`/tokenize`). Here the open routes are listed, so routes that a new version adds are
    protected. root_path: that of the app.
    """

    def __init__(self, app: ASGIApp, keys: list[str], root_path: str = ""):
        super().__init__(app, keys)
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._open(scope):
            return await self.app(scope, receive, send)
        if self.verify_token(Headers(scope=scope)):
            return await self.app(scope, receive, send)
        text = "This server asks for an API key: send `Authorization: Bearer KEY`"
        error = GracefulHTTPError(text, HTTPStatus.UNAUTHORIZED)
        # The body is not read.
        await refuse(send, error, [(b"www-authenticate", b"Bearer"), CLOSE])

    def _open(self, scope: Scope) -> bool:
        method = scope.get("method")
        if method == "OPTIONS":
            return True
        path: str = scope["path"]
        return method in ("GET", "HEAD") and (
            path in OPEN_PATHS or path.removeprefix(self._root_path) in OPEN_PATHS
        )
