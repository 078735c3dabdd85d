"""Whoever reads every cable of the graph's hosts learns nothing of prompts and answers."""

import json
from collections.abc import Awaitable, Callable

import msgspec

from dynamo_lite.protocol import names
from tests.hosts.ports_tried import stream_ports
from tests.hosts.rig import HTTP_PORT, NAMESPACE, SERVER_PORTS, Rig
from tests.hosts.wiretap import Wiretap

#: The beginning of the ids that vLLM's server gives to completions.
_REQUEST_ID = b"cmpl-"


async def tap_every_wire(
    rig: Rig, prompts: list[list[int]], jobs: bytes, play: Callable[[], Awaitable[None]]
) -> None:
    """While `play` runs, which must make connections to NATS and etcd. prompts: of the load. jobs:
    what all jobs of the load begin with. Raises AssertionError when a credential is on a cable, or,
    beside HTTP, what belongs to a request."""
    hosts = [*rig.server_hosts, *(program.host for program in rig.programs)]
    with Wiretap(hosts) as tap:
        await play()
        statuses = {int(rig.status_url(one).rpartition(":")[2]) for one in rig.programs}
        streams = {port for _, port in await stream_ports(rig)}
    everything = tap.of_other_ports(())
    login, secret = ((rig.directory / name).read_bytes() for name in ("login", "secret"))
    for hidden in (login.partition(b":")[2], secret.strip()):
        assert hidden not in everything, "a credential is on a cable"
    for ports in ({HTTP_PORT}, streams, *({port} for port in SERVER_PORTS)):
        assert tap.of_ports(ports), f"nothing was read of the ports {ports}"
    of_http = tap.of_ports({HTTP_PORT})
    asked = [json.dumps(prompt).encode()[1:-1] for prompt in prompts]
    assert _REQUEST_ID in of_http and any(one in of_http for one in asked), "HTTP is in plain text"
    inside = {
        "a request's id": _REQUEST_ID,
        "a job": jobs,
        "a key in etcd": names.components_prefix(NAMESPACE).encode(),
        "a subject in NATS": names.prefill_jobs_subject("jobs").encode(),
    }
    # MessagePack's header of an array this long has three bytes.
    inside |= {
        f"prompt {number}": msgspec.msgpack.encode(prompt)[3:]
        for number, prompt in enumerate(prompts)
    }
    inside |= {f"prompt {number} as text": text for number, text in enumerate(asked)}
    others = tap.of_other_ports({HTTP_PORT, *statuses})
    told = [what for what, needle in inside.items() if needle in others]
    assert not told, f"the cables tell {told}"
