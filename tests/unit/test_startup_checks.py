"""The checks before any process starts."""

import pytest

from dynamo_lite.serve.startup_checks import readable_by_others


@pytest.mark.parametrize(
    ("nats", "etcd", "named"),
    [
        (None, None, []),
        ("nats://127.0.0.1:4222,[::1]:4222", "http://localhost:2379", []),
        ("tls://10.0.0.1:4222", "https://etcd:2379", []),
        ("nats://10.0.0.1:4222", "http://etcd:2379", ["NATS", "etcd"]),
        ("nats://127.0.0.1:4222,10.0.0.1:4222", None, ["NATS"]),
    ],
)
def test_servers_of_other_hosts_without_tls_are_warned_of(
    nats: str | None, etcd: str | None, named: list[str]
):
    warnings = readable_by_others(nats, etcd)
    assert [warning.split()[1] for warning in warnings] == named
    assert all("without TLS" in warning for warning in warnings)


def test_a_warning_does_not_show_a_password():
    [warning] = readable_by_others("nats://me:hidden@nats:4222", None)
    assert "hidden" not in warning
