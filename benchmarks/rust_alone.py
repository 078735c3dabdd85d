"""vLLM's Rust frontend alone: over an engine in a process of its own that answers at once.

    python -m benchmarks.rust_alone BINARY STEP_S VLLM_FLAGS...

The yardstick of `edge.py`: no dispatcher, no NATS, no worker. Prints `ready PID URL`; the
process with this id is the Rust frontend.
"""

import asyncio
import signal
import sys
import time
from pathlib import Path

import msgspec
import uvloop
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.serial_utils import MsgpackDecoder

from benchmarks.null_worker import TOKEN_ID
from dynamo_lite.runtime.listening import bind
from dynamo_lite.serve.services.frontend.http import url_of
from dynamo_lite.vllm.frontend.openai_app import frontend_config, parse_args
from dynamo_lite.vllm.frontend.rust_edge import as_engine, rust_arguments
from dynamo_lite.vllm.frontend.rust_process import RustProcess
from dynamo_lite.vllm.frontend.rust_sockets import RustSockets


class NullEngine:
    """Every step gives each running request one token, `step_s` after the last step."""

    def __init__(self, sockets: RustSockets, step_s: float):
        self._sockets, self._step_s = sockets, step_s
        self._left: dict[str, int] = {}
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._wake = asyncio.Event()

    def take(self, frames: list[bytes]) -> None:
        if frames[0] == EngineCoreRequestType.ADD.value:
            request = self._decoder.decode(frames[1:])
            assert request.sampling_params is not None
            self._left[request.request_id] = request.sampling_params.max_tokens or 1
            self._wake.set()

    async def run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        while True:
            await asyncio.sleep(self._step_s)
            while not self._left:
                self._wake.clear()
                await self._wake.wait()
            outputs = [
                EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=[TOKEN_ID],
                    finish_reason=FinishReason.LENGTH if left == 1 else None,
                )
                for request_id, left in self._left.items()
            ]
            self._left = {i: left - 1 for i, left in self._left.items() if left > 1}
            step = EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())
            self._sockets.send([encode(step)])


async def main(binary: Path, step_s: float, flags: list[str]) -> None:
    args = parse_args(flags)
    config = frontend_config(args)
    sock = bind("127.0.0.1", 0)
    sock.listen(2048)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with RustSockets() as sockets:
        engine = NullEngine(sockets, step_s)
        process = RustProcess(
            binary,
            http=sock,
            inputs=sockets.inputs,
            outputs=sockets.outputs,
            arguments=rust_arguments(args, config, 0.0),
        )
        async with process:
            await sockets.connect(as_engine(config))
            tasks = [
                asyncio.create_task(sockets.run(engine.take)),
                asyncio.create_task(engine.run()),
            ]
            await process.wait_ready(url_of(sock))
            print(f"ready {process.pid} {url_of(sock)}", flush=True)
            await stop.wait()
            for task in tasks:
                task.cancel()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
