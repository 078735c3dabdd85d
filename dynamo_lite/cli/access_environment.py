"""Variables with which etcdctl and the `nats` command reach a graph's servers."""

import shlex
from collections.abc import Mapping

from dynamo_lite.runtime.address import ServerAddress, host_port, parse_etcd_url, parse_nats_url


def etcd_environment(url: str) -> dict[str, str]:
    """Of `etcdctl`, and of the commands of `dynamo-lite`. Raises ConfigError for a bad URL."""
    address = parse_etcd_url(url)
    found = {"DYNAMO_LITE_ETCD_URL": url, "ETCDCTL_API": "3"}
    found["ETCDCTL_ENDPOINTS"] = _servers(address, "https" if address.tls else "http")
    if address.user is not None:
        found |= {"ETCDCTL_USER": address.user, "ETCDCTL_PASSWORD": address.password or ""}
    return found | _tls_files(address, ("ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"))


def nats_environment(url: str) -> dict[str, str]:
    """Of `nats`, and of the commands of `dynamo-lite`. Raises ConfigError for a bad URL."""
    address = parse_nats_url(url)
    found = {"DYNAMO_LITE_NATS_URL": url}
    found["NATS_URL"] = _servers(address, "tls" if address.tls else "nats")
    named = {
        # That command takes a user without a password as a token.
        "NATS_USER": address.user or address.token,
        "NATS_PASSWORD": address.password,
        "NATS_CREDS": address.creds,
        "NATS_NKEY": address.nkey,
        "NATS_INBOX_PREFIX": address.inbox,
    }
    found |= {name: str(value) for name, value in named.items() if value}
    return found | _tls_files(address, ("NATS_CA", "NATS_CERT", "NATS_KEY"))


def as_shell(variables: Mapping[str, str]) -> str:
    """A line for each, to be evaluated by a shell."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


def _servers(address: ServerAddress, scheme: str) -> str:
    return ",".join(f"{scheme}://{host_port(*host)}" for host in address.hosts)


def _tls_files(address: ServerAddress, names: tuple[str, str, str]) -> dict[str, str]:
    if address.tls is None:
        return {}
    files = (address.tls.ca, address.tls.cert, address.tls.key)
    return {name: str(path) for name, path in zip(names, files, strict=True) if path is not None}
