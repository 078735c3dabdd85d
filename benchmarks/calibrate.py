"""Measures how long an engine's steps take, and writes a timing file for `dynamo-lite simulate`.

    python -m benchmarks.calibrate --out timing.json                        # the tiny model
    python -m benchmarks.calibrate --model Qwen/Qwen3-8B --out timing.json -- --max-num-seqs=128

vLLM's engine core runs in this process, with the arguments after `--`. For each batch size and
context length it decodes some steps, and then beside these sequences it prefills prompts of each
length. Every step is a record: prefill tokens and their attention work, decoding sequences and
their KV, seconds. 70 % of the records are fitted; the errors are those of the others.

With --url it also measures a running, idle graph of the same model: what a step takes beside the
engine core's own work (added to step_s), what a first token takes beside the engine (frontend_s),
and what a remote prefill takes beside its computing (handover_s).
"""

import argparse
import asyncio
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from benchmarks.client import Answer, connect
from benchmarks.fit import StepRecord, fit, read_records, write_records
from benchmarks.graph import TINY_MODEL
from dynamo_lite.capacity.scaling import prefill_s
from dynamo_lite.capacity.timing import FORMAT, EngineLimits, StepTiming, Timing, TransferTiming

LENGTHS = (16, 64, 128, 256, 512, 1024, 1536, 3072)
BATCHES = (0, 1, 2, 4, 8, 16)
CONTEXTS = (64, 256, 1024, 3072)
DECODE_STEPS = 6
#: The first passes compile and warm caches.
WARM_UP = 3
_PROBES = 15
#: Tokens of a probe's short prompt, and of its answer.
_SHORT, _STREAMED = 16, 64
#: As `configs/disagg.yaml`.
TINY_ARGS = (
    *("--dtype=float32", "--block-size=32", "--max-model-len=8192", "--enforce-eager"),
    *("--max-num-seqs=32", "--kv-cache-memory-bytes=134217728"),
)


class Engine:
    """vLLM's engine core in this process; keeps a record of each of its steps. clock: seconds."""

    def __init__(self, arguments: list[str], clock: Callable[[], float]):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args = EngineArgs.from_cli_args(parser.parse_args(arguments))
        args.enable_prefix_caching = False
        args.async_scheduling = False
        self._engine = LLMEngine.from_engine_args(args)
        self.config = self._engine.vllm_config
        core: Any = self._engine.engine_core
        self._core = core.engine_core
        self._schedule = self._core.scheduler.schedule
        self._core.scheduler.schedule = self._note_step
        # Without the output processing, which is the Frontend's in a graph.
        self._step_core = self._core.step_fn
        self._core.step_fn = self._timed_step
        self._step: tuple[int, float, int, int] | None = None
        self.records: list[StepRecord] = []
        self._number, self._clock, self._took_s = 0, clock, 0.0

    def _note_step(self, *args: Any, **kwargs: Any) -> Any:
        made = self._schedule(*args, **kwargs)
        requests = self._core.scheduler.requests
        tokens, attention, streams, kv = 0, 0.0, 0, 0
        for request_id, count in made.num_scheduled_tokens.items():
            request = requests[request_id]
            # The scheduler has counted this step's tokens already.
            before = request.num_computed_tokens - count
            if before >= request.num_prompt_tokens:
                streams, kv = streams + 1, kv + before
            else:
                tokens, attention = tokens + count, attention + count * (before + count / 2)
        self._step = tokens, attention, streams, kv
        return made

    def _timed_step(self) -> Any:
        began = self._clock()
        made = self._step_core()
        self._took_s = self._clock() - began
        return made

    def add(self, prompt: int, output: int) -> str:
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import SamplingParams

        self._number += 1
        name = str(self._number)
        ids = [(self._number * 7 + i * 13) % 400 + 10 for i in range(prompt)]
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=ids), params)
        return name

    def step(self, *, keep: bool = True) -> StepRecord | None:
        self._step = None
        outputs = self._engine.step()
        #: Requests that the step gave a token.
        self.gave = [one.request_id for one in outputs]
        if self._step is None or not (self._step[0] or self._step[2]):
            return None
        record = StepRecord(*self._step, self._took_s)
        if keep:
            self.records.append(record)
        return record

    def drain(self, names: list[str]) -> None:
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self.step(keep=False)

    def busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    def until_decoding(self, count: int, *, keep: bool) -> None:
        """Steps until a step has `count` decoding sequences and no prompt."""
        for _ in range(10_000):
            record = self.step(keep=keep)
            if record is not None and record.streams == count and not record.tokens:
                return
        raise RuntimeError("the sequences do not come to decode")


def measure(engine: Engine, *, quick: bool) -> None:
    """Fills the engine's records."""
    lengths = LENGTHS[::2] if quick else LENGTHS
    for turn in range(WARM_UP):
        engine.add(lengths[-1] // (turn + 1), 4)
        while engine.busy():
            engine.step(keep=False)
    cache = engine.config.cache_config
    room = cache.num_gpu_blocks * cache.block_size
    for batch in BATCHES:
        for context in CONTEXTS if batch else CONTEXTS[:1]:
            if batch * (context + 64) + lengths[-1] > room or batch >= _most_sequences(engine):
                continue
            _measure_one(engine, batch, context, lengths)
            print(f"batch {batch}, context {context}: {len(engine.records)} records", flush=True)


def _measure_one(engine: Engine, batch: int, context: int, lengths: Sequence[int]) -> None:
    """Decodes some steps, and then with a prompt of each length beside them."""
    longest = engine.config.model_config.max_model_len
    names = [engine.add(context, longest - context - 1) for _ in range(batch)]
    if names:
        engine.until_decoding(batch, keep=False)
        for _ in range(DECODE_STEPS):
            engine.step()
    for length in lengths:
        if length + 1 < longest:
            engine.add(length, 1)
            record = engine.step()
            while engine.busy() and record is not None and record.tokens:
                record = engine.step()
    engine.drain(names)


def _most_sequences(engine: Engine) -> int:
    return engine.config.scheduler_config.max_num_seqs


def port_of(url: str) -> int:
    """Raises ArgumentTypeError for another host: the network would be measured, too."""
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost") or parts.port is None:
        raise argparse.ArgumentTypeError(f"{url} is not http://127.0.0.1:PORT")
    return parts.port


async def probe(port: int, timing: Timing, remote_tokens: int) -> Timing:
    """The timing with what an idle graph adds to the engine's own times, as medians."""
    paces, short, long = [], [], []
    async with connect(port) as connection:

        async def ask(number: int, prompt: int, output: int) -> Answer:
            ids = [(number * 31 + i * 17) % 400 + 10 for i in range(prompt)]
            body = {"model": timing.model, "prompt": ids, "max_tokens": output}
            answer = await connection.stream("/v1/completions", {**body, "ignore_eos": True})
            await asyncio.sleep(0.05)
            return answer

        for number in range(_PROBES):
            answer = await ask(number, _SHORT, _STREAMED)
            short.append(answer.first_s)
            paces.append((answer.total_s - answer.first_s) / (_STREAMED - 1))
            long.append((await ask(number, remote_tokens, 2)).first_s)
    # The context grows by one token with each step: its mean counts.
    alone_s = timing.step.one(streams=1, kv=_SHORT + _STREAMED // 2)
    step_s = timing.step.step_s + max(statistics.median(paces) - alone_s, 0.0)
    step = msgspec.structs.replace(timing.step, step_s=round(step_s, 8))
    timing = msgspec.structs.replace(timing, step=step)
    frontend_s = max(statistics.median(short) - prefill_s(timing, _SHORT), 0.0)
    remote_s = statistics.median(long) - prefill_s(timing, remote_tokens) - frontend_s
    transfer = msgspec.structs.replace(timing.transfer, handover_s=round(max(remote_s, 0.0), 6))
    return msgspec.structs.replace(timing, frontend_s=round(frontend_s, 6), transfer=transfer)


def device_name() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        name = platform.machine()
    return f"CPU {name}, {os.environ.get('OMP_NUM_THREADS', 'all')} threads"


def limits_of(config: Any) -> tuple[EngineLimits, int]:
    """The limits, and the bytes of KV per token."""
    cache = config.cache_config
    tokens = cache.num_gpu_blocks * cache.block_size
    model, parallel = config.model_config, config.parallel_config
    heads = model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    layers = model.get_num_layers(parallel) * parallel.pipeline_parallel_size
    size = 2 * heads * layers * model.get_head_size() * model.dtype.itemsize
    return EngineLimits(
        kv_tokens=tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
    ), size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(TINY_MODEL), help="default: the tiny model")
    parser.add_argument("--name", help="the model's name in the file; default: its last part")
    parser.add_argument("--out", type=Path, default=Path("timing.json"))
    parser.add_argument("--records", type=Path, help="also write the step records, one per line")
    parser.add_argument("--repeat", type=int, default=1, help="passes over the grid")
    parser.add_argument("--quick", action="store_true", help="half of the lengths")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time, for an engine with one thread on a busy machine",
    )
    parser.add_argument("--start-s", type=float, default=60.0, help="start time of a worker")
    parser.add_argument("--bytes-per-s", type=float, default=25e9, help="of a network interface")
    parser.add_argument(
        "--url", type=port_of, help="of an idle graph of this model on this host, for what it adds"
    )
    parser.add_argument("--remote-tokens", type=int, default=1024, help="prompts for --url")
    parser.add_argument("--refit", type=Path, help="use these records; measure no engine")
    parser.add_argument("--limits-of", type=Path, help="with --refit: the rest of this timing file")
    parser.add_argument("engine_args", nargs="*", help="after `--`: arguments of vLLM's engine")
    given = parser.parse_args()
    if given.refit is not None:
        if given.limits_of is None:
            sys.exit("--refit needs --limits-of, the timing file that the records belong to")
        old = msgspec.json.decode(given.limits_of.read_bytes(), type=Timing)
        step, errors = fit(read_records(given.refit))
        timing = msgspec.structs.replace(old, step=step, held_out=errors)
    else:
        timing = _measured(given)
    if given.url:
        timing = asyncio.run(probe(given.url, timing, given.remote_tokens))
    given.out.write_bytes(msgspec.json.format(msgspec.json.encode(timing), indent=2) + b"\n")
    _print(timing)


def _measured(given: argparse.Namespace) -> Timing:
    import vllm

    extra = given.engine_args or (TINY_ARGS if given.model == str(TINY_MODEL) else ())
    clock = time.perf_counter if given.clock == "wall" else time.process_time
    engine = Engine([f"--model={given.model}", *extra], clock)
    try:
        for _ in range(given.repeat):
            measure(engine, quick=given.quick)
    except KeyboardInterrupt:
        print("interrupted: fitting the records so far", file=sys.stderr)
    if given.records is not None:
        write_records(given.records, engine.records)
    step, errors = fit(engine.records)
    limits, bytes_per_token = limits_of(engine.config)
    return Timing(
        format=FORMAT,
        model=given.name or Path(given.model).name,
        device=device_name(),
        vllm_version=vllm.__version__,
        source=f"benchmarks/calibrate.py, {len(engine.records)} steps, {given.clock} time",
        step=step,
        engine=limits,
        transfer=TransferTiming(bytes_per_token=bytes_per_token, bytes_per_s=given.bytes_per_s),
        start_s=given.start_s,
        held_out=errors,
    )


def _print(timing: Timing) -> None:
    step: StepTiming = timing.step
    for name in step.__struct_fields__:
        print(f"{name:12} {getattr(step, name):.4g} s")
    if timing.held_out is not None:
        held = timing.held_out
        print(f"held out: {held.records} steps, error {held.median:.1%} median, {held.p95:.1%} p95")


if __name__ == "__main__":
    main()
