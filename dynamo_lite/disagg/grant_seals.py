"""Sealing of grants with the graph's secret."""

from pathlib import Path

import msgspec

from dynamo_lite.protocol.grant import Grant, sealed_part
from dynamo_lite.runtime.secret import GraphSecret

_CONTEXT = b"grant"


class GrantSeals:
    """Seals with the first key of the secret; seals with either key hold.

    Without a secret grants are not sealed, and each counts as authentic.
    """

    def __init__(self, secret: GraphSecret | None):
        self._secret = secret

    @classmethod
    def of_file(cls, secret_file: str | None) -> "GrantSeals":
        """Raises StartupError for a secret file that cannot be used. None: no secret."""
        return cls(None if secret_file is None else GraphSecret(Path(secret_file)))

    def sealed(self, grant: Grant) -> Grant:
        if self._secret is None:
            return grant
        return msgspec.structs.replace(grant, seal=self._secret.tag(_CONTEXT, sealed_part(grant)))

    def authentic(self, grant: Grant) -> bool:
        if self._secret is None:
            return True
        return self._secret.verify(_CONTEXT, grant.seal, sealed_part(grant))
