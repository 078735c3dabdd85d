"""Revokes the lease of a child process that has died, so that others see its death at once.

It uses etcd's JSON gateway: the supervisor forks, so it must not have the threads of a gRPC
client. See https://etcd.io/docs/v3.6/dev-guide/api_grpc_gateway/.
"""

import json
import logging
from typing import Any

import aiohttp

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.address import host_port, parse_etcd_url

logger = logging.getLogger(__name__)

#: Timeout of each step of a request: connect, receive. A lease that is not revoked expires.
_TIMEOUT_S = 2.0


class LeaseRevoker:
    """etcd_url: see `parse_etcd_url`. timeout_s: timeout of each step of a request."""

    def __init__(self, etcd_url: str, timeout_s: float = _TIMEOUT_S):
        self._address = parse_etcd_url(etcd_url)
        self._timeout_s = timeout_s

    async def revoke(self, lease_id: int) -> bool:
        """Returns whether the lease is gone. If not, it expires; the log says why."""
        problems: list[str] = []
        for host, port in self._address.hosts:
            try:
                await self._revoke_at(host_port(host, port), lease_id)
                return True
            except TimeoutError:
                problems.append(f"{host_port(host, port)}: timed out")
            except (OSError, ValueError, ConfigError, aiohttp.ClientError) as exc:
                problems.append(f"{host_port(host, port)}: {exc or type(exc).__name__}")
        logger.warning(
            "lease %x was not revoked, it will expire: %s", lease_id, "; ".join(problems)
        )
        return False

    async def _revoke_at(self, server: str, lease_id: int) -> None:
        """Raises OSError, ValueError, TimeoutError or ClientError when the server does not revoke
        the lease, and ConfigError when a file that the URL names cannot be read."""
        tls = self._address.tls
        base = f"{'http' if tls is None else 'https'}://{server}"
        ssl = True if tls is None else tls.context()
        headers: dict[str, str] = {}

        async def post(path: str, body: dict[str, Any], *, missing_ok: bool = False) -> Any:
            async with session.post(f"{base}{path}", json=body, headers=headers, ssl=ssl) as answer:
                if missing_ok and answer.status == 404:
                    return {}
                if answer.status != 200:
                    raise ValueError(f"{path}: status {answer.status}")
                found = json.loads(await answer.read())
                if not isinstance(found, dict):
                    raise ValueError(f"{path}: the answer is no JSON object")
                return found

        limits = aiohttp.ClientTimeout(
            total=None, connect=self._timeout_s, sock_read=self._timeout_s
        )
        async with aiohttp.ClientSession(timeout=limits) as session:
            if self._address.user is not None:
                login = {"name": self._address.user, "password": self._address.password}
                answer = await post("/v3/auth/authenticate", login)
                if not isinstance(token := answer.get("token"), str):
                    raise ValueError("/v3/auth/authenticate: the answer has no token")
                headers["authorization"] = token
            await post("/v3/lease/revoke", {"ID": str(lease_id)}, missing_ok=True)
