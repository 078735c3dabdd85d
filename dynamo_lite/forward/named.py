"""Prefill engines that a client's header names: how they are read, and which hosts are accepted.

Only a sidecar reads it, and only those of its allow-list: a client that may name any host could
make this process send requests into a private network.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from multidict import CIMultiDictProxy

PREFILLER_HEADER = "x-prefiller-host-port"

#: Loopback and private networks, also those of carriers, which some clusters use for their pods.
#: Not link-local addresses: clouds serve credentials there.
PRIVATE = (
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
    *("::1/128", "fc00::/7", "localhost"),
)
#: Servers of clouds that hand out credentials, in networks that are private otherwise. Only an
#: entry for the address itself allows one.
METADATA = frozenset(
    ip_address(text) for text in ("100.100.100.200", "fd00:ec2::254", "fd20:ce::254")
)


def read_header(headers: CIMultiDictProxy[str]) -> tuple[str, ...]:
    """The prefill engines that a client has named, in its order, unchecked."""
    values = headers.getall(PREFILLER_HEADER, ())
    parts = (part.strip() for value in values for part in value.split(","))
    return tuple(part for part in parts if part)


def parse_host_port(text: str) -> tuple[str, int]:
    """`HOST:PORT`, also with `http://` or `https://` in front, which changes nothing.

    Raises ValueError.
    """
    parts = urlsplit(text if "://" in text else f"//{text}")
    host, port = parts.hostname, parts.port
    known = parts.scheme in ("", "http", "https")
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None
    # An address with a scope is a different one for every list.
    if not known or not host or not port or extra or not host.isascii() or "%" in host:
        raise ValueError("expected HOST:PORT")
    return host, port


class AllowedHosts:
    """Addresses, networks and names. Raises ValueError for one that is none of these."""

    def __init__(self, entries: Sequence[str]):
        self.entries = tuple(entries)
        self._names: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        for entry in (entry.strip().lower() for entry in entries):
            try:
                self._networks.append(ip_network(entry.strip("[]"), strict=False))
            except ValueError:
                if not entry or any(char in entry for char in "/:@ *"):
                    raise ValueError(
                        f"{entry!r} is not an address, network (CIDR) or host name"
                    ) from None
                self._names.add(entry)

    def __contains__(self, host: str) -> bool:
        """A name is not resolved: the list must contain the same name."""
        address = _address(host)
        if address is None:
            return host.lower() in self._names
        if address in METADATA and ip_network(address) not in self._networks:
            return False
        return any(address in network for network in self._networks)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """An IPv4 address inside an IPv6 address counts as the IPv4 address."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
