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
_Pair = tuple[x509.Certificate, _Key]


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
        for name in made:
            uri = "" if servers else identity(namespace, name)
            _write(*wanted[name], _issue(_authority(folder, namespace), _names(uri, hosts)))
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


def _authority(folder: Path, namespace: str) -> _Pair:
    """The one of the folder; a new one if there is none."""
    ca, ca_key = folder / "ca.pem", folder / "ca-key.pem"
    if not ca.exists() and not ca_key.exists():
        _write(ca_key, ca, made := _new_authority(namespace))
        return made
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


def _new_authority(namespace: str) -> _Pair:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dynamo-lite {namespace}")])
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys(("digital_signature", *others, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(key_cert_sign=True, crl_sign=True, **unused)
    return _certificate(name, _AUTHORITY_DAYS, x509.BasicConstraints(True, 0), (usage, True))


def _issue(authority: _Pair, names: list[x509.GeneralName]) -> _Pair:
    """Without a common name, which etcd would take for the name of a user."""
    subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "dynamo-lite")])
    # Workers are servers and clients; so are servers of NATS and etcd, of each other.
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority[1].public_key())
    return _certificate(
        subject,
        _DAYS,
        x509.BasicConstraints(False, None),
        (x509.ExtendedKeyUsage(both), False),
        (issuer, False),
        (x509.SubjectAlternativeName(names), False),
        authority=authority,
    )


def _certificate(
    subject: x509.Name,
    days: int,
    basic: x509.BasicConstraints,
    *extensions: tuple[x509.ExtensionType, bool],
    authority: _Pair | None = None,
) -> _Pair:
    """With a new key. extensions: each with whether it is critical. Without an authority it is its
    own."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer, signer = (subject, key) if authority is None else (authority[0].subject, authority[1])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    for extension, critical in ((basic, True), (own, False), *extensions):
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA256()), key


def _write(key_file: Path, file: Path, made: _Pair) -> None:
    """The certificate comes last: it says that its key is there."""
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    write_private(key_file, made[1].private_bytes(pem, pkcs8, plain))
    write_private(file, made[0].public_bytes(pem))
