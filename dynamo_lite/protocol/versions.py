"""Which versions may work together, and the sentences that refuse the others.

Processes of different releases of dynamo-lite work together while they have the same
`WIRE_VERSION`. It is checked once for each member and connection, and in jobs. A process is no
member to one of another version, which neither sends it messages nor takes its own.
"""

from dynamo_lite import __version__
from dynamo_lite.protocol.codec import WIRE_VERSION
from dynamo_lite.protocol.records import EndpointRecord


def unsupported(wire_version: int) -> str:
    """Why a connection or a job of this version is refused."""
    return f"unsupported wire version {wire_version}: this process has {WIRE_VERSION}"


def misfit(record: EndpointRecord) -> str:
    """Why this process and the member cannot work together; empty when they can."""
    if record.wire_version == WIRE_VERSION:
        return ""
    return (
        f"{record.component} {record.lease_id:x} on {record.host or 'an unknown host'} runs"
        f" dynamo-lite {record.version or 'of an unknown version'} (wire version"
        f" {record.wire_version}), and this is {__version__} (wire version {WIRE_VERSION})"
    )
