"""Whoever reads every cable of the graph's hosts learns nothing of prompts and answers."""

import json
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import msgspec

from dynamo_lite.protocol import names
from tests.hosts.ports_tried import stream_ports
from tests.hosts.rig import HTTP_PORT, NAMESPACE, SERVER_PORTS, Rig
from tests.hosts.wiretap import Wiretap

#: The beginning of the ids that vLLM's server gives to completions.
_REQUEST_ID = b"cmpl-"


async def tap_every_wire(
    rig: Rig,
    prompts: Sequence[list[int]],
    hidden: Mapping[str, bytes],
    play: Callable[[], Awaitable[None]],
) -> None:
    """While `play` runs, which must make connections to NATS and etcd. prompts: of the load.
    hidden: what else of it must not be read. Raises AssertionError when a credential is on a cable,
    or, beside HTTP, what belongs to a request."""
    hosts = [*rig.server_hosts, *(program.host for program in rig.programs)]
    with Wiretap(hosts) as tap:
        await play()
        statuses = {int(rig.status_url(one).rpartition(":")[2]) for one in rig.programs}
        streams = {port for _, port in await stream_ports(rig)}
    assert not tap.lost, f"{tap.lost} packets were not read"
    for ports in ({HTTP_PORT}, streams, *({port} for port in SERVER_PORTS)):
        assert tap.of_ports(ports), f"nothing was read of the ports {ports}"
    login, secret = ((rig.directory / name).read_bytes() for name in ("login", "secret"))
    for credential in (login.partition(b":")[2], secret.strip()):
        assert credential not in tap.of_other_ports(()), "a credential is on a cable"
    written = [encoding for prompt in prompts for encoding in _encodings(prompt)]
    of_http = tap.of_ports({HTTP_PORT})
    assert _REQUEST_ID in of_http and any(one in of_http for one in written), "HTTP is not read"
    others = tap.of_other_ports({HTTP_PORT, *statuses})
    inside = {
        "a request's id": _REQUEST_ID,
        "a key in etcd": names.components_prefix(NAMESPACE).encode(),
        **hidden,
    }
    told = [what for what, needle in inside.items() if needle in others]
    assert not told and not any(one in others for one in written), f"cables tell prompts or {told}"


def _encodings(prompt: list[int]) -> Iterator[bytes]:
    """As text in two ways, and as our messages have it; each without what begins and ends it."""
    yield json.dumps(prompt).encode()[1:-1]
    yield msgspec.json.encode(prompt)[1:-1]
    yield msgspec.msgpack.encode(prompt)[3:]
    yield array("i", prompt).tobytes()
