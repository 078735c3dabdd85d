"""First tokens from prefill workers, at the component of the decode engine."""

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.decode.first_tokens import FirstTokens
from dynamo_lite.disagg.engine import EngineLoad
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.generate import GenerateRequest, PrefillCounts, TokenDelta
from dynamo_lite.protocol.prefill import FirstToken
from dynamo_lite.request_plane.migrating_request import MigratingRequest, MigrationPlan
from dynamo_lite.runtime.clock import SYSTEM_CLOCK
from dynamo_lite.runtime.drops import counted
from dynamo_lite.serve.services.config import VllmWorkerConfig
from dynamo_lite.serve.services.decode_worker import LoadedWorker
from tests.builders import ENGINE, NAMESPACE, ManualClock, endpoint_record, eventually
from tests.twins.servers import MemoryMessaging

VOCABULARY, STOP = 100, 9
COUNTS = PrefillCounts(5, 0, 4, 0.5, 0.25)


class Worker:
    """A decode worker with the request "r", which its engine knows as "r#1"."""

    def __init__(self, **fields: object):
        self.clock, self.registry = ManualClock(), CollectorRegistry()
        self.first = FirstTokens(self.registry, self.clock)
        self.request = GenerateRequest(
            request_id="r",
            prompt_token_ids=[1, 2, 3, 4, 5],
            sampling=b"",
            arrival_time=0.0,
            **fields,
        )
        self.first.expect("r#1", self.request, frozenset({STOP}))

    def take(
        self, token: int, *, own: str = "r#1", caller: str | None = "r", cached: int = 2
    ) -> TokenDelta | None:
        """cached: tokens in the prefill worker's cache; the decode engine has one."""
        hits = {"cached_tokens": 1, "writer_cached_tokens": cached}
        message = FirstToken(request_id=own, attempt="a1", token_id=token, **hits)
        return self.first.take(message, caller=caller, vocabulary=VOCABULARY, block_size=2)

    def settle(
        self, *tokens: int, own: str = "r#1", end: str | None = None, counts: bool = True
    ) -> TokenDelta | GenerateRequest | None:
        delta = TokenDelta("r", list(tokens), end, prefill=COUNTS if counts else None)
        return self.first.settle(own, delta)

    def counted(self, outcome: str) -> float:
        labels = {"outcome": outcome}
        return self.registry.get_sample_value("dynamo_lite_first_tokens_total", labels) or 0.0

    @property
    def differences(self) -> float | None:
        return self.registry.get_sample_value("dynamo_lite_first_token_differences_total")


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_the_token_is_sent_with_the_counts_of_the_prompt_and_only_once(worker: Worker):
    worker.clock.now += 0.5
    sent = worker.take(7)
    assert sent == TokenDelta("r", [7], prefill=PrefillCounts(5, 1, 3, 0.5, 0.0, 2, 2))
    worker.clock.now += 0.125
    assert worker.settle(7) is None
    assert worker.settle(8, counts=False) == TokenDelta("r", [8])
    assert (worker.counted("sent"), worker.differences, len(worker.first)) == (1, 0, 0)


def test_the_end_of_an_answer_is_sent_without_the_token():
    for tokens, end in (([7], "stop"), ([], "abort"), ([], "error"), ([6], "error")):
        worker = Worker()
        worker.take(7)
        assert worker.settle(*tokens, end=end) == TokenDelta("r", [], end)
        assert worker.differences == 0


def test_an_engines_output_passes_if_no_token_came_before(worker: Worker):
    assert worker.settle(7) == TokenDelta("r", [7], prefill=COUNTS)
    assert worker.take(7) is None
    assert (worker.counted("late"), worker.counted("sent")) == (1, 0)


def test_a_token_that_ends_the_answer_is_left_to_the_engine(worker: Worker):
    assert worker.take(STOP) is None
    assert worker.settle(STOP, end="stop") == TokenDelta("r", [STOP], "stop", prefill=COUNTS)
    assert worker.counted("last") == 1


@pytest.mark.parametrize("end", [None, "stop", "length"])
def test_another_token_of_the_engine_makes_the_answer_go_on_from_the_sent_one(end: str | None):
    worker = Worker(timeout_s=10.0, output_token_ids=[3])
    worker.take(7)
    worker.clock.now += 4.0
    request = worker.settle(6, 8, end=end)
    assert isinstance(request, GenerateRequest)
    assert (request.request_id, request.output_token_ids) == ("r", [3, 7])
    assert request.timeout_s == 6.0
    assert worker.differences == 1
    # It is the same answer for the client: the counts of the prompt are not sent again.
    worker.first.go_on("r#2", request)
    assert worker.take(5, own="r#2") is None
    assert worker.settle(5, own="r#2") == TokenDelta("r", [5])
    assert worker.settle(4, own="r#2", counts=False) == TokenDelta("r", [4])
    assert len(worker.first) == 0


def test_an_aborted_request_takes_no_token(worker: Worker):
    worker.first.forget("r#1")
    worker.first.forget("r#1")
    assert worker.take(7, caller=None) is None
    assert worker.counted("late") == 1
    assert len(worker.first) == 0


@pytest.mark.parametrize(("token", "cached"), [(VOCABULARY, 0), (7, 5)])
def test_a_token_that_does_not_fit_is_refused(token: int, cached: int, worker: Worker):
    with pytest.raises(ProtocolError, match="r#1"):
        worker.take(token, cached=cached)
    assert worker.settle(7) == TokenDelta("r", [7], prefill=COUNTS)


# What the Frontend makes of it


def test_a_request_that_loses_its_worker_after_the_token_goes_on_behind_it(worker: Worker):
    """The decode worker dies with the token sent and nothing of its engine's."""
    flight = MigratingRequest(worker.request, MigrationPlan(), None)
    flight.attempt("r", endpoint_record(1), 0.0)
    early = worker.take(7)
    assert early is not None and flight.take(early) == early
    flight.moves += 1
    again = flight.attempt("r~1", endpoint_record(2), 0.0)
    assert again.output_token_ids == [7]
    engines = TokenDelta("r~1", [8], prefill=PrefillCounts(6, 0, 0, 0.0, 0.0))
    assert flight.take(engines) == TokenDelta("r", [8])


# The message at the decode worker


@pytest.mark.parametrize("broken", [b"", b"nonsense", b"cut"], ids=str)
async def test_a_malformed_message_is_dropped_and_counted(broken: bytes):
    async with serving() as (messaging, sent, drops):
        first = encode(FirstToken(request_id="r#1", attempt="a1", token_id=7))
        await messaging.publish(SUBJECT, first[:-1] if broken == b"cut" else broken)
        await messaging.publish(SUBJECT, encode(UNKNOWN))
        await messaging.publish(SUBJECT, first)
        await eventually(lambda: sent)
        assert sent == [TokenDelta("r", [7])]
        assert drops == ["first_token", "first_token"]


SUBJECT = names.first_token_subject(NAMESPACE, ENGINE)
UNKNOWN = FirstToken(request_id="x#1", attempt="a1", token_id=7)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[MemoryMessaging, list[TokenDelta], list[str]]]:
    """A decode worker's handler; what it delivers, and where messages were dropped."""
    sent: list[TokenDelta] = []
    drops: list[str] = []

    def first_token(first: FirstToken) -> TokenDelta:
        if first.request_id != "r#1":
            raise ProtocolError("it does not run here")
        return TokenDelta("r", [first.token_id])

    messaging = MemoryMessaging()
    host: Any = SimpleNamespace(messaging=messaging, clock=SYSTEM_CLOCK)
    engine: Any = SimpleNamespace(first_token=first_token, metadata=None, load=EngineLoad())
    server: Any = SimpleNamespace(deliver=sent.extend)
    options: Any = None
    worker = LoadedWorker(host, VllmWorkerConfig(), engine, server, options)
    handler = counted(worker.on_first_token, "first_token", drops.append)
    async with messaging.serve(SUBJECT, handler):
        yield messaging, sent, drops
