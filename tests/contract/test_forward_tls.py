"""HTTPS between clients, a Forwarder and its engines."""

import logging
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.tls import server_context
from tests.external import Certificates
from tests.forwarding import TEXT, rig

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


def trusting(certificates: Certificates, name: str = "ca") -> dict[str, Any]:
    return {"ca_file": str(certificates.folder / f"{name}.pem")}


@pytest.mark.parametrize("name", ["nixl", "nixl-push", "sglang"])
async def test_both_sides_speak_https(certificates: Certificates, name: str):
    async with rig(name, https=certificates, trust=trusting(certificates)) as r:
        assert r.url.startswith("https://")
        for _ in range(2):
            assert await r.text() == TEXT
        assert (await r.stream()).endswith(b"data: [DONE]\n\n")
        assert r.answered == {("disaggregated", ""): 3}


async def test_an_engine_whose_certificate_is_not_trusted_gets_nothing(certificates: Certificates):
    for trust in (trusting(certificates, "stranger"), {}):
        async with rig(https=certificates, trust=trust) as r:
            status, _ = await r.ask()
            assert status == 503
            assert r.fleet.legs == []
            assert "certificate" in r.engines[0].trouble.lower()


async def test_a_certificate_for_another_name_is_refused(certificates: Certificates):
    async with rig(https=certificates, trust=trusting(certificates)) as r:
        await r.decode[0].stop()
        r.decode[0].tls = server_context(*certificates.files("misnamed"))
        await r.decode[0].start()
        for _ in range(2):
            await r.check()
        assert not r.engines[1].usable and "127.0.0.1" in r.engines[1].trouble


async def test_clients_without_tls_are_not_served(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    async with rig(https=certificates, trust=trusting(certificates)) as r:
        async with aiohttp.ClientSession() as plain:
            with pytest.raises(aiohttp.ClientError):
                await plain.get(r.url.replace("https:", "http:") + "/health")
        assert await r.text() == TEXT
    assert caplog.records == []
    assert server_context(*certificates.files()).minimum_version >= ssl.TLSVersion.TLSv1_2


def test_unusable_files_are_named(certificates: Certificates, tmp_path: Path):
    cert, key = certificates.files()
    other = certificates.files("client")[1]
    missing = tmp_path / "none.pem"
    for pair, said in (
        ((missing, key), f"tls-cert={missing} cannot be read"),
        ((cert, missing), f"tls-key={missing} cannot be read"),
        ((cert, other), "are not a matching PEM pair"),
        ((key, key), "are not a matching PEM pair"),
    ):
        with pytest.raises(ConfigError, match=said):
            server_context(*pair)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "http://h:1", "ca_file": "x"}, "https://"),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        EngineOptions(role="decode", **options)


def test_a_certificate_needs_its_key():
    with pytest.raises(ValueError, match="go together"):
        ForwarderConfig(
            engines=(EngineOptions(url="http://h:1", role="decode"),), tls_cert="cert.pem"
        )
