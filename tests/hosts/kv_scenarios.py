"""What happens to the hosts between which KV goes."""

from tests.hosts.network import Host
from tests.hosts.scenarios import Scenario, Stage


def _hosts(stage: Stage, service: str) -> list[Host]:
    return [program.host for program in stage.rig.services[service]]


async def decode_parted_from_prefill(stage: Stage) -> None:
    with stage.rig.parted(_hosts(stage, "VllmWorker"), _hosts(stage, "PrefillWorker")):
        await stage.outlast_lease()
        await stage.goes_on()


async def decode_hears_no_prefill(stage: Stage) -> None:
    with stage.rig.deaf(_hosts(stage, "VllmWorker"), _hosts(stage, "PrefillWorker")):
        await stage.outlast_lease()
        await stage.goes_on()


async def prefill_hears_no_decode(stage: Stage) -> None:
    with stage.rig.deaf(_hosts(stage, "PrefillWorker"), _hosts(stage, "VllmWorker")):
        await stage.outlast_lease()
        await stage.goes_on()


async def prefill_parted_from_servers(stage: Stage) -> None:
    """One of the prefill workers."""
    with stage.rig.parted(_hosts(stage, "PrefillWorker")[:1], stage.rig.server_hosts):
        await stage.outlast_lease()
        await stage.goes_on()


async def prefill_host_vanishes(stage: Stage) -> None:
    """One of the prefill workers."""
    with stage.rig.unplugged(_hosts(stage, "PrefillWorker")[0]):
        await stage.outlast_lease()
        await stage.goes_on()


KV_SCENARIOS: dict[str, Scenario] = {
    scenario.__name__.replace("_", "-"): scenario
    for scenario in (
        decode_parted_from_prefill,
        decode_hears_no_prefill,
        prefill_hears_no_decode,
        prefill_parted_from_servers,
        prefill_host_vanishes,
    )
}
