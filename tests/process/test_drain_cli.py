"""`dynamo-lite drain`, on decode workers with null engines under load."""

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.builders import eventually
from tests.chaos.load import Load
from tests.hosts.load import told_questions
from tests.process.command import Serving, invoke, run, serving
from tests.started import VLLM_PATIENCE_S

PREFILLING = "tests.process.roles_graph:Prefilling"
SERVED = "tests.process.roles_graph:Served"
WORKERS = "tests.process.roles_graph:Workers"


def ready(graph: Serving) -> dict[str, dict[str, Any]]:
    return {name: p for name, p in graph.processes().items() if p["state"] == "ready"}


def phases(output: str) -> list[str]:
    """The words after the time of each line of progress."""
    return re.findall(r"^ *\d+\.\ds +([A-Z]+)", output, re.MULTILINE)


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("grace_s", "step_s"), [(60, 0.02), (0.5, 0.04)])
async def test_a_decode_worker_is_drained_under_load_and_no_answer_changes(
    tmp_path: Path, grace_s: float, step_s: float
):
    """It finishes its requests of four seconds. Beyond its grace those of eight go on elsewhere:
    they last longer than the command may need to start."""
    options = ("-f", "configs/agg.yaml", "--Frontend.port=0", f"--VllmWorker.step-s={step_s}")
    workers = ("--VllmWorker.ServiceArgs.workers=3", f"--Graph.grace-s={grace_s}")
    pick = ("drain", "--pick", "VllmWorker", "--state-dir", str(tmp_path))
    with serving(tmp_path, *options, *workers, graph=SERVED) as graph:
        url = graph.wait_line("ready http", VLLM_PATIENCE_S).split()[1]
        port, known = int(url.rpartition(":")[2]), told_questions([200] * 20)
        async with Load(port, *known, clients=6, pause_s=0.0, cancels=0.0) as load:

            async def answers(count: int) -> None:
                """These are all right."""
                await eventually(lambda: load.tally.right >= count, 120)
                assert not (load.tally.wrong or load.tally.lost or load.tally.refused), load.tally

            await answers(6)
            dry = await asyncio.to_thread(run, *pick, "--dry-run")
            assert dry.returncode == 0, dry.stderr
            assert "dry run: nothing was revoked" in dry.stdout
            assert dry.stdout.count("\n->") == 1 and dry.stdout.count(" ready ") == 3
            assert len(ready(graph)) == 5
            # All began at the same time, and have the same length.
            await answers(load.tally.right // 6 * 6 + 6)
            done = await asyncio.to_thread(run, *pick)
            seen = phases(done.stdout)
            # Its end may come before the next look, so that FORCED is not seen.
            assert done.returncode == (3 if "FORCED" in seen else 0), done.stderr
            assert grace_s < 1 or "FORCED" not in seen
            assert seen[0] == "DRAINING" and seen[-1] == "GONE"
            assert "SAFE" not in seen or "DRAINING" not in seen[seen.index("SAFE") :]
            assert len(ready(graph)) == 4
            await answers(load.tally.right + 6)
            load.stop()
            assert await asyncio.to_thread(graph.end, signal.SIGINT) == 0
        text = (tmp_path / "logs" / "Frontend-0.log").read_text()
        assert ("migrating it (continue)" in text) is (grace_s < 1)


def test_the_last_worker_stays_unless_it_is_forced(tmp_path: Path):
    with serving(tmp_path, graph=WORKERS, until="ready VllmWorker-0") as graph:
        graph.when("PrefillWorker-0", lambda p: p["state"] == "ready")
        lease = graph.processes()["VllmWorker-0"]["lease"]
        where, last = ("--state-dir", str(tmp_path)), "no other worker of this role could work"
        for arguments, message in (
            (("--pick", "VllmWorker"), f"{last}; --force drains it"),
            ((lease,), f"{last}; --force drains it"),
            (("--pick", "Frontend"), "--pick Frontend: accepted: PrefillWorker, VllmWorker"),
            ((), "give either LEASE or --pick COMPONENT"),
            (("no lease",), "no lease: not a lease id"),
        ):
            refused = invoke("drain", *arguments, *where)
            assert refused.returncode == 2, refused.stdout
            assert message in refused.stderr
        unknown = invoke("drain", "1234", *where)
        assert unknown.returncode == 1
        assert "no live process has lease 1234; live: " in unknown.stderr
        assert len(ready(graph)) == 2
        forced = invoke("drain", lease, "--force", *where)
        assert forced.returncode == 0, forced.stderr
        assert phases(forced.stdout)[-1] == "GONE"
        stopped = graph.when("VllmWorker-0", lambda p: p["state"] == "stopped")
        assert stopped["restarts"] == 0


def test_the_least_busy_prefill_worker_goes_when_its_jobs_are_done(tmp_path: Path):
    facts, state = tmp_path / "facts", tmp_path / "state"
    facts.mkdir()

    def tell(number: int, jobs: int) -> None:
        file = facts / "new"
        file.write_text(json.dumps({"jobs": jobs}))
        file.replace(facts / f"{number}.json")

    for number, jobs in enumerate((1, 2, 4)):
        tell(number, jobs)
    options = (f"--PrefillWorker.facts={facts}", "--PrefillWorker.ServiceArgs.workers=3")
    with serving(state, *options, "--Graph.grace-s=1", graph=PREFILLING) as graph:
        graph.wait_line("ready PrefillWorker-0")
        pick = ("drain", "--pick", "PrefillWorker", "--state-dir", str(state))
        chosen = invoke(*pick, "--no-wait")
        assert chosen.returncode == 0, chosen.stderr
        lease = graph.processes()["PrefillWorker-0"]["lease"]
        assert f"PrefillWorker {lease}: least busy of 3: 1 in flight" in chosen.stdout.splitlines()
        tell(0, 0)
        graph.when("PrefillWorker-0", lambda p: p["state"] == "stopped")
        # This one does not end within its grace.
        late = invoke(*pick)
        assert late.returncode == 3, late.stderr
        assert phases(late.stdout)[-2:] == ["FORCED", "GONE"]
        assert set(ready(graph)) == {"PrefillWorker-2"}
        tell(2, 0)


def test_scaling_down_removes_the_least_busy_of_this_supervisor(tmp_path: Path):
    facts, state = tmp_path / "facts", tmp_path / "state"
    facts.mkdir()
    for number, jobs in enumerate((3, 0, 9)):
        (facts / f"{number}.json").write_text(json.dumps({"jobs": jobs}))
    options = (f"--PrefillWorker.facts={facts}", "--PrefillWorker.ServiceArgs.workers=3")
    with serving(state, *options, graph=PREFILLING, until="ready PrefillWorker-0") as graph:
        done = run("scale", "PrefillWorker=2", "--state-dir", str(state))
        assert done.returncode == 0, done.stderr
        assert "least busy of 3: 0 in flight" in done.stdout
        assert set(ready(graph)) == {"PrefillWorker-0", "PrefillWorker-2"}
        for file in facts.iterdir():
            file.unlink()
