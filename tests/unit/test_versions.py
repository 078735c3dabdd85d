"""Members of other versions: which are accepted, and the texts with which others are refused."""

from dynamo_lite import __version__
from dynamo_lite.protocol.codec import WIRE_VERSION
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.protocol.versions import misfit, unsupported
from tests.builders import endpoint_record


def member(version: str, wire_version: int) -> EndpointRecord:
    plain = endpoint_record(0x2A, "VllmWorker")
    fields = {name: getattr(plain, name) for name in plain.__struct_fields__}
    return EndpointRecord(**{**fields, "version": version, "wire_version": wire_version})


def test_releases_with_one_wire_version_work_together() -> None:
    assert misfit(member("9.9.9", WIRE_VERSION)) == ""


def test_a_record_without_a_version_is_of_another_one() -> None:
    """As those of 0.1.0."""
    assert "(wire version 0)" in misfit(member("", 0))


def test_a_refusal_names_both_versions() -> None:
    why = misfit(member("9.9.9", WIRE_VERSION + 1))
    assert "VllmWorker 2a" in why
    assert f"9.9.9 (wire version {WIRE_VERSION + 1})" in why
    assert f"{__version__} (wire version {WIRE_VERSION})" in why
    both = unsupported(WIRE_VERSION + 1)
    assert str(WIRE_VERSION + 1) in both and f"has {WIRE_VERSION}" in both
