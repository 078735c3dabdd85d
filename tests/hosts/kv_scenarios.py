"""What happens to the hosts while real engines move KV between them."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

from dynamo_lite.protocol import names
from tests.builders import eventually
from tests.hosts.kv import AGAIN_S, Scenario, Streams, in_order, prefilled_remotely
from tests.hosts.network import Host
from tests.hosts.rig import LEASE_TTL_S, NAMESPACE, Rig

#: Longer than a lease, and shorter.
_PARTED_S, _SHORT_S = LEASE_TTL_S + 2.0, 4.0
_LOOK_S = 0.5
#: Longer than a request is under way to its Frontend.
_ARRIVES_S = 0.3
#: Answers that the clients of each Frontend get during and after a cut.
_FEW = 4

Cut = Callable[[Rig], AbstractContextManager[None]]


def _parted_for_long(cut: Cut, for_s: float = _PARTED_S) -> Scenario:
    """Longer than a lease, where no lease ends and no process."""

    async def play(rig: Rig, streams: Streams) -> None:
        before = await rig.standing()
        with cut(rig):
            await asyncio.gather(asyncio.sleep(for_s), streams.more(_FEW))
        await in_order(rig, streams)
        assert await rig.standing() == before

    return play


def _shortly(*cuts: Cut) -> Scenario:
    """One after the other: nobody ends, nobody leaves."""

    async def play(rig: Rig, streams: Streams) -> None:
        before = await rig.standing()
        for cut in cuts:
            await rig.refreshed()
            with cut(rig):
                await asyncio.sleep(_SHORT_S)
            await streams.more(1)
        assert await rig.standing() == before

    return play


def _until_gone(service: str, number: int, cut: Cut, *, remote: bool = False) -> Scenario:
    """The first so many workers lose their leases, and end. remote: prefill workers are left for
    every decode engine."""

    async def play(rig: Rig, streams: Streams) -> None:
        workers, before = rig.services[service][:number], rig.restarts
        lost = {rig.lease_of(program) for program in workers}

        async def gone() -> bool:
            await asyncio.sleep(_LOOK_S)
            ended = all(program.restarts > before[program.name] for program in workers)
            return ended and not lost & await rig.leases()

        with cut(rig):
            await eventually(gone, AGAIN_S)
            await asyncio.gather(*([prefilled_remotely(rig)] if remote else []), streams.more(_FEW))

    return play


def _until_one_is_gone(cut: Cut) -> Scenario:
    """Of the prefill workers; the other one goes on."""
    return _until_gone("PrefillWorker", 1, cut, remote=True)


async def _revoked_while_cut_off(rig: Rig, streams: Streams) -> None:
    """Its lease is revoked long before its fence closes, and it is back soon after that."""
    victim = rig.services["PrefillWorker"][0]
    lease, before = rig.lease_of(victim), rig.restarts
    with rig.unplugged(victim.host):
        await rig.revoke(lease)
        remote = prefilled_remotely(rig)
        await asyncio.gather(asyncio.sleep(_PARTED_S), remote, streams.more(_FEW))
    await eventually(lambda: victim.restarts > before[victim.name], AGAIN_S)
    await streams.more(_FEW)


async def _rolling_restart(rig: Rig, streams: Streams) -> None:
    """Every server, then every worker and Frontend, in order."""
    await rig.servers_restarted(names.prefill_stream(NAMESPACE))
    for worker in (*rig.services["PrefillWorker"], *rig.services["VllmWorker"]):
        await worker.restart()
    for number, frontend in enumerate(rig.services["Frontend"]):
        with streams.elsewhere(number):
            await asyncio.sleep(_ARRIVES_S)
            await frontend.restart()
        await streams.more(_FEW)


def _hosts(rig: Rig, service: str) -> list[Host]:
    return [program.host for program in rig.services[service]]


def _decode(rig: Rig) -> list[Host]:
    return _hosts(rig, "VllmWorker")


def _prefill(rig: Rig) -> list[Host]:
    return _hosts(rig, "PrefillWorker")


def _parted(rig: Rig) -> AbstractContextManager[None]:
    return rig.parted(_decode(rig), _prefill(rig))


def _one_parted(rig: Rig) -> AbstractContextManager[None]:
    return rig.parted(_decode(rig)[:1], _prefill(rig)[:1])


def _decode_hears_no_prefill(rig: Rig) -> AbstractContextManager[None]:
    return rig.deaf(_decode(rig), _prefill(rig))


def _prefill_hears_no_decode(rig: Rig) -> AbstractContextManager[None]:
    return rig.deaf(_prefill(rig), _decode(rig))


SCENARIOS: dict[str, Scenario] = {
    "one-decode-parted-from-one-prefill": _parted_for_long(_one_parted),
    "decode-parted-from-prefill-shortly": _shortly(
        _parted, _decode_hears_no_prefill, _prefill_hears_no_decode
    ),
    "decode-parted-from-prefill": _parted_for_long(_parted),
    "decode-hears-no-prefill": _parted_for_long(_decode_hears_no_prefill),
    "prefill-hears-no-decode-for-long": _parted_for_long(_prefill_hears_no_decode, 2 * _PARTED_S),
    "prefill-parted-from-servers": _until_gone(
        "PrefillWorker", 2, lambda rig: rig.parted(_prefill(rig), rig.server_hosts)
    ),
    "decode-parted-from-servers": _until_gone(
        "VllmWorker", 1, lambda rig: rig.parted(_decode(rig)[:1], rig.server_hosts)
    ),
    "prefill-hears-no-server": _until_one_is_gone(
        lambda rig: rig.deaf(_prefill(rig)[:1], rig.server_hosts)
    ),
    "workers-parted-from-nats": _parted_for_long(
        lambda rig: rig.parted([_decode(rig)[0], _prefill(rig)[0]], rig.nats_hosts)
    ),
    "prefill-host-vanishes": _until_one_is_gone(lambda rig: rig.unplugged(_prefill(rig)[0])),
    "prefill-host-vanishes-and-is-revoked": _revoked_while_cut_off,
    "decode-host-vanishes": _until_gone(
        "VllmWorker", 1, lambda rig: rig.unplugged(_decode(rig)[0])
    ),
    "rolling-restart": _rolling_restart,
}
