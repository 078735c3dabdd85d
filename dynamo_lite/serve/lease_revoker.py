"""Revokes the lease of a child process that has died, so that others see its death at once.

It uses etcd's JSON gateway: the supervisor forks, so it must not have the threads of a gRPC
client. See https://etcd.io/docs/v3.6/dev-guide/api_grpc_gateway/.
"""

import asyncio
import http.client
import json
import logging
from typing import Any, cast

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.address import ServerAddress, host_port, parse_etcd_url

logger = logging.getLogger(__name__)

#: Timeout of each step of a request: connect, send, receive. A lease that is not revoked expires.
_TIMEOUT_S = 2.0


class LeaseRevoker:
    """etcd_url: see `parse_etcd_url`. timeout_s: timeout of each step of a request."""

    def __init__(self, etcd_url: str, timeout_s: float = _TIMEOUT_S):
        self._address = parse_etcd_url(etcd_url)
        self._timeout_s = timeout_s

    async def revoke(self, lease_id: int) -> bool:
        """Returns whether the lease is gone. If not, it expires; the log says why."""
        return await asyncio.to_thread(self._revoke, lease_id)

    def _revoke(self, lease_id: int) -> bool:
        problems: list[str] = []
        for host, port in self._address.hosts:
            try:
                _revoke_at(self._address, host, port, lease_id, self._timeout_s)
                return True
            except (OSError, ValueError, ConfigError, http.client.HTTPException) as exc:
                problems.append(f"{host_port(host, port)}: {exc or type(exc).__name__}")
        logger.warning(
            "lease %x was not revoked, it will expire: %s", lease_id, "; ".join(problems)
        )
        return False


def _revoke_at(
    address: ServerAddress, host: str, port: int, lease_id: int, timeout_s: float
) -> None:
    """Raises OSError, ValueError or HTTPException when the server does not revoke the lease, and
    ConfigError when a file that the URL names cannot be read."""
    if address.tls is None:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    else:
        context = address.tls.context()
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    try:
        headers: dict[str, str] = {}
        if address.user is not None:
            login = {"name": address.user, "password": address.password}
            answer = _post(connection, "/v3/auth/authenticate", login, headers)
            if not isinstance(token := answer.get("token"), str):
                raise ValueError("/v3/auth/authenticate: the answer has no token")
            headers["authorization"] = token
        _post(connection, "/v3/lease/revoke", {"ID": str(lease_id)}, headers, missing_ok=True)
    finally:
        connection.close()


def _post(
    connection: http.client.HTTPConnection,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    *,
    missing_ok: bool = False,
) -> dict[str, Any]:
    """The JSON object of the answer. Raises ValueError for another answer or status than 200."""
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    data = answer.read()
    if missing_ok and answer.status == 404:
        return {}
    if answer.status != 200:
        raise ValueError(f"{path}: status {answer.status}")
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: the answer is no JSON object")
    return cast("dict[str, Any]", found)
