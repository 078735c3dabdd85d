"""A vLLM engine's component and first tokens: what its engine core is asked for, and what it sends.

The engine core's client is scripted.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from prometheus_client import CollectorRegistry
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import PrefillStats

from dynamo_lite.disagg.counters import BROKEN_LINK, ENDED
from dynamo_lite.disagg.engine import AttemptOutcome
from dynamo_lite.protocol.errors import EngineDied, ProtocolError, Refused
from dynamo_lite.protocol.generate import Adapter, TokenDelta
from dynamo_lite.protocol.prefill import FirstToken, FirstTokenWanted
from dynamo_lite.runtime.claim_cells import Cell
from dynamo_lite.vllm.engine.core import VllmEngine
from dynamo_lite.vllm.engine.decode_engine import VllmDecodeEngine
from dynamo_lite.vllm.engine.prefill_engine import VllmPrefillEngine
from dynamo_lite.vllm.engine.process import EngineContext
from dynamo_lite.vllm.first_token import FirstTokenRules
from dynamo_lite.vllm.wire import KV_TRANSFER_PARAMS
from tests.builders import engine_metadata, eventually, prefill_job
from tests.twins.servers import MemoryMessaging
from tests.vllm.without_engines.test_requests import MODEL, message

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


class EngineCore:
    """vLLM's client of its engine core."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.added: list[Any] = []
        self.aborted: list[str] = []
        self.dead = False
        #: Awaited by each abort.
        self.on_abort: Any = None

    async def add_request_async(self, request: Any) -> None:
        if self.dead:
            raise EngineDeadError
        self.added.append(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        if self.on_abort is not None:
            then, self.on_abort = self.on_abort, None
            await then()

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.outputs.get()

    def step(self, *outputs: EngineCoreOutput, **counts: Any) -> None:
        stats = SimpleNamespace(
            num_running_reqs=0,
            num_waiting_reqs=0,
            num_skipped_waiting_reqs=0,
            kv_cache_usage=0.0,
            kv_connector_stats=counts,
        )
        made = EngineCoreOutputs(outputs=list(outputs))
        made.scheduler_stats = stats  # type: ignore[assignment]
        self.outputs.put_nowait(made)


def context() -> EngineContext:
    return EngineContext(
        [],
        engine_config=None,
        engine_config_path=Path("none"),
        messaging=MemoryMessaging(),
        registry=CollectorRegistry(),
    )


def start(engine: VllmEngine, core: EngineCore) -> None:
    """As if the engine had been loaded."""
    config: Any = SimpleNamespace(
        model_config=MODEL,
        speculative_config=None,
        reasoning_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        cache_config=SimpleNamespace(
            block_size=2,
            enable_prefix_caching=True,
            sliding_window=None,
            kv_sharing_fast_prefill=False,
        ),
    )
    engine._client, engine.config = core, config
    engine._engine_config = SimpleNamespace()  # type: ignore[assignment]
    engine._rules = FirstTokenRules(config)


class Rig:
    def __init__(self, *, first_tokens: bool = True):
        self.core = EngineCore()
        self.engine = VllmDecodeEngine(context(), takes_first_tokens=first_tokens)
        start(self.engine, self.core)
        self.deltas = self.engine.steps()

    async def submit(self, **params: Any) -> None:
        await self.engine.submit(message(**({"temperature": 0, "max_tokens": 8} | params)))

    async def step(self, *outputs: EngineCoreOutput) -> list[TokenDelta]:
        self.core.step(*outputs)
        return await anext(self.deltas)

    def token(self, token_id: int, own: str = "r#1") -> TokenDelta | None:
        first = FirstToken(request_id=own, attempt="a1", token_id=token_id)
        return self.engine.first_token(first)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.deltas.aclose()  # type: ignore[attr-defined]
    rig.engine._client = None


def output(own: str, *tokens: int, end: FinishReason | None = None) -> EngineCoreOutput:
    made = EngineCoreOutput(request_id=own, new_token_ids=list(tokens), finish_reason=end)
    made.prefill_stats = PrefillStats()
    made.prefill_stats.set(3, 0, 2)
    return made


def asked(request: Any) -> Any:
    extra = request.sampling_params.extra_args or {}
    return extra.get(KV_TRANSFER_PARAMS, {}).get("first_token")


async def test_the_token_is_sent_early_and_the_engines_is_not(rig: Rig):
    await rig.submit()
    assert asked(rig.core.added[0]) is not None
    early = rig.token(7)
    assert early is not None and (early.request_id, early.token_ids) == ("r", [7])
    assert early.prefill is not None and early.prefill.created_cache_tokens == 2, "one block"
    assert await rig.step(output("r#1", 7)) == [TokenDelta("r", [])]
    assert await rig.step(EngineCoreOutput("r#1", [8])) == [TokenDelta("r", [8])]
    end = EngineCoreOutput("r#1", [9], finish_reason=FinishReason.LENGTH)
    assert await rig.step(end) == [TokenDelta("r", [9], "length")]
    assert rig.token(7) is None
    assert len(rig.engine._first_tokens or ()) == 0 and rig.core.aborted == []


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"max_tokens": 1}, {"logprobs": 1}])
async def test_a_request_that_may_not_get_it_early_gets_the_engines(rig: Rig, params: Any):
    await rig.submit(**params)
    assert asked(rig.core.added[0]) is None
    assert rig.token(7) is None
    [delta] = await rig.step(output("r#1", 7))
    assert delta.token_ids == [7] and delta.prefill is not None


async def test_an_engine_takes_grammars_of_one_backend(rig: Rig):
    for backend in ("xgrammar", "guidance"):
        outputs = StructuredOutputsParams(json={"type": "object"})
        outputs._backend = backend
        with contextlib.nullcontext() if backend == "xgrammar" else pytest.raises(Refused) as found:
            await rig.submit(structured_outputs=outputs)
    assert found is not None and found.value.elsewhere and "with xgrammar" in str(found.value)


async def test_an_engine_refuses_what_its_configuration_does_not_keep(rig: Rig):
    await rig.submit(prompt_logprobs=1)
    rig.engine.config.cache_config.kv_sharing_fast_prefill = True
    with pytest.raises(Refused, match="kv-sharing-fast-prefill"):
        await rig.submit(prompt_logprobs=1)
    with pytest.raises(Refused, match="have no reasoning-parser"):
        await rig.submit(thinking_token_budget=5)
    rig.engine.config.reasoning_config = SimpleNamespace(enabled=True)  # type: ignore[assignment]
    await rig.submit(thinking_token_budget=5)


async def test_it_can_be_switched_off():
    rig = Rig(first_tokens=False)
    await rig.submit()
    assert asked(rig.core.added[0]) is None
    with pytest.raises(ProtocolError):
        rig.token(7)
    assert [d.token_ids for d in await rig.step(output("r#1", 7))] == [[7]]
    await rig.deltas.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", [None, FinishReason.STOP])
async def test_another_token_of_the_engine_is_replaced_by_an_answer_that_goes_on(
    rig: Rig, end: FinishReason | None
):
    await rig.submit()
    rig.token(7)
    assert await rig.step(output("r#1", 6, end=end)) == []
    assert rig.core.aborted == ["r#1"]
    again = rig.core.added[1]
    assert (again.request_id, again.prompt_token_ids) == ("r#2", [1, 2, 3, 7])
    assert again.sampling_params.max_tokens == 7 and asked(again) is None
    # What the engine still says of the first one is not sent.
    assert await rig.step(EngineCoreOutput("r#1", [5])) == []
    assert await rig.step(output("r#2", 8)) == [TokenDelta("r", [8])]
    await rig.engine.abort(["r"])
    assert rig.core.aborted == ["r#1", "r#2"]


async def test_a_request_that_is_aborted_meanwhile_does_not_go_on(rig: Rig):
    await rig.submit()
    rig.token(7)
    rig.core.on_abort = lambda: rig.engine.abort(["r"])
    assert await rig.step(output("r#1", 6)) == []
    assert len(rig.core.added) == 1 and "r#2" in rig.core.aborted
    assert len(rig.engine._first_tokens or ()) == 0


@pytest.mark.parametrize("end", [None, FinishReason.ERROR])
async def test_a_request_that_cannot_go_on_ends(rig: Rig, end: FinishReason | None):
    await rig.submit()
    rig.token(7)
    rig.core.dead = end is None
    assert await rig.step(output("r#1", 6, end=end)) == [TokenDelta("r", [], "error")]
    assert len(rig.engine._first_tokens or ()) == 0


async def test_a_token_that_does_not_fit_is_refused_and_the_last_one_is_the_engines(rig: Rig):
    await rig.submit(stop_token_ids=[9])
    for token, cached in ((MODEL.get_vocab_size(), 0), (7, 3)):
        first = FirstToken(request_id="r#1", attempt="a1", token_id=token, cached_tokens=cached)
        with pytest.raises(ProtocolError, match="r#1"):
            rig.engine.first_token(first)
    assert rig.token(9) is None
    [delta] = await rig.step(output("r#1", 9, end=FinishReason.STOP))
    assert (delta.token_ids, delta.finish_reason) == ([9], "stop")


async def test_what_the_engine_aborts_by_itself_is_no_end(rig: Rig):
    """vLLM ends the ranks beside one that has died, and their requests with it. They are lost, as
    those of the dead rank, when the client reports that."""
    await rig.submit()
    aborted = EngineCoreOutput("r#1", [], finish_reason=FinishReason.ABORT)
    assert await rig.step(aborted) == []
    await rig.engine.abort(["r"])
    assert rig.core.aborted == ["r#1"], "it was still known"


# The prefill engine


WANTED = FirstTokenWanted(last_token_id=9)


class PrefillRig:
    def __init__(self) -> None:
        self.broken: list[tuple[str, ...]] = []
        self.core = EngineCore()
        self.engine = VllmPrefillEngine(context())
        start(self.engine, self.core)


@pytest.fixture
def prefill_rig() -> Iterator[PrefillRig]:
    rig = PrefillRig()
    yield rig
    rig.engine._client = None


@contextlib.asynccontextmanager
async def prefilling(rig: PrefillRig) -> AsyncIterator[asyncio.Queue[int]]:
    """Runs a job; the tokens that it passes on."""
    target = engine_metadata(num_blocks=9)
    rig.engine.metadata = target
    tokens: asyncio.Queue[int] = asyncio.Queue()

    async def passed_on(token: int) -> None:
        tokens.put_nowait(token)

    reads = asyncio.create_task(rig.engine.run_prefills(lambda *link: rig.broken.append(link)))
    job = prefill_job(first_token=WANTED)
    run = asyncio.create_task(rig.engine.prefill(job, target, Cell(), passed_on))
    await eventually(lambda: rig.core.added)
    try:
        yield tokens
        rig.core.step(**{ENDED: [["a1", "written", ""]]})
        assert await run == AttemptOutcome("a1", "written")
    finally:
        reads.cancel()
        run.cancel()
        await asyncio.gather(reads, run, return_exceptions=True)


async def test_a_job_that_is_given_up_while_its_adapter_loads_is_not_computed(
    prefill_rig: PrefillRig, tmp_path: Path
):
    asked, loaded = asyncio.Event(), asyncio.Event()

    async def add(request: Any) -> None:
        asked.set()
        await loaded.wait()

    async def passed_on(token: int) -> None:
        raise AssertionError

    prefill_rig.core.add_lora_async = add  # type: ignore[attr-defined]
    prefill_rig.engine.config.lora_config = True  # type: ignore[assignment]
    (tmp_path / "adapter_config.json").write_text("{}")
    job = prefill_job(adapter=Adapter(name="a", path=str(tmp_path)))
    target = engine_metadata(num_blocks=9)
    run = asyncio.create_task(prefill_rig.engine.prefill(job, target, Cell(), passed_on))
    await asked.wait()
    assert not prefill_rig.engine.busy
    await prefill_rig.engine.abandon("a1")
    loaded.set()
    with pytest.raises(Refused, match="given up while its adapter was loaded"):
        await run
    assert prefill_rig.core.added == []


async def test_a_prefill_engine_passes_the_token_on_before_its_writes_have_ended(
    prefill_rig: PrefillRig,
):
    async with prefilling(prefill_rig) as tokens:
        prefill_rig.core.step(output("a1", 7, end=FinishReason.LENGTH))
        assert await tokens.get() == 7
        assert prefill_rig.core.added[0].prompt_token_ids == [*range(10), 9]
    assert tokens.empty()


async def test_a_job_that_ends_without_a_token_passes_none_on(prefill_rig: PrefillRig):
    async with prefilling(prefill_rig) as tokens:
        pass
    assert tokens.empty()


async def test_a_token_that_comes_with_the_end_of_its_job_is_passed_on(prefill_rig: PrefillRig):
    async with prefilling(prefill_rig) as tokens:
        prefill_rig.core.step(EngineCoreOutput("a1", [7]), **{ENDED: [["a1", "written", ""]]})
    assert tokens.get_nowait() == 7


async def test_a_prefill_engine_that_cannot_sample_it_computes_the_rest(prefill_rig: PrefillRig):
    prefill_rig.engine._rules = SimpleNamespace(gives=lambda _: False)  # type: ignore[assignment]
    async with prefilling(prefill_rig) as tokens:
        prefill_rig.core.step(EngineCoreOutput("a1", [7]))
    assert prefill_rig.core.added[0].prompt_token_ids == list(range(10))
    assert tokens.empty()


async def test_a_job_ends_without_an_outcome_when_its_engine_dies(
    prefill_rig: PrefillRig, monkeypatch: pytest.MonkeyPatch
):
    """What it had started to write may still land, so nothing may say that it has ended."""
    engine, target = prefill_rig.engine, engine_metadata(num_blocks=9)
    monkeypatch.setattr(
        prefill_rig.core, "get_output_async", AsyncMock(side_effect=EngineDeadError)
    )
    job = engine.prefill(prefill_job(), target, Cell(), AsyncMock())
    run = asyncio.create_task(job)
    await eventually(lambda: prefill_rig.core.added)
    with pytest.raises(EngineDied):
        await engine.run_prefills(lambda *link: None)
    await asyncio.wait([run])
    assert run.cancelled() and not engine.busy


async def test_a_broken_link_is_reported(prefill_rig: PrefillRig):
    async with prefilling(prefill_rig):
        prefill_rig.core.step(**{BROKEN_LINK: [["e1", "connection reset"]]})
    assert prefill_rig.broken == [("e1", "connection reset")]
