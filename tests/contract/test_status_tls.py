"""A status server over HTTPS: who may read what, and what members and commands make of it."""

import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.runtime.overview.fetch import fetch, fetch_health
from dynamo_lite.runtime.process.status import StatusServer
from tests.certificate_folders import graph_folder, of

FACTS = {"ok": True, "n": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return graph_folder(tmp_path / "certificates")


@pytest.fixture
async def url(folder: Path) -> AsyncIterator[str]:
    async with StatusServer(
        lambda: FACTS,
        CollectorRegistry(),
        probes={"/live": lambda: {"ok": True}, "/ready": lambda: {"ok": True}},
        vllm_registry=CollectorRegistry(),
        certificates=of(folder, "VllmWorker"),
    ) as server:
        yield server.url


def client_of(certificates: object = None) -> httpx.AsyncClient:
    """A client that takes every server. certificates: those of a component."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificates is not None:
        context.load_cert_chain(certificates.files.cert, certificates.files.key)  # type: ignore[attr-defined]
    return httpx.AsyncClient(verify=context)


@pytest.mark.parametrize("name", ["Operator", "Frontend", "Planner", "PrefillWorker"])
async def test_a_component_reads_everything(folder: Path, url: str, name: str):
    assert url.startswith("https://127.0.0.1:")
    own = of(folder, name)
    assert await fetch_health(url, own) == FACTS
    assert await fetch(f"{url}/metrics", own) == b""
    assert await fetch(f"{url}/metrics/vllm", own) == b""


async def test_probes_need_no_certificate_and_the_rest_does(folder: Path, url: str):
    async with client_of() as client:
        for path in ("/live", "/ready", "/health"):
            assert (await client.get(f"{url}{path}")).status_code == 200
        for path in ("/metrics", "/metrics/vllm"):
            answer = await client.get(f"{url}{path}")
            assert answer.status_code == 403
            assert answer.json() == {
                "error": "only for the graph's components: it shows no certificate"
            }
    async with client_of(of(folder, "Operator")) as client:
        assert (await client.get(f"{url}/metrics")).status_code == 200


async def test_a_certificate_of_another_graph_opens_nothing(folder: Path, url: str, tmp_path: Path):
    other = graph_folder(tmp_path / "other")
    async with client_of(of(other, "Operator")) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"{url}/health")
    # Of the same authority, but of another namespace.
    (folder / "n2").mkdir()
    for key in ("ca.pem", "ca-key.pem"):
        shutil.copy(folder / key, folder / "n2" / key)
    graph_folder(folder / "n2", "n2")
    async with client_of(of(folder / "n2", "Operator", "n2")) as client:
        assert (await client.get(f"{url}/live")).status_code == 200
        assert (await client.get(f"{url}/metrics")).status_code == 403


async def test_who_asks_believes_only_a_component_of_its_graph(
    folder: Path, url: str, tmp_path: Path
):
    assert await fetch_health(url, of(folder, "Operator")) == FACTS
    assert await fetch_health(url) == {}
    assert await fetch_health(url.replace("https", "http"), of(folder, "Operator")) == {}
    other = of(graph_folder(tmp_path / "other", "n2"), "Operator", "n2")
    assert await fetch_health(url, other) == {}
