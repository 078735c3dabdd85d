"""Makes the certificates that `runtime/certificates.py` reads, and their authority."""

import datetime
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.certificates import identity
from dynamo_lite.runtime.credentials import open_to_others
from dynamo_lite.serve.run_state import write_private

_AUTHORITY_DAYS, _DAYS = 3650, 730
#: A clock of another host may be behind this one.
_BEFORE = datetime.timedelta(hours=1)

_Key = ec.EllipticCurvePrivateKey


def make_certificates(
    folder: Path,
    namespace: str,
    names: Iterable[str],
    hosts: Iterable[str] = (),
    *,
    servers: bool = False,
) -> list[str]:
    """Makes the authority, and a certificate of each component, also for these hosts. What is there
    is kept. Returns the names of those that were made.

    servers: they are no components, and clients compare the hosts.

    Raises ConfigError when the authority's key is not there, StartupError when a file cannot be
    written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        wanted = {name: (folder / f"{name}-key.pem", folder / f"{name}.pem") for name in names}
        made = [n for n, (key, cert) in wanted.items() if not (key.exists() and cert.exists())]
        authority = _authority(folder, namespace) if made else None
        for name in made:
            assert authority is not None
            issued, own = _issue(
                *authority, _names("" if servers else identity(namespace, name), hosts)
            )
            # The certificate comes last: it says that its key is there.
            for file, pem in zip(wanted[name], (_key_pem(own), _pem(issued)), strict=True):
                write_private(file, pem)
    except OSError as exc:
        raise StartupError(f"cannot make certificates in {folder}: {exc}") from exc
    return made


def _names(uri: str, hosts: Iterable[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)] if uri else []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            try:
                names.append(x509.DNSName(host))
            except ValueError as exc:
                raise ConfigError([f"--host {host!r}: not a host name or address"]) from exc
    return names


def _authority(folder: Path, namespace: str) -> tuple[x509.Certificate, _Key]:
    """The one of the folder; a new one if there is none."""
    ca, ca_key = folder / "ca.pem", folder / "ca-key.pem"
    if not ca.exists() and not ca_key.exists():
        certificate, key = _self_signed(namespace)
        write_private(ca_key, _key_pem(key))
        write_private(ca, _pem(certificate))
        return certificate, key
    for one in (ca, ca_key):
        if not one.exists():
            why = f"{one} is missing: make the certificates where the authority and its key are"
            raise ConfigError([why])
    if open_to_others(ca_key.stat()):
        raise ConfigError([f"{ca_key} is open to other users: chmod 600 {ca_key}"])
    try:
        key = serialization.load_pem_private_key(ca_key.read_bytes(), None)
        certificate = x509.load_pem_x509_certificate(ca.read_bytes())
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise ConfigError([f"{ca} and {ca_key}: not a certificate and its key: {exc}"]) from exc
    if not isinstance(key, _Key) or key.public_key() != certificate.public_key():
        raise ConfigError([f"{ca} and {ca_key}: not a matching pair on an elliptic curve"])
    return certificate, key


def _self_signed(namespace: str) -> tuple[x509.Certificate, _Key]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dynamo-lite {namespace}")])
    builder = (
        _builder(name, name, key, _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
    )
    return builder.sign(key, hashes.SHA256()), key


def _issue(
    authority: x509.Certificate, authority_key: _Key, names: list[x509.GeneralName]
) -> tuple[x509.Certificate, _Key]:
    """Without a common name, which etcd would take for the name of a user."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "dynamo-lite")])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    # Workers are servers and clients; so are servers of NATS and etcd, of each other.
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(subject, authority.subject, key, _DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
    return builder.sign(authority_key, hashes.SHA256()), key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: _Key, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    """signs: other certificates."""
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        **dict.fromkeys((*others, "encipher_only", "decipher_only"), False),
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: _Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
