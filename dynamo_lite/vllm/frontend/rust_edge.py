"""vLLM's Rust frontend as the HTTP edge, over the failover client.

Its process parses HTTP, renders templates, tokenises and detokenises. It gets the bound
socket of the Frontend, and this process as its engine.
"""

import asyncio
import math
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm.envs as envs
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreReadyResponse

from dynamo_lite.runtime.tasks import running
from dynamo_lite.vllm import compat
from dynamo_lite.vllm.frontend.grammar_check import GrammarCheck
from dynamo_lite.vllm.frontend.intake import OpenIntake
from dynamo_lite.vllm.frontend.openai_app import frontend_config, parse_args
from dynamo_lite.vllm.frontend.rust_core import RustCore
from dynamo_lite.vllm.frontend.rust_process import RustProcess
from dynamo_lite.vllm.frontend.rust_sockets import RustSockets
from dynamo_lite.vllm.migratable import is_causal

_BACKLOG = 2048
#: Timeout of the Rust frontend's wait for its engine, which is this process.
_CONNECT_S = 60


@dataclass(frozen=True)
class RustEdge:
    """The running Rust frontend."""

    process: RustProcess
    #: The task that passes the Rust frontend's requests to the core.
    requests: "asyncio.Task[None]"
    core: RustCore
    #: The first name under which the model is served.
    served_model: str
    #: With API keys there is no Rust edge.
    api_key: str | None = None

    @property
    def trouble(self) -> str:
        """Why no request can be answered any more; empty if nothing is wrong."""
        if self.process.ended:
            return "the process of vLLM's Rust frontend has ended; see the log"
        if self.requests.done():
            return "the task that takes requests of vLLM's Rust frontend has ended; see the log"
        return ""

    @property
    def unhealthy(self) -> str:
        """Why the Rust frontend's process does not serve requests now. It may recover, or is
        replaced soon."""
        return self.process.unhealthy

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return self.core.in_flight


@asynccontextmanager
async def open_rust_edge(
    flags: Sequence[str],
    binary: Path,
    sock: socket.socket,
    url: str,
    open_intake: OpenIntake,
    *,
    timeout_s: float,
    grace_s: float,
) -> AsyncIterator[RustEdge]:
    """Serves HTTP while the context is open. Raises ConfigError or StartupError.

    flags: of `vllm serve`. sock: bound; url: where it is. open_intake: called once. timeout_s:
    see `RustCore`. grace_s: longest drain.
    """
    args = parse_args(flags)
    # In a thread: a model from the hub may have to be downloaded first.
    config = await asyncio.to_thread(frontend_config, args)
    with RustSockets() as sockets, GrammarCheck(config) as grammars:
        sock.listen(_BACKLOG)
        process = RustProcess(
            binary,
            http=sock,
            inputs=sockets.inputs,
            outputs=sockets.outputs,
            arguments=rust_arguments(args, config, grace_s),
        )
        # The callbacks are of requests that the core has submitted.
        intake = await open_intake(
            lambda deltas: core.on_deltas(deltas),
            lambda request_id, error: core.on_ended(request_id, error),
        )
        core = RustCore(
            intake,
            sockets.send,
            grammars.check,
            causal=is_causal(config.model_config),
            timeout_s=timeout_s,
        )
        taking = running(sockets.run(core.take), name="requests of vllm-rs")
        async with core, process, taking as requests:
            await sockets.connect(as_engine(config))
            await process.wait_ready(url)
            served_model = (args.served_model_name or [args.model])[0]
            yield RustEdge(process, requests, core, served_model)


def rust_arguments(args: Namespace, config: VllmConfig, grace_s: float) -> dict[str, Any]:
    """The arguments in the form in which vLLM passes them to its Rust frontend."""
    return {
        **compat.jsonify_non_default_args(args),
        "model_tag": args.model,
        "max_model_len": config.model_config.max_model_len,
        "engine_ready_timeout_secs": _CONNECT_S,
        "http_timeout_keep_alive": envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        "shutdown_timeout": math.ceil(grace_s),
    }


def as_engine(config: VllmConfig) -> EngineCoreReadyResponse:
    """The description that an engine sends of itself. This process has no blocks: the Rust
    frontend shows these numbers, and uses only the model's length."""
    model, scheduler = config.model_config, config.scheduler_config
    return EngineCoreReadyResponse(
        max_model_len=model.max_model_len,
        num_gpu_blocks=0,
        block_size=0,
        dp_stats_address=None,
        dtype=str(model.dtype).removeprefix("torch."),
        vllm_version=vllm_version,
        world_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=0,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        instance_id="dynamo-lite",
        supports_lora=False,
        max_loras=0,
    )
