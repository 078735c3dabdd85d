"""Revokes leases of a graph's processes: `.venv/bin/python scripts/revoke_lease.py --help`."""

import asyncio
from typing import Annotated

import typer

from dynamo_lite.cli import arguments, drain
from dynamo_lite.cli.listing import OnGraph, Place, as_table, member_rows, members, on_graph
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.store import Store

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@on_graph
def revoke_lease(
    graph: OnGraph,
    lease: drain.Lease = None,
    component: Annotated[
        str | None, typer.Option(help="Revoke the leases of all its processes.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until they are gone.")] = False,
    timeout: Annotated[float, typer.Option(help="Timeout of --wait in seconds.")] = 60.0,
) -> None:
    """Remove processes of a graph: revoke their leases, so that they drain and exit.

    Without a lease and --component it lists the live members. With --wait it returns when the
    processes' keys are gone and the processes have ended.

    Exit codes: 0: done; 1: no such lease or component, no answer from etcd, or --timeout is over;
    2: bad input.

    \b
    .venv/bin/python scripts/revoke_lease.py
    .venv/bin/python scripts/revoke_lease.py 694d9a2f3c4e8a05
    .venv/bin/python scripts/revoke_lease.py --component PrefillWorker --wait
    """
    if lease is not None and component:
        raise ConfigError(["give either a lease or --component, not both"])

    async def work(store: Store, place: Place) -> None:
        records = await members(store, place.namespace)
        if lease is None and not component:
            print(as_table(await member_rows(records, place.certificates())))
            return
        chosen = [r for r in records if r.lease_id == lease or r.component == component]
        if not chosen:
            raise StartupError(_no_match(lease, component, records))
        await drain.revoke(store, [record.lease_id for record in chosen])

        async def look() -> tuple[str, bool]:
            """Whether keys and processes are gone."""
            listed = {record.lease_id for record in await members(store, place.namespace)}
            alive = await asyncio.gather(*map(drain.lives, chosen))
            found = zip(chosen, alive, strict=True)
            left = {r.lease_id for r, lives in found if lives or r.lease_id in listed}
            return ", ".join(f"lease {lease_id:x}" for lease_id in sorted(left)) or "gone", not left

        if wait:
            await arguments.follow(look, timeout)

    graph.on_store(work)


def _no_match(lease: int | None, component: str | None, records: list[EndpointRecord]) -> str:
    if component:
        known = ", ".join(sorted({record.component for record in records})) or "none"
        return f"no live process of component {component}; live: {known}"
    known = ", ".join(sorted({f"{record.lease_id:x}" for record in records})) or "none"
    return f"no live process has lease {lease or 0:x}; live: {known}"


if __name__ == "__main__":
    arguments.run(app)
