"""vLLM's OpenAI app alone: its front half over an engine core that answers at once.

    python -m benchmarks.plain_app STEP_S VLLM_FLAGS...

The yardstick of `runtime.py`: the same routes, templates, output processing and
HTTP server as in the Frontend, and no transport at all. Prints `ready PID URL`.
"""

import asyncio
import logging
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats

from benchmarks.null_worker import TOKEN_ID
from dynamo_lite.runtime.listening import bind
from dynamo_lite.serve.services.frontend.http import HttpServer, url_of
from dynamo_lite.vllm.frontend.openai_app import frontend_config, parse_args
from dynamo_lite.vllm.frontend.remote_client import RemoteEngineClient


class NullCore(EngineCoreClient):
    """Every step gives each running request one token, `step_s` after the last step."""

    def __init__(self, step_s: float):
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self._step_s = step_s
        self._left: dict[str, int] = {}
        self._fresh: dict[str, PrefillStats] = {}
        self._wake = asyncio.Event()

    def check_admission(self, n: int) -> None:
        """Takes every request."""

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        assert request.sampling_params is not None
        stats = PrefillStats()
        stats.set(len(request.prompt_token_ids or ()), 0, 0)
        self._left[request.request_id] = request.sampling_params.max_tokens or 1
        self._fresh[request.request_id] = stats
        self._wake.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    async def get_output_async(self) -> EngineCoreOutputs:
        await asyncio.sleep(self._step_s)
        while not self._left:
            self._wake.clear()
            await self._wake.wait()
        fresh, self._fresh = self._fresh, {}
        outputs = [
            EngineCoreOutput(
                request_id=request_id,
                new_token_ids=[TOKEN_ID],
                finish_reason=FinishReason.LENGTH if left == 1 else None,
                prefill_stats=fresh.get(request_id),
            )
            for request_id, left in self._left.items()
        ]
        self._left = {i: left - 1 for i, left in self._left.items() if left > 1}
        return EngineCoreOutputs(outputs=outputs)

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing runs outside this process."""


async def main(step_s: float, flags: list[str]) -> None:
    args = parse_args(flags)
    core: Any = NullCore(step_s)
    client = RemoteEngineClient(
        frontend_config(args),
        core,
        log_stats=not args.disable_log_stats,
        log_requests=args.enable_log_requests,
    )
    client.start()
    app = build_app(args, ("generate",), client.model_config)
    await init_app_state(client, app.state, args, ("generate",))
    sock = bind("127.0.0.1", 0)
    server = HttpServer(app, sock)
    app.state.server = server
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(f"ready {os.getpid()} {url_of(sock)}", flush=True)
    await stop.wait()
    await server.stop(0.0)
    await client.close()


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    uvloop.run(main(float(sys.argv[1]), sys.argv[2:]))
