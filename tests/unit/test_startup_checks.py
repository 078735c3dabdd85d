"""The checks before any process starts."""

from pathlib import Path

import pytest

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.serve.secret_file import check_exposure
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


@pytest.mark.parametrize(
    ("bind_host", "nats", "named"),
    [
        ("127.0.0.1", None, []),
        ("127.0.0.1", "nats://127.0.0.1:4222,localhost:4223,[::1]", []),
        ("127.0.0.1", "nats://10.0.0.1:4222", ["--nats-url"]),
        # Also over TLS: it says who the server is, not who may use it.
        ("::1", "tls://127.0.0.1,nats:4222", ["--nats-url"]),
        ("0.0.0.0", None, ["Graph.bind-host"]),
        ("node-1", None, ["Graph.bind-host"]),
        ("::", None, ["Graph.bind-host"]),
        ("10.0.0.9", "nats://nats", ["Graph.bind-host", "--nats-url"]),
    ],
)
def test_what_others_reach_needs_a_secret(bind_host: str, nats: str | None, named: list[str]):
    check_exposure(bind_host, nats, Path("secret"))
    if not named:
        check_exposure(bind_host, nats, None)
        return
    with pytest.raises(ConfigError) as refused:
        check_exposure(bind_host, nats, None)
    assert [mistake.partition(":")[0] for mistake in refused.value.mistakes] == named
    assert all("--secret-file FILE" in mistake for mistake in refused.value.mistakes)


def test_a_refusal_does_not_show_a_password():
    with pytest.raises(ConfigError) as refused:
        check_exposure("127.0.0.1", "nats://me:hidden@nats:4222", None)
    assert "hidden" not in str(refused.value)
