"""A stranger tries every NATS subject of the graph on the hosts, and its keys in etcd.

With no credentials, with those of another graph's decode worker, and with the graph's own but
without its secret.
"""

import asyncio
import subprocess
import sys

import httpx
import msgspec
import pytest

from dynamo_lite.cli.access import user_of
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.permissions import inbox_of
from dynamo_lite.runtime.etcd.store import EtcdStore
from tests.builders import eventually
from tests.foreign import Heard, Try, subjects
from tests.hosts.rig import FOREIGN_USER, NAMESPACE, Rig
from tests.least_rights import FOREIGN
from tests.process.command import ROOT

_TRIED_S = 200.0
_LATE_S = 30.0


async def try_every_subject(rig: Rig) -> None:
    """Raises AssertionError when it hears, is answered or records anything, ends a process, or
    when a message without the secret is not counted."""
    before, counted = restarts(rig), await dropped(rig, "unauthentic")
    everything = subjects(NAMESPACE, await _ids(rig))
    assert len(everything) > 20 * len(rig.programs), everything
    [server] = [rig.nats.members[name].url for name in sorted(rig.nats.members)[:1]]
    login, password = (rig.directory / "login").read_text().split(":")
    foreign = user_of(FOREIGN, FOREIGN_USER)
    authority = str(rig.directory / "certificates" / "ca.pem")
    common = {"url": server, "ca": authority, "namespace": NAMESPACE, "subjects": everything}
    nobody = Try(**common)
    another = Try(
        **common,
        user=foreign,
        password=password,
        inbox=inbox_of(foreign),
        records=names.prefill_stream(FOREIGN),
    )
    without_secret = Try(**common, user=login, password=password, listens=False)
    heard = await asyncio.to_thread(_heard, rig, [nobody, another, without_secret])
    assert heard == [Heard(refused=True), Heard(), Heard()], heard

    async def noticed() -> bool:
        return await dropped(rig, "unauthentic") >= counted + len(rig.programs)

    await eventually(noticed, _LATE_S)
    with pytest.raises(StartupError):
        url = rig.etcd.url.partition("?")[0] + f"?ca={authority}"
        async with EtcdStore(url, connect_timeout_s=3.0):
            pass
    assert restarts(rig) == before


async def dropped(rig: Rig, where: str) -> float:
    """Messages that the graph's processes have dropped there."""
    total = 0.0
    async with httpx.AsyncClient(timeout=30.0) as client:
        for program in rig.programs:
            page = (await client.get(f"{rig.status_url(program)}/metrics")).text
            for line in page.splitlines():
                if line.startswith(f'dynamo_lite_dropped_messages_total{{where="{where}"}}'):
                    total += float(line.split()[-1])
    return total


def restarts(rig: Rig) -> dict[str, int]:
    return {program.name: program.restarts for program in rig.programs}


async def _ids(rig: Rig) -> set[str]:
    """What differs between the subjects of two processes."""
    async with EtcdStore(rig.etcd.url) as store:
        engines = await store.get_prefix(names.nixl_metadata_prefix(NAMESPACE))
    members = await rig.members()
    return {
        *(f"{member.lease_id:x}" for member in members),
        *(member.transport.nats_tcp.rpartition(".")[2] for member in members),
        *(key.rpartition("/")[2] for key in engines),
    }


def _heard(rig: Rig, wanted: list[Try]) -> list[Heard]:
    arguments = [msgspec.json.encode(one).decode() for one in wanted]
    command = [sys.executable, "-m", "tests.foreign", *arguments]
    process = rig.stranger.start(command, subprocess.PIPE, cwd=ROOT)
    said, _ = process.communicate(timeout=_TRIED_S)
    return [msgspec.json.decode(line, type=Heard) for line in said.splitlines()]
