"""`dynamo-lite drain`, on decode workers with null engines under load."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.process.command import Serving, eventually, invoke, results, run, serving

DECODING = "tests.process.fleet_graph:Decoding"
PREFILLING = "tests.process.fleet_graph:Prefilling"


def ready(graph: Serving) -> dict[str, dict[str, Any]]:
    return {name: p for name, p in graph.processes().items() if p["state"] == "ready"}


def phases(output: str) -> list[str]:
    """The words after the time of each line of progress."""
    return re.findall(r"^ *\d+\.\ds +([A-Z]+)", output, re.MULTILINE)


@pytest.mark.heavy
@pytest.mark.parametrize("grace_s", [60, 0.5])
def test_a_decode_worker_is_drained_under_load_and_no_answer_changes(
    tmp_path: Path, grace_s: float
):
    """It finishes its requests of four seconds. Beyond its grace they go on elsewhere."""
    answers, state = tmp_path / "answers", tmp_path / "state"
    load = (f"--Caller.results={answers}", "--Caller.requests=6", "--Caller.tokens=200")
    options = ("--VllmWorker.ServiceArgs.workers=3", f"--Graph.grace-s={grace_s}")
    with serving(state, *load, *options, graph=DECODING, until="ready Caller-0") as graph:
        eventually(lambda: len(results(answers)) >= 6, "some answers have ended", timeout_s=120)
        dry = run("drain", "--pick", "VllmWorker", "--dry-run", "--state-dir", str(state))
        assert dry.returncode == 0, dry.stderr
        assert "dry run: nothing was revoked" in dry.stdout
        assert dry.stdout.count("\n->") == 1 and dry.stdout.count(" ready ") == 3
        assert len(ready(graph)) == 4
        # All began at the same time, and have the same length.
        ended = len(results(answers)) // 6 * 6
        eventually(lambda: len(results(answers)) >= ended + 6, "others begin", timeout_s=120)
        done = run("drain", "--pick", "VllmWorker", "--state-dir", str(state))
        seen = phases(done.stdout)
        # Its end may come before the next look, so that FORCED is not seen.
        assert done.returncode == (3 if "FORCED" in seen else 0), done.stderr
        assert grace_s < 1 or "FORCED" not in seen
        assert seen[:2] == ["UNLISTED", "DRAINING"] and seen[-1] == "GONE"
        assert "SAFE" not in seen or "DRAINING" not in seen[seen.index("SAFE") :]
        assert len(ready(graph)) == 3
        before = len(results(answers))
        eventually(lambda: len(results(answers)) >= before + 6, "all go on", timeout_s=120)
        answered = results(answers)
        assert [one for one in answered if not one["exact"] or one["end"] != "length"] == []
        assert graph.end(signal.SIGINT) == 0
        text = (state / "logs" / "Caller-0.log").read_text()
        assert ("migrating it (continue)" in text) is (grace_s < 1)


def test_the_last_worker_stays_unless_it_is_forced(tmp_path: Path):
    with serving(tmp_path, "--Caller.requests=0", graph=DECODING, until="ready Caller-0") as graph:
        lease = graph.processes()["VllmWorker-0"]["lease"]
        where, last = ("--state-dir", str(tmp_path)), "no other worker of this role could work"
        for arguments, message in (
            (("--pick", "VllmWorker"), f"{last}; --force drains it"),
            ((lease,), f"{lease} is the last VllmWorker that can work; --force drains it"),
            (("--pick", "Caller"), "--pick Caller: accepted: PrefillWorker, VllmWorker"),
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
        chosen = invoke(*pick, "--no-wait", "--json")
        assert chosen.returncode == 0, chosen.stderr
        lease = graph.processes()["PrefillWorker-0"]["lease"]
        assert json.loads(chosen.stdout) == {
            "component": "PrefillWorker",
            "lease": lease,
            "host": os.uname().nodename,
            "reason": "least busy of 3: 1 in flight",
        }
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
