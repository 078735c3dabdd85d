"""Requests to a Kubernetes API server, as the service account of the pod that this process is in.

One connection per request: a planner asks every few seconds. See
https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/.
"""

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from dynamo_lite.protocol.errors import (
    ConfigError,
    DeadlineExceeded,
    ProtocolError,
    Refused,
    Unavailable,
)

#: The patch replaces the fields that it names.
_MERGE_PATCH = "application/merge-patch+json"


class KubernetesApi:
    """url: https://HOST[:PORT]. account: folder with `token`, `ca.crt` and `namespace`.

    timeout_s: of one request. Raises ConfigError when the folder or the URL cannot be used.
    """

    def __init__(self, url: str, account: Path, timeout_s: float = 5.0):
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname or parts.path.strip("/"):
            raise ConfigError([f"kubernetes.url: expected https://HOST[:PORT], got {url}"])
        self._netloc = parts.netloc
        self._token, self._timeout_s = account / "token", timeout_s
        try:
            self._context = ssl.create_default_context(cafile=account / "ca.crt")
            #: Of the pod.
            self.namespace = _line(account / "namespace")
            self._bearer()
        except (OSError, ssl.SSLError) as exc:
            said = f"kubernetes.service-account: {account} has no usable service account: {exc}"
            hint = "name a folder with its files token, ca.crt and namespace"
            raise ConfigError([f"{said}; {hint}"]) from exc

    async def get(self, path: str) -> dict[str, Any]:
        """Raises as `patch`."""
        return await self._request("GET", path, b"")

    async def patch(self, path: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Applies a merge patch. Returns the changed object.

        Raises Refused when the server refuses for good, Unavailable when another try may help
        (also after a conflict with another writer), DeadlineExceeded, or ProtocolError. After
        the last three the change may have been made.
        """
        return await self._request("PATCH", path, msgspec.json.encode(change))

    async def _request(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        headers = {"Accept": "application/json"} | ({"Content-Type": _MERGE_PATCH} if body else {})
        try:
            # Read each time: the token is replaced while the pod runs.
            headers["Authorization"] = f"Bearer {self._bearer()}"
            async with (
                asyncio.timeout(self._timeout_s),
                aiohttp.ClientSession(f"https://{self._netloc}", headers=headers) as session,
                session.request(
                    method, path, data=body or None, ssl=self._context, allow_redirects=False
                ) as response,
            ):
                status, answer = response.status, await response.read()
        except TimeoutError as exc:
            raise DeadlineExceeded(f"Kubernetes: {method} {path}", self._timeout_s) from exc
        except (OSError, aiohttp.ClientConnectionError) as exc:
            raise Unavailable(f"Kubernetes at {self._netloc}: {exc}") from exc
        except aiohttp.ClientError as exc:
            raise ProtocolError(f"Kubernetes: {method} {path}: {exc}") from exc
        if status == 200:
            return _decoded(answer)
        said = f"Kubernetes: {method} {path}: {status} {_message(answer)}"
        if status == 409 or status == 429 or status >= 500:
            raise Unavailable(said)
        raise Refused(said, elsewhere=False)

    def _bearer(self) -> str:
        return _line(self._token)


def _line(file: Path) -> str:
    """The one line of a file of the service account. Raises OSError, also for other contents."""
    content = file.read_bytes().strip()
    text = content.decode(errors="replace")
    # Both kinds of lines become parts of a request's head.
    if not text or not text.isascii() or not text.isprintable():
        raise OSError(f"{file} is not one line of printable ASCII characters")
    return text


def _decoded(answer: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(answer, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ProtocolError(f"Kubernetes: the answer is not a JSON object: {exc}") from exc


def _message(answer: bytes) -> str:
    """The message of a `Status` object; empty for anything else."""
    try:
        return str(_decoded(answer).get("message", ""))[:500]
    except ProtocolError:
        return ""
