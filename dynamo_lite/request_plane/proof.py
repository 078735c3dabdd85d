"""How the two ends of a connection prove that they have the graph's secret.

A proof is a tag (`runtime/secret.py`) that is bound to the worker's address. The client's proof
(HELLO) is a tag of its client id, the worker's proof (WELCOME) a tag of the client's proof. Client
ids are random, so a proof cannot be used again while its connection is open. With TLS only the two
processes see it.
"""

from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.runtime.secret import GraphSecret

HELLO, WELCOME = b"hello ", b"welcome "


def proof_of(secret: GraphSecret | None, kind: bytes, address: str, content: bytes) -> bytes:
    """Empty without a secret. kind: HELLO or WELCOME."""
    return b"" if secret is None else secret.tag(kind + address.encode(), content)


def check_proof(
    secret: GraphSecret | None, kind: bytes, address: str, content: bytes, proof: bytes
) -> None:
    """Raises ProtocolError unless the peer has the secret. Without one all are accepted."""
    if secret is not None and not secret.verify(kind + address.encode(), proof, content):
        peer = "client" if kind == HELLO else "worker"
        raise ProtocolError(f"not authentic: the {peer} does not have this graph's secret")
