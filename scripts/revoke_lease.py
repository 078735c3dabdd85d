"""Removes processes of a graph: revokes their leases, so that they drain and exit.

    .venv/bin/python scripts/revoke_lease.py                      list the live members
    .venv/bin/python scripts/revoke_lease.py 694d9a2f3c4e8a05     revoke that lease
    .venv/bin/python scripts/revoke_lease.py --component PrefillWorker [--wait]

With --wait it returns when the processes' keys are gone and the processes on this host have ended.
Exit codes: 0 done; 1 no such lease or component, no answer from etcd, or --timeout is over; 2 bad
input.
"""

import argparse
import asyncio
import os
import socket
import sys
import time
from pathlib import Path

from dynamo_lite.cli import drain
from dynamo_lite.cli.arguments import check_argument
from dynamo_lite.cli.listing import OnGraph, Place, as_table, member_rows, members
from dynamo_lite.protocol.errors import ConfigError, DynamoLiteError, StartupError
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.store import Store
from dynamo_lite.serve.child_environment import VARIABLES
from dynamo_lite.serve.processes import is_alive


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "lease", nargs="?", help="lease id in hexadecimal, as shown by `dynamo-lite ps`"
    )
    parser.add_argument("--component", help="revoke the leases of all its processes")
    parser.add_argument("--wait", action="store_true", help="wait until they are gone")
    parser.add_argument("--timeout", type=float, default=60.0, help="timeout of --wait in seconds")
    parser.add_argument(
        "--etcd-url",
        help="default: the variable DYNAMO_LITE_ETCD_URL, or that of the graph on --state-dir",
    )
    parser.add_argument(
        "--certificates",
        type=Path,
        default=os.environ.get("DYNAMO_LITE_CERTIFICATES") or None,
        help="folder with ca.pem, Operator.pem and its key; default: the variable"
        " DYNAMO_LITE_CERTIFICATES, or that of the graph on --state-dir",
    )
    parser.add_argument("--namespace", help="default: that of the graph on --state-dir, or dynamo")
    parser.add_argument("--state-dir", type=Path, default=Path(".dynamo-lite"))
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    """Raises ConfigError, StartupError or Unavailable."""
    if args.lease and args.component:
        raise ConfigError(["give either a lease or --component, not both"])
    wanted = drain.parse_lease(args.lease) if args.lease else None
    if args.etcd_url:
        check_argument("etcd-url", args.etcd_url)
    etcd_url = args.etcd_url or os.environ.get(VARIABLES["etcd-url"])
    graph = OnGraph(
        state_dir=args.state_dir,
        etcd_url=etcd_url,
        namespace=args.namespace,
        certificates=args.certificates,
    )
    graph.on_store(lambda store, place: revoke(args, wanted, store, place))


async def revoke(args: argparse.Namespace, wanted: int | None, store: Store, place: Place) -> None:
    """wanted: the given lease. Raises as `run`."""
    records = await members(store, place.namespace)
    if not args.lease and not args.component:
        print(as_table(await member_rows(records, place.certificates())))
        return
    chosen = [r for r in records if r.lease_id == wanted or r.component == args.component]
    if not chosen:
        raise StartupError(_no_match(args, records))
    await drain.revoke(store, [record.lease_id for record in chosen], print)
    if args.wait:
        await _wait_until_gone(store, place.namespace, chosen, args.timeout)
        print("gone")


async def _wait_until_gone(
    store: Store, namespace: str, chosen: list[EndpointRecord], timeout_s: float
) -> None:
    """Waits until keys, and processes of this host, are gone. Raises StartupError."""
    leases = {record.lease_id for record in chosen}
    pids = {record.pid for record in chosen if record.pid and record.host == socket.gethostname()}
    deadline = time.monotonic() + timeout_s
    while True:
        present = {record.lease_id for record in await members(store, namespace)} & leases
        running = {pid for pid in pids if is_alive(pid)}
        if not present and not running:
            return
        if time.monotonic() > deadline:
            left = [*(f"lease {lease:x}" for lease in present), *(f"pid {p}" for p in running)]
            raise StartupError(f"timeout: still there after {timeout_s:g} s: {', '.join(left)}")
        await asyncio.sleep(0.2)


def _no_match(args: argparse.Namespace, records: list[EndpointRecord]) -> str:
    if args.component:
        known = ", ".join(sorted({record.component for record in records})) or "none"
        return f"no live process of component {args.component}; live: {known}"
    known = ", ".join(sorted({f"{record.lease_id:x}" for record in records})) or "none"
    return f"no live process has lease {args.lease}; live: {known}"


def main() -> None:
    try:
        run(_arguments())
    except ConfigError as exc:
        for mistake in exc.mistakes:
            print(f"error: {mistake}", file=sys.stderr)
        sys.exit(2)
    except DynamoLiteError as exc:
        print(f"error: {exc}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
