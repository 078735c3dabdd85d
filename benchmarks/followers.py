"""What requests that wait for another one's KV cost the steps of a decode engine."""

import argparse
import atexit
import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.command import begin, parser_of, write_json
from benchmarks.figures import spread, verdict
from benchmarks.graph import TINY_MODEL
from dynamo_lite.disagg.decode.queue_watch import QueueView
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig, write_engine_config
from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.vllm.engine import opened_scheduler
from dynamo_lite.vllm.engine.engine_config import vllm_config

_ABOUT = """\
Schedules the steps of a decode engine with running streams, without and with requests that wait
for the KV of a leader whose prefix, cached for the most part, they share. Scheduler, block pool and
connector are the engine's own; nothing is computed. For comparison with vLLM's own scheduler, which
looks at each of them in every step. The figures are milliseconds per step.
"""
#: Tokens of a block; blocks of the prefix that is cached, and of what follows in the prompts.
BLOCK, _CACHED_BLOCKS, _NEW_BLOCKS = 32, 1024, 32
_STEPS = 300
_STOCK = "vllm.v1.core.sched.scheduler.Scheduler"
#: A step with followers divided by one without.
_TARGET = 2.0


class Steps:
    """A decode engine whose streams never end. scheduler: vLLM's `scheduler-cls`; None: ours."""

    def __init__(self, model: Path, folder: Path, blocks: int, scheduler: str | None = None):
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        rule = DisaggOptions(max_local_prefill_length=512, queue_view_max_age_s=3600.0)
        role = DecodeEngineConfig(options=rule, prefill_component="P", queue=QueueConfig())
        of = {"namespace": "t", "engine_id": "e", "lease_id": 1, "lease_ttl_s": 5.0}
        config = EngineConfig(**of, nats_url="", etcd_url="", role=role)
        write_engine_config(folder / "engine.json", config)
        length = blocks * BLOCK
        flags = [f"--model={model}", f"--max-model-len={length}", f"--block-size={BLOCK}"]
        flags += [f'--hf-overrides={{"max_position_embeddings": {length}}}', "--max-num-seqs=256"]
        flags += [] if scheduler is None else [f"--scheduler-cls={scheduler}"]
        made = vllm_config(flags, config, folder / "engine.json")
        made.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float16)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        nobody = SimpleNamespace(call=lambda _: None)
        with patch.object(opened_scheduler, "ThreadBridge", lambda _: nobody):
            cls = made.scheduler_config.get_scheduler_cls()
            self.engine = cls(made, cache, StructuredOutputManager(made), BLOCK, log_stats=True)

    def cache(self, tokens: Sequence[int]) -> None:
        """Computes them here, so that the prefix cache has them. Then a prefill worker comes."""
        self.add("cached", tokens)
        while self.engine.requests["cached"].num_computed_tokens < len(tokens):
            self.step()
        self.engine.finish_requests("cached", RequestStatus.FINISHED_ABORTED)
        net = self.engine.connector._decode._net
        net.queue_watch.view = QueueView(0, 0, time.monotonic())
        net.workers.usable = net.workers.responsive = (SimpleNamespace(lease_id=1),)

    def add(self, name: str, tokens: Sequence[int]) -> None:
        params = SamplingParams(max_tokens=5000, ignore_eos=True)
        self.engine.add_request(
            Request(name, list(tokens), params, None, block_hasher=self._hasher)
        )

    def step(self, received: Sequence[str] = (), lost: Sequence[str] = ()) -> list[str]:
        """Returns what it computes. received: the KV of these has come; lost: it will not come."""
        step = self.engine.schedule()
        names = list(step.num_scheduled_tokens)
        # Prompts that are computed in chunks give no token before the last one.
        tokens = [[] if self.engine.requests[name].is_prefill_chunk else [7] for name in names]
        output = ModelRunnerOutput(
            names, {name: at for at, name in enumerate(names)}, sampled_token_ids=tokens
        )
        output.kv_connector_output = KVConnectorOutput(
            finished_recving={*received, *lost}, failed_recving=set(lost)
        )
        self.outputs = self.engine.update_from_output(step, output)
        return names


def measure(options: argparse.Namespace, scheduler: str | None, followers: int) -> float:
    """Milliseconds of a step, the median."""
    blocks = _CACHED_BLOCKS + 2 * _NEW_BLOCKS + options.streams * (_STEPS // BLOCK + 4)
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(TINY_MODEL, Path(folder), blocks, scheduler)
        prefix = [number % 500 for number in range(BLOCK * _CACHED_BLOCKS)]
        steps.cache(prefix)
        for number in range(options.streams):
            steps.add(f"stream {number}", [number] * 20)
        prefix += [501] * BLOCK * _NEW_BLOCKS
        for number in range(followers + 1):
            steps.add(f"chat {number}", [*prefix, number])
        for _ in range(5):
            assert len(steps.step()) == options.streams
        at = [time.perf_counter()]
        for _ in range(_STEPS):
            steps.step()
            at.append(time.perf_counter())
        return statistics.median(end - start for start, end in pairwise(at)) * 1e3


def main() -> None:
    parser = parser_of("followers", _ABOUT)
    parser.add_argument("--followers", type=int, default=63, help="(default 63)")
    parser.add_argument("--streams", type=int, default=16, help="beside them (default 16)")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (default 5)")
    options = begin(parser)
    logging.disable(logging.WARNING)
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for name, scheduler in (("ours", None), ("vLLM's", _STOCK)):
            pair = [measure(options, scheduler, count) for count in (0, options.followers)]
            found.setdefault(name, []).append((pair[0], pair[1]))
    for name, pairs in found.items():
        alone, beside = zip(*pairs, strict=True)
        ratio = statistics.median(one / other for other, one in pairs)
        figures = f"{spread(alone, 3)} without, {spread(beside, 3)} with followers: {ratio:.2f} x"
        print(f"{name:8}{figures}{verdict(ratio <= _TARGET, _TARGET) if name == 'ours' else ''}")
    write_json(options.json, found)
    atexit.unregister(gc.freeze)  # of the connector


if __name__ == "__main__":
    main()
