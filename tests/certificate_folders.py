"""Certificate folders of graphs, good and bad ones."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from dynamo_lite.protocol.permissions import all_permissions
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.serve.certificate_folder import make_certificates

NAMESPACE = "n"
#: Hosts of the certificates.
HOSTS = ("localhost", "127.0.0.1")


def graph_folder(folder: Path, namespace: str = NAMESPACE) -> Path:
    """With a certificate of each component, and of servers of NATS and etcd."""
    make_certificates(folder, namespace, all_permissions(namespace), HOSTS)
    make_certificates(folder, namespace, ("nats-server", "etcd-server"), HOSTS, servers=True)
    return folder


def of(folder: Path, component: str, namespace: str = NAMESPACE) -> Certificates:
    return Certificates(folder, namespace, component)


def expire(folder: Path, name: str, *, days: float = -1) -> None:
    """Signs the certificate again: it ends after `days`, and began two days before that."""
    path = folder / f"{name}.pem"
    old = x509.load_pem_x509_certificate(path.read_bytes())
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    builder = x509.CertificateBuilder(
        issuer_name=old.issuer,
        subject_name=old.subject,
        public_key=old.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=end - datetime.timedelta(days=2),
        not_valid_after=end,
        extensions=list(old.extensions),
    )
    key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    signed = builder.sign(key, hashes.SHA256())  # pyright: ignore[reportArgumentType]
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def renew(folder: Path, name: str) -> None:
    """As an operator does: the files go, and are made again."""
    for path in (folder / f"{name}.pem", folder / f"{name}-key.pem"):
        path.unlink()
    make_certificates(folder, NAMESPACE, [name])
