"""Which secret a command seals records with, and when it may write without one."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from dynamo_lite.cli.listing import Place
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.sealed_records import RecordSeals, is_sealed
from dynamo_lite.runtime.store import Store
from dynamo_lite.serve.run_state import read_run
from dynamo_lite.serve.secret_file import running_secret

_HINT = "name it with --secret-file FILE, or its graph's --state-dir"


def find_seals(state_dir: Path, place: Place, secret_file: Path | None) -> RecordSeals:
    """Takes the flag, or else the secret of the running graph of `state_dir`, if it is the one at
    `place`. Raises StartupError for a secret file that cannot be used."""
    running = read_run(state_dir)
    if running is not None and running.namespace != place.namespace:
        running = None
    return RecordSeals.of_file(secret_file or running_secret(running, place.etcd_url))


def unchecked(members: Iterable[EndpointRecord], seals: RecordSeals) -> str:
    """What is to be said where the processes have a secret and this command has none."""
    if seals.checked or not any(member.authenticated for member in members):
        return ""
    return f"the seals of the records were not checked: this graph has a secret; {_HINT}"


async def check_may_write(
    store: Store,
    keys: Sequence[str],
    members: Iterable[EndpointRecord],
    seals: RecordSeals,
) -> None:
    """Raises StartupError where the processes would ignore what is written at `keys` without a
    secret.

    Where no process is alive, a sealed record shows that the graph has a secret.
    """
    if seals.checked:
        return
    # A process beside a stock engine reads no sealed records.
    ours = [member for member in members if member.engine is None]
    if any(member.authenticated for member in ours):
        raise StartupError(f"nothing was changed: this graph has a secret; {_HINT}")
    for key in () if ours else keys:
        data = await store.get(key)
        if data is not None and is_sealed(data):
            raise StartupError(f"nothing was changed: {key} is sealed with a secret; {_HINT}")
