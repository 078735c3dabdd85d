"""The environment of the processes that `serve` starts. Only this module reads its own."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dynamo_lite.runtime.address import is_loopback

#: Option that names a server to the variable that may be set in its place. Variables may have
#: passwords: only processes of the same user can read them.
VARIABLES: Mapping[str, str] = {
    "nats-url": "DYNAMO_LITE_NATS_URL",
    "etcd-url": "DYNAMO_LITE_ETCD_URL",
}

#: The devices that a process sees.
DEVICES = "CUDA_VISIBLE_DEVICES"

#: Set for every child unless the user's environment or YAML says otherwise.
_CHILD_DEFAULTS = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # A body of some kilobytes may hold a picture of vLLM's 179 megapixels: gigabytes here.
    "VLLM_MAX_IMAGE_PIXELS": "33554432",
    # Without this bound UCX's registration cache grows without limit; the value is vLLM's.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    # UCX receives a TCP write straight into its place. If it replaces the connection's endpoint in
    # the middle of one, as after an outage, it keeps the state and loses the buffer (1.23,
    # `uct_tcp_ep_replace_ep`): the engine's process dies. Writes as messages have no such state;
    # with larger ones they are about as fast.
    "UCX_TCP_PUT_ENABLE": "n",
    "UCX_TCP_TX_SEG_SIZE": "64k",
    # UCX connects in calls of the engine, whose requests wait for as long as the peer is cut off.
    "UCX_TCP_CONN_NB": "y",
}

#: Set, too, where the graph's processes listen on loopback: UCX opens a TCP port on every network
#: device that it may use, whether or not it uses it.
_LOOPBACK_DEFAULTS = {"UCX_NET_DEVICES": "lo"}

#: How long the kernel keeps KV that it cannot deliver over TCP, in lease times-to-live. By itself
#: it sends the data of a dead process for more than a minute. A decode engine releases the blocks
#: of a lost writer one time-to-live after the end of the writer's claim, at the earliest
#: (`disagg/attempts/ledger.py`). Until then its KV must have come, or never come.
_UNDELIVERED = 0.4


def child_environment(
    own: Mapping[str, str],
    bind_host: str = "",
    lease_ttl_s: float | None = None,
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, str]:
    """The environment of a child process: ours, our defaults, then the service's own. bind_host:
    where it listens, if it may open ports for KV. lease_ttl_s: of its lease, if it has one. flags:
    vLLM's arguments in kebab-case.

    Without the servers' URLs: engines need not have their passwords.
    """
    defaults = _CHILD_DEFAULTS | (_LOOPBACK_DEFAULTS if is_loopback(bind_host) else {})
    if lease_ttl_s is not None:
        defaults |= {"UCX_TCP_USER_TIMEOUT": f"{round(1000 * _UNDELIVERED * lease_ttl_s)}ms"}
    if flags.get("allowed-media-domains"):
        # vLLM checks the host that the client names, not those that this one redirects to.
        defaults |= {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
    merged = {**defaults, **os.environ, **own}
    return {key: value for key, value in merged.items() if key not in VARIABLES.values()}
