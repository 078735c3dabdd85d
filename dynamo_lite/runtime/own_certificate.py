"""A certificate that a process makes for itself.

Its fingerprint is in the process's record in etcd, so its peers need no authority: they accept
exactly this certificate. The key stays in this process, except for an instant in a file that only
its user can read.
"""

import datetime
import hashlib
import ipaddress
import os
import ssl
import tempfile
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dynamo_lite.protocol.errors import ProtocolError

#: No client checks it: the certificate is valid while its record is in etcd.
_VALID = datetime.timedelta(days=36500)


@dataclass(frozen=True)
class OwnCertificate:
    #: The TLS context of a server.
    context: ssl.SSLContext
    #: SHA-256 of the certificate, hexadecimal.
    fingerprint: str


def make_certificate() -> OwnCertificate:
    """A new self-signed certificate with a key on P-256."""
    certificate, key = _self_signed()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The ssl module reads keys from files only.
    descriptor, path = tempfile.mkstemp(prefix="dynamo-lite-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_pem(certificate) + _key_pem(key))
        context.load_cert_chain(path)
    finally:
        os.unlink(path)
    return OwnCertificate(
        context, _fingerprint(certificate.public_bytes(serialization.Encoding.DER))
    )


def self_signed(address: str) -> tuple[bytes, bytes]:
    """A new self-signed certificate of this IP address, and its key, as PEM.

    For a server and clients that share them: a process that has the key is accepted.
    """
    name = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    certificate, key = _self_signed(name, x509.BasicConstraints(ca=True, path_length=0))
    return _pem(certificate), _key_pem(key)


def _self_signed(
    *extensions: x509.ExtensionType,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dynamo-lite")])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _VALID)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256()), key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def pinning_context() -> ssl.SSLContext:
    """The context of a client, which must call `check_pinned` when it is connected."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def check_pinned(connection: ssl.SSLObject | None, fingerprint: str) -> None:
    """Raises ProtocolError unless the peer has the certificate with this fingerprint."""
    der = None if connection is None else connection.getpeercert(binary_form=True)
    if der is None or _fingerprint(der) != fingerprint:
        raise ProtocolError("its certificate is not the one of its record in etcd")


def _fingerprint(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()
