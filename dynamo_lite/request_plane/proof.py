"""How the two ends of a connection prove that they have the graph's secret.

A proof is a tag (`runtime/secret.py`) that is bound to the worker's address. The client's proof is
a tag of its client id, the worker's proof a tag of the client's proof. Client ids are random, so a
proof cannot be used again while its connection is open. With TLS only the two processes see it.
"""

from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.runtime.secret import GraphSecret


def client_proof(secret: GraphSecret | None, address: str, client_id: str) -> bytes:
    """The proof of the client that connects to `address`; empty without a secret."""
    return b"" if secret is None else secret.tag(_hello(address), client_id.encode())


def check_client(secret: GraphSecret | None, address: str, client_id: str, proof: bytes) -> None:
    """Raises ProtocolError unless the client has the secret. Without one all are accepted."""
    if secret is not None and not secret.verify(_hello(address), proof, client_id.encode()):
        raise ProtocolError("not authentic: the client does not have this graph's secret")


def worker_proof(secret: GraphSecret | None, address: str, proof: bytes) -> bytes:
    """The worker's answer to a client's proof; empty without a secret."""
    return b"" if secret is None else secret.tag(_welcome(address), proof)


def check_worker(secret: GraphSecret | None, address: str, proof: bytes, answer: bytes) -> None:
    """Raises ProtocolError unless the worker has the secret. Without one all are accepted."""
    if secret is not None and not secret.verify(_welcome(address), answer, proof):
        raise ProtocolError("not authentic: the worker does not have this graph's secret")


def _hello(address: str) -> bytes:
    return b"hello " + address.encode()


def _welcome(address: str) -> bytes:
    return b"welcome " + address.encode()
