"""`dynamo-lite sidecar` in a process of its own, in front of scripted engines."""

import asyncio
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.builders import eventually
from tests.external import Certificates
from tests.forwarding import COMPLETION, TEXT
from tests.process.command import ROOT, Serving, run
from tests.scripted import Fault, Fleet, ScriptedEngine, nixl


@contextmanager
def sidecar(*arguments: str) -> Iterator[Serving]:
    """A running one; on the way out it must be gone."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo_lite.cli.cli", "sidecar", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    running = Serving(process, Path())
    try:
        yield running
    finally:
        process.kill()
        running.end()


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    async def answers() -> bool:
        async with session.get(f"{url}/ready") as answer:
            return answer.status == 200

    await eventually(answers, 20)


async def engines(stack: AsyncExitStack) -> tuple[ScriptedEngine, ScriptedEngine]:
    fleet = Fleet()
    prefill = await stack.enter_async_context(ScriptedEngine(fleet, "prefill", nixl))
    return prefill, await stack.enter_async_context(ScriptedEngine(fleet, "decode", nixl))


async def test_it_serves_and_drains():
    async with AsyncExitStack() as stack:
        prefill, decode = await engines(stack)
        with sidecar("--decode", decode.url, "--protocol", "nixl", "--port", "0") as running:
            url = (await asyncio.to_thread(running.wait_line, "ready http")).split()[1]
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await ready(session, url)
            header = {"x-prefiller-host-port": f"127.0.0.1:{prefill.port}"}
            async with session.post(
                f"{url}/v1/completions", json=COMPLETION, headers=header
            ) as answer:
                assert (await answer.json())["choices"][0]["text"] == TEXT
            assert len(prefill.legs) == len(decode.legs) == 1
            # A stream that is open at SIGTERM is finished.
            hold = asyncio.Event()
            decode.faults.append(Fault(hold=hold))
            body = {**COMPLETION, "stream": True}
            asked = asyncio.create_task(
                session.post(f"{url}/v1/completions", json=body, headers=header)
            )
            await eventually(lambda: len(decode.legs) >= 2, 20)
            running.signal(signal.SIGTERM)
            await asyncio.to_thread(running.wait_line, "draining")
            hold.set()
            async with await asked as answer:
                assert (await answer.read()).endswith(b"[DONE]\n\n")
            assert await asyncio.to_thread(running.end) == 0
        assert decode.fleet.violations == []


async def test_a_second_signal_ends_it_at_once():
    async with AsyncExitStack() as stack:
        _, decode = await engines(stack)
        with sidecar("--decode", decode.url, "--port", "0") as running:
            url = (await asyncio.to_thread(running.wait_line, "ready http")).split()[1]
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await ready(session, url)
            decode.faults.append(Fault(hold=asyncio.Event()))
            asked = asyncio.create_task(session.post(f"{url}/v1/completions", json=COMPLETION))
            await eventually(lambda: decode.legs, 20)
            running.signal(signal.SIGTERM)
            await asyncio.to_thread(running.wait_line, "draining")
            running.signal(signal.SIGTERM)
            assert await asyncio.to_thread(running.end) == 130
            with pytest.raises(aiohttp.ClientError):
                await asked
            async with asyncio.timeout(5):
                await decode.legs[0].aborted.wait()


async def test_it_takes_llmds_command_line(certificates: Certificates, tmp_path: Path):
    folder = certificates.folder
    (tmp_path / "tls.crt").write_bytes((folder / "server.pem").read_bytes())
    (tmp_path / "tls.key").write_bytes((folder / "server-key.pem").read_bytes())
    async with AsyncExitStack() as stack:
        prefill, decode = await engines(stack)
        with sidecar(
            *("--port=0", f"--vllm-port={decode.port}", "--connector=nixlv2", "-v=4"),
            *("--secure-proxy=true", "--cert-path", str(tmp_path), "--data-parallel-size=1"),
            *("--enable-prefiller-sampling", "--max-idle-conns-per-host", "100"),
        ) as running:
            url = (await asyncio.to_thread(running.wait_line, "ready https")).split()[1]
            trusted = ssl.create_default_context(cafile=folder / "ca.pem")
            session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted))
            )
            await ready(session, url)
            header = {"x-prefiller-host-port": f"127.0.0.1:{prefill.port}"}
            async with session.post(
                f"{url}/v1/completions", json=COMPLETION, headers=header
            ) as answer:
                assert (await answer.json())["choices"][0]["text"] == TEXT
            assert len(prefill.legs) == 1
            note = next(line for line in running.output if line.startswith("note: "))
            assert "-v" in note and "--max-idle-conns-per-host" in note


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--protocol", "neuron-static"], "expected one of nixl"),
        (["--protocol", "moriio-read"], "--transfer-host"),
        (["--protocol", "moriio-read", "--transfer-host", "::"], "not that of all interfaces"),
        (["--protocol", "moriio-read", "--transfer-host", ""], "transfer-host is ''"),
        (["--decode", "ftp://x"], "expected http://HOST:PORT or https://"),
        (["--decode", "http://127.0.0.1:1", "--vllm-port", "2"], "--decode is given twice"),
        (["--allow-prefiller", "10.0.0.0/99"], "is not an address, network (CIDR) or host name"),
        (["--tls-cert", "none.pem"], "tls-cert and tls-key go together"),
        (["--tls-cert", "none.pem", "--tls-key", "none.pem"], "tls-cert=none.pem cannot be read"),
        (["--prefiller-https", "--ca-file", "none.pem"], "ca-file=none.pem cannot be read"),
        (["--secure-proxy"], "--secure-proxy needs a certificate"),
        (["--connector", "shared-storage"], "--connector shared-storage: not supported"),
        (["--ec-connector", "nixl"], "encoder disaggregation"),
        (["--enable-ssrf-protection"], "--allow-prefiller"),
        (["--vllm-port=x"], "expected a number, got 'x'"),
        (["--no-such-thing", "1"], "--no-such-thing: no such option"),
        (["left-over"], "left-over: unexpected"),
        (["--data-parallel-size", "9", "--port", "65530"], "65530 to 65538"),
    ],
)
def test_mistakes_are_named(arguments: list[str], said: str):
    ended = run("sidecar", *arguments)
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr and "Traceback" not in ended.stderr


def test_help_names_every_protocol():
    from dynamo_lite.cli.sidecar_command import PROTOCOLS
    from dynamo_lite.forward.sidecar_options import SIDECAR_PROTOCOLS

    assert PROTOCOLS == SIDECAR_PROTOCOLS
    ended = run("sidecar", "--help")
    assert ended.returncode == 0 and "x-prefiller-host-port" in ended.stdout
