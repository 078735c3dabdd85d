"""`dynamo-lite config` and `explain` as a person runs them, on real servers."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_lite.disagg.decode.decision_log import DecisionLog
from dynamo_lite.protocol import names
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.builders import ManualClock
from tests.process.command import invoke, run
from tests.unit.decode_engine import Decode, prompt

LENGTH, SIZE = "VllmWorker.max-local-prefill-length", "VllmWorker.max-prefill-queue-size"


@pytest.fixture
def place(etcd_url: str, namespace: str, tmp_path: Path) -> tuple[str, ...]:
    return ("--etcd-url", etcd_url, "--namespace", namespace, "--state-dir", str(tmp_path))


def values_set(place: tuple[str, ...]) -> dict[str, Any]:
    result = invoke("config", "get", "--json", *place)
    assert result.returncode == 0, result.stderr
    return {row["key"]: row["set"] for row in json.loads(result.stdout) if "set" in row}


def test_options_are_set_shown_and_unset(place: tuple[str, ...]):
    assert values_set(place) == {}
    result = run("config", "set", f"{LENGTH}=256", f"{SIZE}=2", *place)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"{LENGTH}: (file) -> 256", f"{SIZE}: (file) -> 2"]
    assert invoke("config", "set", f"{LENGTH}=300", *place).returncode == 0
    assert values_set(place) == {LENGTH: 300, SIZE: 2}
    # No component runs, so only what is set is shown.
    table = invoke("config", "get", *place).stdout.splitlines()
    assert [line.split() for line in table] == [
        ["KEY", "SET", "FILE"],
        [LENGTH, "300", "?"],
        [SIZE, "2", "?"],
    ]
    table = invoke("config", "get", "VllmWorker.max-queue-wait-s", *place).stdout.splitlines()
    assert table[1].split() == ["VllmWorker.max-queue-wait-s", "-", "?"] and len(table) == 2
    result = invoke("config", "unset", LENGTH, *place)
    assert result.stdout == f"{LENGTH}: 300 -> (file)\n"
    assert invoke("config", "unset", "VllmWorker", *place).returncode == 0
    assert values_set(place) == {}
    assert invoke("config", "unset", LENGTH, *place).stdout == "VllmWorker: no value differs\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["set", f"{SIZE}=3", f"{LENGTH}=x"], "got 'x'"),
        (["unset", "VllmWorker.nothing"], "no live option"),
        (["get", "nothing"], "no live option"),
        (["set"], "Missing argument"),
    ],
)
def test_bad_input_is_refused_and_nothing_changes(
    place: tuple[str, ...], arguments: list[str], message: str
):
    result = invoke("config", *arguments, *place)
    assert result.returncode == 2
    assert message in result.stderr and not result.stdout
    assert values_set(place) == {}


@pytest.mark.parametrize(
    "arguments", [[], ["a", "--last", "1"], ["--last", "0"], ["--last", "x"], ["x" * 300]]
)
def test_bad_options_of_explain(place: tuple[str, ...], arguments: list[str]):
    result = invoke("explain", *arguments, *place)
    assert result.returncode == 2 and not result.stdout


def test_without_a_server_it_says_so(tmp_path: Path):
    for command in (("config", "get"), ("explain", "--last", "1")):
        result = invoke(*command, "--state-dir", str(tmp_path))
        assert result.returncode == 1
        assert result.stderr.startswith("error: no graph runs on ")
    result = invoke("config", "get", "--etcd-url", "http://127.0.0.1:1", "--namespace", "n")
    assert result.returncode == 1 and "cannot use etcd" in result.stderr


@pytest.fixture
async def engine(
    place: tuple[str, ...], etcd_url: str, nats_url: str, namespace: str
) -> AsyncIterator[DecisionLog]:
    """A decode engine's decisions, at its subject; and another engine, which has died."""
    log = Decode(ManualClock()).half
    for name, tokens in (("0_cmpl-a-0-0a1b2c3d#1", 3), ("chatcmpl-b-0a1b2c3d#2", 3)):
        log.num_new_matched_tokens(prompt(name, tokens), 0)
        log.state_after_alloc(prompt(name, tokens), (), 0)

    async def answer(payload: bytes) -> bytes:
        return log.prefills.decisions.answer(payload)

    async with (
        EtcdStore(etcd_url) as store,
        NatsMessaging(nats_url) as messaging,
        messaging.serve(names.explain_subject(namespace, "e1"), answer),
    ):
        for engine_id in ("e1", "dead"):
            await store.put(names.nixl_metadata_key(namespace, engine_id), b"")
        yield log.prefills.decisions


async def test_a_decision_is_explained(engine: DecisionLog, place: tuple[str, ...], nats_url: str):
    async def explain(*words: str) -> subprocess.CompletedProcess[str]:
        where = (*place, "--nats-url", nats_url)
        return await asyncio.to_thread(invoke, "explain", *words, *where)

    result = await explain("cmpl-a")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("0_cmpl-a-0-0a1b2c3d#1 ")
    assert "  verdict: local\n  reason: short\n" in result.stdout
    assert "dead does not respond" in result.stderr
    [told] = json.loads((await explain("b", "--json")).stdout)
    assert (told["request_id"], told["verdict"]) == ("chatcmpl-b-0a1b2c3d#2", "local")
    listed = (await explain("--last", "20")).stdout.splitlines()
    assert [line.split()[1] for line in listed] == [
        "REQUEST",
        "0_cmpl-a-0-0a1b2c3d#1",
        "chatcmpl-b-0a1b2c3d#2",
    ]
    assert len((await explain("--last", "1")).stdout.splitlines()) == 2
    unknown = await explain("cmpl-unknown")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "cmpl-unknown: none of 1 decode engines has a decision of it" in unknown.stderr
