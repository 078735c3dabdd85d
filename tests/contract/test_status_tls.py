"""A status server over HTTPS, as members and commands ask it."""

import ssl
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.overview import fetch as fetching
from dynamo_lite.runtime.overview.fetch import fetch_health
from dynamo_lite.runtime.process.status import StatusServer
from dynamo_lite.serve.config import GraphOptions
from dynamo_lite.serve.startup_checks import check_status_tls
from tests.external import Certificates

FACTS = {"ok": True, "n": 1}


@pytest.fixture
def trusted(certificates: Certificates, monkeypatch: pytest.MonkeyPatch):
    """As another process that has the authority's file in its environment."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.folder / "ca.pem"))
    fetching._trusting.cache_clear()
    yield
    fetching._trusting.cache_clear()


async def test_who_trusts_the_authority_gets_the_facts(certificates: Certificates, trusted: None):
    cert, key = map(str, certificates.files())
    async with StatusServer(lambda: FACTS, CollectorRegistry(), tls=(cert, key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert await fetch_health(server.url) == FACTS
        assert await fetch_health(server.url.replace("https", "http")) == {}
        context = ssl.create_default_context(cafile=certificates.folder / "ca.pem")
        async with httpx.AsyncClient(verify=context) as client:
            assert (await client.get(f"{server.url}/metrics")).status_code == 200


@pytest.mark.parametrize("name", ["server", "misnamed"])
async def test_a_certificate_that_is_not_trusted_or_of_another_host_gets_no_answer(
    certificates: Certificates, name: str, request: pytest.FixtureRequest
):
    if name == "misnamed":
        request.getfixturevalue("trusted")
    cert, key = map(str, certificates.files(name))
    async with StatusServer(lambda: FACTS, CollectorRegistry(), tls=(cert, key)) as server:
        assert await fetch_health(server.url) == {}


def test_bad_files_are_refused_before_anything_starts(certificates: Certificates, tmp_path: Path):
    cert, key = map(str, certificates.files())
    check_status_tls(GraphOptions())
    check_status_tls(GraphOptions(status_tls_cert=cert, status_tls_key=key))
    for options, complaint in (
        (GraphOptions(status_tls_cert=cert), "go together; name both"),
        (GraphOptions(status_tls_cert=key, status_tls_key=cert), "are not a matching PEM pair"),
        (GraphOptions(status_tls_cert=f"{tmp_path}/x", status_tls_key=key), "x cannot be read"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            check_status_tls(options)
