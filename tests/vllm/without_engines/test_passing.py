"""A prompt that finds no free blocks does not hold back those behind it; vLLM's own scheduler."""

import json
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from dynamo_lite.disagg.decode.passing import MAX_PASSED, MAX_SKIPPED, RETRY_STEPS, Passing
from dynamo_lite.disagg.engine_config import (
    DecodeEngineConfig,
    EngineConfig,
    write_engine_config,
)
from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.vllm.engine import connector
from dynamo_lite.vllm.engine.engine_config import transfer_config
from dynamo_lite.vllm.engine.free_blocks import FreeRuns
from tests.unit.decode_engine import Bridge

BLOCK, POOL, MODEL_TOKENS = 32, 40, 1024

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": MODEL_TOKENS,
    "vocab_size": 256,
    "torch_dtype": "float32",
}


class Engine:
    """A decode engine's scheduler with the connector; every step computes what it was told."""

    def __init__(self, config: VllmConfig, scheduler: type[Scheduler]):
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        kv = KVCacheConfig(POOL, [], [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)])
        self.scheduler = scheduler(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._count = 0

    def add(self, name: str, blocks: int) -> None:
        """A prompt that needs this many blocks."""
        self._count += 1
        tokens = [self._count * 7 % 256] * (blocks * BLOCK - BLOCK // 2)
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=500, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def step(self) -> list[str]:
        """Who was admitted in one step."""
        before = {request.request_id for request in self.scheduler.running}
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        made: list[list[int]] = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            done = request.num_computed_tokens >= request.num_prompt_tokens
            made.append([1] if done else [])
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: i for i, name in enumerate(ids)},
                sampled_token_ids=made,
            ),
        )
        return [name for name in ids if name not in before]

    def end(self, *names: str) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)


@pytest.fixture(params=[Scheduler, AsyncScheduler])
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Engine:
    monkeypatch.setattr(connector, "_die_with_parent", lambda: None)
    monkeypatch.setattr(connector.atexit, "register", lambda _: None)
    monkeypatch.setattr(connector, "ThreadBridge", Bridge)
    init_none_hash(sha256)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(LLAMA))
    link = EngineConfig(
        namespace="n",
        engine_id="e",
        lease_id=1,
        lease_ttl_s=10.0,
        nats_url="",
        etcd_url="",
        role=DecodeEngineConfig(
            options=DisaggOptions(max_local_prefill_length=MODEL_TOKENS),
            prefill_component="PrefillWorker",
            queue=QueueConfig(max_jobs=1),
        ),
    )
    write_engine_config(tmp_path / "link.json", link)
    args = EngineArgs(
        model=str(tmp_path / "model"),
        skip_tokenizer_init=True,
        block_size=BLOCK,
        max_model_len=MODEL_TOKENS,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        kv_transfer_config=transfer_config(link, tmp_path / "link.json"),
    )
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = POOL
    config.scheduler_config.async_scheduling = request.param is AsyncScheduler
    return Engine(config, request.param)


def test_the_engine_s_pool_hands_out_ascending_runs(engine: Engine):
    """vLLM's own queue would hand out what was freed in any order."""
    manager = engine.scheduler.kv_cache_manager
    assert type(manager.block_pool.free_block_queue) is FreeRuns
    for name in "abcdefgh":
        engine.add(name, blocks=4)
    engine.step()
    engine.end("b", "h", "d", "c", "g", "e")
    engine.add("long", blocks=12)
    assert engine.step() == ["long"]
    ids = manager.get_block_ids("long")[0]
    assert ids == sorted(ids)


def test_one_that_is_admitted_although_it_was_skipped_harms_nobody():
    """vLLM continues with a prompt that must not read the prefix cache, whatever the answer is."""
    passing = Passing()
    passing.answered("a", 5)
    passing.end_step(0)
    assert passing.skips("a", 1)
    passing.allocated("a")
    passing.end_step(0)
    assert not passing.skips("a", 1)


def test_short_prompts_pass_one_that_finds_no_blocks(engine: Engine):
    engine.add("first", 30)
    assert engine.step() == ["first"]
    engine.add("long", 20)
    engine.add("short", 3)
    engine.add("another", 3)
    assert engine.step() == []  # vLLM finds out that there are no blocks
    assert engine.step() == ["short", "another"]
    engine.end("first")
    assert engine.step() == ["long"]


def test_a_prompt_is_passed_so_often_and_then_waits_for_its_turn_alone(engine: Engine):
    engine.add("first", 30)
    assert engine.step() == ["first"]
    engine.add("long", 20)
    assert engine.step() == []
    passed: list[str] = []
    for number in range(MAX_PASSED + 8):
        engine.add(f"s{number}", 2)
        admitted = engine.step()
        engine.end(*admitted)
        passed += admitted
    # The last step that it was passed in followed one in which it was tried again, and nobody
    # else was admitted: two prompts waited.
    assert len(passed) == MAX_PASSED + 1 and "long" not in passed
    assert engine.step() == []
    engine.end("first")
    assert engine.step()[0] == "long"


def test_what_was_preempted_is_not_passed(engine: Engine):
    engine.add("first", 30)
    engine.add("second", 8)
    assert engine.step() == ["first", "second"]
    running = engine.scheduler.running
    engine.scheduler._preempt_request(running.pop(0), 0.0)
    engine.add("third", 10)
    assert engine.step() == ["first"]
    second = running[0]
    assert second.request_id == "second"
    engine.scheduler._preempt_request(running.pop(1), 0.0)
    engine.add("large", 25)
    assert engine.step()[0] == "first"


def test_only_so_many_are_skipped_in_a_step():
    passing = Passing()
    names = [f"r{i}" for i in range(MAX_SKIPPED + 2)]
    for name in names:
        passing.answered(name, 10)
        passing.end_step(free=5)
    assert [passing.skips(name, 5) for name in names] == [True] * MAX_SKIPPED + [False] * 2


def test_the_first_one_is_tried_again_now_and_then_and_who_fits_at_once():
    passing = Passing()
    for name in ("a", "b"):
        passing.answered(name, 10)
        passing.end_step(free=5)
    tried: list[int] = []
    for step in range(2 * RETRY_STEPS):
        if passing.skips("a", 5):
            assert passing.skips("b", 5)
        else:
            tried.append(step)
            passing.answered("a", 10)
        passing.end_step(free=5)
    assert len(tried) == 2 and tried[1] - tried[0] == RETRY_STEPS
    assert not passing.skips("a", 10) and not passing.skips("b", 10)


def test_nothing_is_left_of_prompts_that_are_over():
    passing = Passing()
    passing.answered("a", 10)
    passing.end_step(free=5)
    assert passing.skips("a", 5)
    passing.finished("a")
    passing.allocated("b")
    assert not passing.skips("a", 5)
    passing.answered("c", 10)
    passing.finished("c")
    passing.end_step(free=5)
    assert not passing.skips("c", 5)
