"""What a running graph shows of itself: etcd's listing, its processes, its needs at rest."""

import json
import os
import subprocess
import time
from pathlib import Path

import httpx
import psutil
import pytest

from dynamo_lite.runtime.address import is_loopback
from dynamo_lite.serve.embedded import etcd_environment, program
from tests.vllm.asking import ask
from tests.vllm.graph import Graph

pytestmark = pytest.mark.timeout(300)

GIB = 1 << 30
IDLE_S = 5.0
#: Neighbours on the machine make work look like more, but not in each span.
IDLE_SPANS = 3
#: Share of one core that a process of an idle graph may use.
IDLE_SHARE = 0.05


def etcdctl(url: str, *args: str) -> str:
    done = subprocess.run(
        [program("etcdctl"), *args],
        env={**os.environ, **etcd_environment(url)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout


def listing(graph: Graph) -> dict[str, dict]:
    lines = etcdctl(graph.etcd_url, "get", "--prefix", "dynamo").splitlines()
    return {key: json.loads(value) for key, value in zip(lines[::2], lines[1::2], strict=True)}


def test_etcdctl_shows_every_endpoint_under_its_lease(disagg: Graph):
    found = {k: v for k, v in listing(disagg).items() if k.startswith("dynamo/components/")}
    lease = {p.service: p.lease for p in disagg.processes()}
    assert set(found) == {
        f"dynamo/components/Frontend/http:{lease['Frontend']}",
        f"dynamo/components/PrefillWorker/prefill:{lease['PrefillWorker']}",
        f"dynamo/components/Processor/chat/completions:{lease['Frontend']}",
        f"dynamo/components/Processor/completions:{lease['Frontend']}",
        f"dynamo/components/VllmWorker/generate:{lease['VllmWorker']}",
        f"dynamo/components/VllmWorker/load_metrics:{lease['VllmWorker']}",
    }
    for key, record in found.items():
        path, _, hex_lease = key.rpartition(":")
        _, _, component, endpoint = path.split("/", 3)
        assert record["component"] == component and record["endpoint"] == endpoint
        assert record["namespace"] == "dynamo"
        assert f"{record['lease_id']:x}" == hex_lease
        subject = record["transport"]["nats_tcp"]
        assert subject.startswith(f"dynamo_{component.lower()}_")
        assert subject.endswith(f".{endpoint}-{hex_lease}")


def test_etcdctl_shows_the_nixl_metadata(disagg: Graph):
    """The decode engine's memory; prefill engines are not written into."""
    (engine,) = [v for k, v in listing(disagg).items() if k.startswith("dynamo/nixl_metadata/")]
    assert f"{engine['lease_id']:x}" == disagg.process("VllmWorker").lease
    assert engine["num_blocks"] > 0 and len(engine["ranks"]) == 1
    # A decode engine waits for the last write of a lost writer by its own time-to-live.
    assert float(engine["fingerprint"]["lease_ttl_s"]) >= 1


def test_every_process_serves_health_and_metrics_where_etcd_says(disagg: Graph):
    urls = {v["status_url"] for k, v in listing(disagg).items() if "/components/" in k}
    assert len(urls) == 3
    for url in urls:
        health = httpx.get(f"{url}/health", timeout=10)
        assert health.status_code == 200 and health.json()["ok"]
        assert "process_cpu_seconds_total" in httpx.get(f"{url}/metrics", timeout=10).text
    for url in (*urls, disagg.url):
        for path in ("live", "ready"):
            probe = httpx.get(f"{url}/{path}", timeout=10)
            assert probe.status_code == 200, probe.text
            assert all(check["ok"] for check in probe.json()["checks"].values())
    assert "workers" in httpx.get(f"{disagg.url}/ready", timeout=10).json()["checks"]
    assert httpx.get(f"{disagg.url}/health", timeout=10).content == b"", "vLLM's own"


def test_every_port_is_on_loopback(disagg: Graph):
    """Also those of the engines and of UCX."""
    listening = {
        (psutil.Process(pid).name(), connection.laddr.ip)
        for pid in (disagg.pid, *disagg.descendants())
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {"nats-server", "etcd"} < {name for name, _ in listening}
    engines = [disagg.engine_pid(name) for name in ("VllmWorker", "PrefillWorker")]
    assert all(psutil.Process(pid).net_connections(kind="inet") for pid in engines)
    assert {name for name, ip in listening if not is_loopback(ip)} == set()


def test_an_idle_graph_is_small_and_quiet(disagg: Graph):
    """After work, too: nothing spins and nothing keeps stepping."""
    ask(disagg.url, "completions", {"prompt": "warm", "max_tokens": 4})
    family = [disagg.pid, *disagg.descendants()]
    # Forked processes share pages: each counts its part of them.
    resident = sum(psutil.Process(pid).memory_full_info().pss for pid in family)
    assert resident <= 4 * GIB, f"{resident / GIB:.2f} GiB in {len(family)} processes"
    shares: dict[str, float] = {}
    for _ in range(IDLE_SPANS):
        before = {pid: _cpu_s(pid) for pid in family}
        time.sleep(IDLE_S)  # the measurement itself
        shares = {_name(pid): (_cpu_s(pid) - before[pid]) / IDLE_S for pid in family}
        if max(shares.values()) <= IDLE_SHARE:
            break
    assert max(shares.values()) <= IDLE_SHARE, shares


def _cpu_s(pid: int) -> float:
    """CPU time of all threads, finished ones too; the children's not."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _name(pid: int) -> str:
    return f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}"
