"""`dynamo-lite serve` and the certificates of its graph; `dynamo-lite access certs`."""

import os
from pathlib import Path

import httpx

from dynamo_lite.protocol.permissions import all_permissions
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.serve.certificate_folder import make_certificates
from tests.certificate_folders import expire, graph_folder
from tests.process.command import STUB, Serving, invoke, revoke_lease, run, serving

EVERYWHERE = "--Graph.bind-host=0.0.0.0"


def listed(*options: str) -> str:
    done = invoke("ps", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def states(graph: Serving) -> list[str]:
    return [entry["state"] for entry in graph.processes().values()]


def test_a_graph_that_others_reach_makes_itself_certificates_and_keeps_them(tmp_path: Path):
    folder = tmp_path / "certificates" / "dynamo"
    with serving(tmp_path, EVERYWHERE, until="ready http") as graph:
        made = content(folder)
        assert {"ca.pem", "Front.pem", "Back-key.pem", "Operator.pem"} <= set(made)
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
        assert graph.run_json()["certificates"] == str(folder)
        url = graph.processes()["Front-0"]["status_url"]
        assert url.startswith("https://")
        assert httpx.get(f"{url}/ready", verify=False, timeout=30).status_code == 200
        assert httpx.get(f"{url}/metrics", verify=False, timeout=30).status_code == 403
    with serving(tmp_path, EVERYWHERE, until="ready http"):
        assert content(folder) == made


def test_commands_know_the_certificates_that_a_graph_has_made_or_are_told(tmp_path: Path):
    folder = tmp_path / "certificates" / "dynamo"
    with serving(tmp_path, EVERYWHERE, until="ready http") as graph:
        assert listed("--state-dir", str(tmp_path)).count(" ready ") == 2
        assert (
            listed("--state-dir", str(tmp_path), "--certificates", str(folder)).count(" ready ")
            == 2
        )
        named = {
            "DYNAMO_LITE_ETCD_URL": graph.run_json()["etcd"],
            "DYNAMO_LITE_CERTIFICATES": str(folder),
        }
        shown = revoke_lease("--state-dir", str(tmp_path / "none"), env=os.environ | named)
        assert shown.stdout.count(" ready ") == 2, shown.stderr
        with serving(tmp_path, EVERYWHERE, "--service-name", "Back", until="ready"):
            assert listed("--state-dir", str(tmp_path)).count(" ready ") == 3


def test_named_certificates_are_used_and_a_bad_one_is_refused(tmp_path: Path):
    state, folder = tmp_path / "state", tmp_path / "certificates"
    make_certificates(folder, "dynamo", ["Front", "Back", "Operator"])
    named = (EVERYWHERE, f"--Graph.certificates={folder}")
    with serving(state, *named, until="ready http") as graph:
        assert graph.run_json()["certificates"] == str(folder)
        assert listed("--state-dir", str(state)).count(" ready ") == 2
    assert not (state / "certificates").exists()
    (folder / "Front.pem").unlink()
    result = run("serve", STUB, "--state-dir", str(state), *named)
    lines = result.stderr.splitlines()
    assert (result.returncode, len(lines)) == (2, 1)
    assert lines[0].startswith(f"error: cert={folder}/Front.pem cannot be read")
    assert not (state / "run.json").exists()


def test_the_command_makes_a_folder(tmp_path: Path):
    folder = tmp_path / "certificates"
    where = ("access", "certs", str(folder), "--namespace", "n")
    done = invoke(*where, "--host", "node-1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{folder}: made Frontend, Router, VllmWorker, ")
    for component in all_permissions("n"):
        Certificates(folder, "n", component)
    before = content(folder)
    assert invoke(*where).stdout == f"{folder}: made nothing: all are there\n"
    assert invoke(*where, "--component", "Mine").stdout == f"{folder}: made Mine\n"
    done = invoke(*where, "--server", "nats", "--server", "etcd", "--host", "nats.example")
    assert done.stdout == f"{folder}: made nats-server, etcd-server\n"
    after = content(folder)
    assert {name: after[name] for name in before} == before
    for wrong in (
        ("--server", "x"),
        ("--server", "nats", "--component", "Mine"),
        ("--component", "../x"),
        ("--component", "Other", "--host", "ö"),
    ):
        done = invoke(*where, *wrong)
        assert done.returncode == 2 and done.stderr.startswith("error: --"), wrong
    assert content(folder) == after
    assert invoke("access", "certs", str(folder)).returncode == 2


def test_join_needs_them_where_others_reach_it(tmp_path: Path):
    joining = ("join", "--url", "http://127.0.0.1:1", "--role", "both", "--protocol", "nixl")
    plain = invoke(*joining, "--etcd-url", "http://etcd.invalid")
    assert plain.returncode == 2 and "reached over TLS only: write https://" in plain.stderr
    local = (*joining, "--etcd-url", "http://127.0.0.1:1", "--namespace", "n")
    bare = invoke(*local, "--bind-host", "0.0.0.0")
    assert bare.returncode == 2
    assert bare.stderr.startswith("error: --bind-host: 0.0.0.0 is reachable from other hosts")
    folder = graph_folder(tmp_path / "certificates")
    expire(folder, "Engine")
    bad = invoke(*local, "--bind-host", "0.0.0.0", "--certificates", str(folder))
    assert bad.returncode == 2 and "certificate has expired" in bad.stderr
