"""The graph's secret: its file, its keys, and what they authenticate."""

import os
from pathlib import Path

import pytest
from dynamo_lite.serve.secret_file import given_secret, made_secret, running_secret
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_lite.protocol.errors import ConfigError, ProtocolError, StartupError
from dynamo_lite.runtime.secret import TAG_BYTES, GraphSecret
from dynamo_lite.serve import secret_file
from dynamo_lite.serve.embedded import check_folders
from dynamo_lite.serve.run_state import RunState, write_private
from tests.builders import ManualClock, graph_secret

OLD, NEW = b"o" * 32, b"n" * 32


@pytest.fixture
def secret(tmp_path: Path) -> GraphSecret:
    return graph_secret(tmp_path / "secret")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=st.binary(max_size=200), context=st.binary(max_size=40))
def test_what_was_protected_is_opened(secret: GraphSecret, message: bytes, context: bytes):
    assert secret.open(context, secret.protect(context, message)) == message


def test_a_changed_bit_another_context_and_another_secret_are_refused(
    secret: GraphSecret, tmp_path: Path
):
    protected = secret.protect(b"here", b"a message")
    for position in range(len(protected)):
        changed = bytearray(protected)
        changed[position] ^= 1
        with pytest.raises(ProtocolError):
            secret.open(b"here", bytes(changed))
    with pytest.raises(ProtocolError):
        secret.open(b"there", protected)
    with pytest.raises(ProtocolError):
        graph_secret(tmp_path / "other").open(b"here", protected)
    for short in (b"", protected[: TAG_BYTES - 1]):
        with pytest.raises(ProtocolError):
            secret.open(b"here", short)
    # Nor does a context pass for a part of the message.
    assert not secret.verify(b"a", secret.tag(b"ab", b"c"), b"bc")


def test_a_key_is_replaced_while_both_ends_run(tmp_path: Path):
    """The steps of a rotation, each made on one host before the other."""
    clock = ManualClock()
    paths = tmp_path / "here", tmp_path / "there"
    for path in paths:
        graph_secret(path, OLD)
    here, there = (GraphSecret(path, clock.monotonic) for path in paths)
    for keys in ((OLD, NEW), (NEW, OLD), (NEW,)):
        for path in paths:
            graph_secret(path, *keys)
            clock.now += 1.0
            for one, other in ((here, there), (there, here)):
                assert other.open(b"", one.protect(b"", b"m")) == b"m"
    with pytest.raises(ProtocolError):
        here.open(b"", graph_secret(tmp_path / "late", OLD).protect(b"", b"m"))


def test_a_secret_that_is_a_link_may_get_another_target(tmp_path: Path):
    """Kubernetes does this with a Secret, and removes the old target."""
    for folder, key in (("1", OLD), ("2", NEW)):
        (tmp_path / folder).mkdir()
        graph_secret(tmp_path / folder / "secret", key)
    (tmp_path / "data").symlink_to("1")
    (tmp_path / "secret").symlink_to("data/secret")
    clock = ManualClock()
    secret = GraphSecret(given_secret(tmp_path / "secret"), clock.monotonic)
    (tmp_path / "next").symlink_to("2")
    (tmp_path / "next").replace(tmp_path / "data")
    (tmp_path / "1" / "secret").unlink()
    clock.now += 1.0
    assert secret.open(b"", graph_secret(tmp_path / "now", NEW).protect(b"", b"m")) == b"m"


def test_a_spoilt_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    clock, path = ManualClock(), tmp_path / "secret"
    graph_secret(path, OLD)
    secret = GraphSecret(path, clock.monotonic)
    before = secret.protect(b"", b"m")
    for spoil in (lambda: path.write_text("not a key"), path.unlink):
        spoil()
        clock.now += 1.0
        assert secret.open(b"", before) == b"m"
    assert "the old secret stays in use" in caplog.text and OLD.hex() not in caplog.text


@pytest.mark.parametrize(
    ("content", "mode", "complaint"),
    [
        *(
            (content, 0o600, "64 hexadecimal")
            for content in (
                "",
                "ab",
                "zz" * 32,
                "00" * 31,
                "\n".join(["00" * 32] * 3),
                "00" * 32 + " 11",
            )
        ),
        ("00" * 32, 0o640, "chmod 600"),
        (None, 0, "cannot read"),
    ],
)
def test_files_that_are_no_secret_are_refused(
    content: str | None, mode: int, complaint: str, tmp_path: Path
):
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(StartupError, match=complaint) as caught:
        GraphSecret(path)
    assert not content or content not in str(caught.value)


def test_a_made_secret_is_private_and_new_unless_records_outlive_the_graph(tmp_path: Path):
    path = made_secret(tmp_path)
    first = path.read_bytes()
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert made_secret(tmp_path, keep=True).read_bytes() == first
    assert made_secret(tmp_path).read_bytes() != first


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "content", [b"", b"password\n", b"00" * 32 + b"\nrest", b"\xff" * 65], ids=range(4)
)
def test_a_file_that_no_start_has_made_is_not_overwritten(
    tmp_path: Path, content: bytes, keep: bool
):
    path = made_secret(tmp_path)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path} is not .* was put there.*--secret-file"):
        made_secret(tmp_path, keep=keep)
    assert path.read_bytes() == content
    assert {entry.name for entry in tmp_path.iterdir()} == {"embedded", "secret"}


def test_a_secret_that_an_operator_made_is_not_overwritten(tmp_path: Path):
    """`openssl rand -hex 32 > secret`, and then a start with `--state-dir .`; also after a start
    with a store of its own has used it."""
    path = tmp_path / "secret"
    graph_secret(path, OLD)
    for _ in range(2):
        with pytest.raises(ConfigError, match="was put there"):
            made_secret(tmp_path)
        assert path.read_text() == OLD.hex() + "\n"
        assert list(tmp_path.iterdir()) == [path]
        # It is a secret all the same.
        assert made_secret(tmp_path, keep=True) == path


def test_a_start_that_ended_before_its_secret_was_written_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = made_secret(tmp_path)
    written: list[str] = []

    def fails_at_second(file: Path, content: bytes) -> None:
        written.append(file.name)
        if len(written) == 2:
            raise OSError("no space")
        write_private(file, content)

    with monkeypatch.context() as patched:
        patched.setattr(secret_file, "write_private", fails_at_second)
        with pytest.raises(StartupError, match="no space"):
            made_secret(tmp_path)
    before = path.read_bytes()
    assert made_secret(tmp_path).read_bytes() != before


def test_a_folder_that_cannot_be_looked_into_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def denied(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(StartupError, match=f"folder {tmp_path}.*Permission denied"):
        check_folders([tmp_path])


def test_links_folders_and_files_of_other_users_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = made_secret(tmp_path)
    with monkeypatch.context() as patched:
        owner = path.stat().st_uid
        patched.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(ConfigError, match="belongs to another user"):
            made_secret(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="no regular file"):
        made_secret(tmp_path)
    assert path.is_symlink()
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="no regular file"):
        made_secret(tmp_path, keep=True)


def test_a_lone_service_takes_the_secret_of_the_graph_beside_it_only():
    running = RunState(
        pid=1,
        started_at=0,
        graph="g",
        namespace="n",
        nats="nats://a",
        etcd="http://a",
        secret="/run/secret",
    )
    assert running_secret(running, "http://a") == Path("/run/secret")
    assert running_secret(running, "nats://a") == Path("/run/secret")
    assert running_secret(running, "nats://b") is None
    assert running_secret(None, "nats://a") is None
