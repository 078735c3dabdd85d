"""URLs: what they mean, and that their credentials stay out of sight."""

import socket

import pytest

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.address import (
    EtcdAddress,
    advertised_address,
    host_port,
    parse_etcd_url,
    redact,
)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("nats://me:secret@h:4222", "nats://h:4222"),
        ("nats://token@h:4222,nats://me:secret@i:4222", "nats://h:4222,nats://i:4222"),
        ("me:secret@h:4222", "h:4222"),
        ("nats://me:se@cret@h:4222", "nats://h:4222"),
        ("nats://me:p/ss@h:4222", "nats://h:4222"),
        ("nats://me:a,b@h:4222", "nats://h:4222"),
        ("cannot reach nats://me:secret@h:1 now", "cannot reach nats://h:1 now"),
    ],
)
def test_credentials_are_not_shown(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:1", EtcdAddress("h", 1)),
        ("http://h", EtcdAddress("h", 2379)),
        ("h:1", EtcdAddress("h", 1)),
        ("http://[::1]:1", EtcdAddress("[::1]", 1)),
        ("http://1.1.1.1:1,http://2.2.2.2:2", EtcdAddress("ipv4:1.1.1.1:1,2.2.2.2", 2)),
        ("http://me:p%40ss@h:1", EtcdAddress("h", 1, "me", "p@ss")),
    ],
)
def test_etcd_urls(url: str, address: EtcdAddress) -> None:
    assert parse_etcd_url(url) == address
    assert "p@ss" not in repr(parse_etcd_url(url))


@pytest.mark.parametrize("url", ["", "https://h:1", "http://h:x", "http://a:1,http://b:1"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_etcd_url(url)


def test_ipv6_is_bracketed() -> None:
    assert (host_port("::1", 5), host_port("h", 5)) == ("[::1]:5", "h:5")


@pytest.mark.parametrize(
    ("bind_host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:5"),
        ("10.0.0.12", "10.0.0.12:5"),
        ("fd00::1", "[fd00::1]:5"),
        ("worker-1", "worker-1:5"),
        ("0.0.0.0", "node-7:5"),
        ("::", "node-7:5"),
        ("", "node-7:5"),
    ],
)
def test_a_server_on_all_interfaces_is_reached_by_the_hosts_name(
    monkeypatch: pytest.MonkeyPatch, bind_host: str, address: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    assert advertised_address(bind_host, 5) == address
