"""`scripts/gpu_check`: its pieces in host memory, that each of them can fail, and what it says."""

import json
import re
import subprocess
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks.used_pools import Job
from dynamo_lite.serve.config import resolve
from dynamo_lite.serve.document import read_document
from dynamo_lite.serve.graphs import load_graph
from dynamo_lite.transfer.base import Transfer
from gpu_check import descriptors as descriptors_part
from gpu_check import graph, kernels, transfers
from gpu_check.__main__ import arguments, check
from gpu_check.bench import Bench, find_bench
from gpu_check.descriptors import counts_per_job, descriptors
from gpu_check.graph import first_difference
from gpu_check.parts import PARTS, Part
from gpu_check.report import CheckFailed, Outcome, Result, Skip, as_json, exit_code, line, summary
from gpu_check.runner import run_apart, run_part

pytestmark = pytest.mark.heavy

CPU = Bench("cpu", "host memory", 1)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def part(name: str, **more: float) -> Part:
    return Part(name, "tests.unit.gpu_parts", "", **more)  # type: ignore[arg-type]


# The pieces, in host memory


@pytest.mark.parametrize("name", ["registration", "write", "events", "polling"])
def test_pieces_between_two_processes_work_in_host_memory(name):
    figures = getattr(transfers, name)(CPU)
    assert figures
    if name == "events":
        assert figures["kernel and write ms"] >= 1e3 * transfers._BUSY_S
    if name == "polling":
        assert figures["notice ms with thread"] < figures["busy ms"]


def test_transposition_works_in_host_memory():
    assert kernels.transposition(CPU)


class CrookedLink(transfers.PoolLink):
    """Its second block lands one further."""

    def write(self, here: Sequence[int], there: Sequence[int], notice: bytes = b"") -> Transfer:
        there = [*there[:1], there[0] + 1, *there[2:]]
        return super().write(here, there, notice)


def test_a_block_in_the_wrong_place_is_seen(monkeypatch):
    monkeypatch.setattr(transfers, "PoolLink", CrookedLink)
    with pytest.raises(CheckFailed, match="do not contain what was sent"):
        transfers.write(CPU)


def test_an_event_that_comes_before_its_kernel_is_seen(monkeypatch):
    """The rank writes at once, and brings what was there before."""
    late = transfers._computed_late
    said = iter([False])

    def computed_late(pool, seed):
        late(pool, seed)
        return lambda: next(said, True)

    monkeypatch.setattr(transfers, "_computed_late", computed_late)
    with pytest.raises(CheckFailed, match=r"were not computed|content from before"):
        transfers.events(CPU)


def test_a_notice_that_waits_for_the_engines_thread_is_seen(monkeypatch):
    monkeypatch.setattr(transfers, "_notice_while_busy", lambda _bench, *, thread: (0.5, 0.4))
    with pytest.raises(CheckFailed, match=r"after 500 ms.*after 400 ms"):
        transfers.polling(CPU)


def test_a_wrong_byte_of_a_transposition_is_seen(monkeypatch):
    by_hand = kernels._by_hand

    def spoilt(*args):
        right = bytearray(by_hand(*args))
        right[100] ^= 1
        return bytes(right)

    monkeypatch.setattr(kernels, "_by_hand", spoilt)
    with pytest.raises(CheckFailed, match=r"\d+ of .* bytes are wrong"):
        kernels.transposition(CPU)


def test_descriptors_are_counted_per_job():
    jobs = [Job([1, 2, 3], [7, 8, 9]), Job([5, 4, 9], [1, 2, 3])]
    assert counts_per_job(jobs) == [36, 3 * 36]
    figures = descriptors(CPU)
    assert figures["fresh pools"] == 36


def test_pools_that_hand_out_no_runs_are_seen(monkeypatch):
    monkeypatch.setattr(descriptors_part, "hand_out_runs", lambda pool: None)
    with pytest.raises(CheckFailed, match="descriptors on used pools and 36 on fresh"):
        descriptors(CPU)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([[1, 2, 3], [4]], None),
        ([[1, 5, 3], [4]], "prompt 0.*new token 1 on: .2, 3. and .5, 3."),
        ([[1, 2, 3], []], r"prompt 1.*new token 0 on: .4. and \[\]"),
        ([[1, 2, 3], [4, 4]], r"prompt 1.*new token 1 on: \[\] and .4."),
    ],
)
def test_where_two_servers_differ(found, said):
    difference = first_difference([[1, 2, 3], [4]], found)
    if said is None:
        assert difference is None
    else:
        assert difference is not None and re.search(said, difference), difference


@pytest.mark.parametrize(
    ("bench", "seen", "gpus"),
    [
        (Bench("cuda", "G", 1), None, ["0", "0"]),
        (Bench("cuda", "G", 2), None, ["0", "1"]),
        (Bench("cuda", "G", 2), "3,5", ["3", "5"]),
    ],
)
def test_workers_have_a_gpu_each_where_there_are_two(bench, seen, gpus, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    document = read_document(Path(graph._CONFIGS["cuda"]), graph._placement(bench))
    config = resolve(load_graph(graph._GRAPH), document)
    document.raise_mistakes()
    workers = [config.get(name) for name in ("VllmWorker", "PrefillWorker")]
    assert [str(each.env[0]["CUDA_VISIBLE_DEVICES"]) for each in workers if each] == gpus


# How parts end


@pytest.mark.parametrize(
    ("name", "outcome", "detail"),
    [
        ("good", "ok", ""),
        ("missing", "skipped", "no such library"),
        ("wrong", "FAILED", "3 of 8 bytes are wrong"),
        ("broken", "FAILED", "RuntimeError('no such device')"),
        ("gone", "FAILED", "did not come up"),
    ],
)
def test_how_a_part_ends(name, outcome, detail):
    result = run_part(part(name), CPU)
    assert (result.part, result.outcome) == (name, outcome)
    assert detail in result.detail
    assert result.figures == ({"device": "cpu"} if name == "good" else {})


def test_a_part_in_a_process_of_its_own_brings_its_figures():
    result = run_apart(part("good"), CPU)
    assert (result.outcome, result.figures) == ("ok", {"device": "cpu"})


def test_a_crash_fails_its_part_and_no_more():
    result = run_apart(part("crash"), CPU)
    assert result.outcome == "FAILED"
    assert "signal SIGSEGV" in result.detail and "about to fall" in result.detail


def test_a_part_that_hangs_is_ended():
    result = run_apart(part("hang", limit_s=1.0), CPU)
    assert (result.outcome, result.detail.strip()) == ("FAILED", "timeout after 1 s")
    assert result.seconds < 30


# What is said


def of(*outcomes: Outcome, on_device: bool = True) -> list[Result]:
    return [Result("part", outcome, on_device=on_device) for outcome in outcomes]


@pytest.mark.parametrize(
    ("results", "code"),
    [
        (of("ok", "ok"), 0),
        (of("ok", "skipped"), 0),
        (of("ok", "FAILED", "skipped"), 1),
        (of("FAILED", on_device=False), 1),
        (of("skipped", "skipped"), 2),
        (of("skipped") + of("ok", on_device=False), 2),
        (of("ok", on_device=False), 0),
        ([], 2),
    ],
)
def test_exit_codes(results, code):
    assert exit_code(results) == code


def test_the_summary_names_what_was_not_tried():
    results = [
        Result("write", "ok", figures={"GB/s": 12.3456, "to": "cuda:1"}, seconds=1.25),
        Result("graph", "skipped", "vLLM is not installed"),
    ]
    assert line(results[0]) == "write          ok         1.2 s  GB/s 12.3, to cuda:1"
    assert line(results[1]) == "graph          skipped  vLLM is not installed"
    assert summary(results) == "1 ok, 0 FAILED, 1 skipped\nnot tried: graph"
    assert json.loads(as_json({"kind": "cuda"}, results))["exit_code"] == 0


@NO_GPU
def test_without_a_gpu_it_says_so_and_tries_nothing_on_it(capsys):
    with pytest.raises(Skip, match="CUDA"):
        find_bench("cuda")
    assert check(arguments([])) == 2
    said = capsys.readouterr().out
    for each in PARTS:
        outcome = "skipped" if each.on_device else "ok"
        assert f"\n{each.name:<14} {outcome}" in said
    assert "not tried: registration, write, events" in said
    assert check(arguments(["--only", "descriptors"])) == 0


@NO_GPU
def test_the_command_prints_json():
    script = Path(__file__).parents[3] / "scripts" / "gpu_check"
    said = subprocess.run(
        [script, "--json", "--only", "write", "descriptors"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert said.returncode == 2, said.stderr
    found = json.loads(said.stdout)
    assert [result["outcome"] for result in found["results"]] == ["skipped", "ok"]
    assert found["device"]["missing"] and found["exit_code"] == 2


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--help"], 0, "exit codes: 0"),
        (["--only", "nothing"], 2, "invalid choice: 'nothing'"),
        (["--device", "tpu"], 2, "invalid choice: 'tpu'"),
    ],
)
def test_usage(args, code, said, capsys):
    with pytest.raises(SystemExit) as ended:
        arguments(args)
    assert ended.value.code == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_every_part_names_a_function_that_is_there():
    for each in PARTS:
        assert callable(getattr(import_module(each.module), each.name))
