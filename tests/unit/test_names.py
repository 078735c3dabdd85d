"""Keys and subjects, as `etcdctl` and `nats` show them."""

import pytest

from dynamo_lite.protocol import names

LEASE = 0x694D967DA694EA1A


def test_an_endpoint_s_key_and_subject():
    key = names.endpoint_key("dynamo", "VllmWorker", "generate", LEASE)
    assert key == "dynamo/components/VllmWorker/generate:694d967da694ea1a"
    assert key.startswith(names.endpoint_prefix("dynamo", "VllmWorker", "generate"))
    assert key.startswith(names.components_prefix("dynamo"))
    subject = names.endpoint_subject("dynamo", "VllmWorker", "generate", LEASE)
    assert subject == "dynamo_vllmworker_918ba2f1.generate-694d967da694ea1a"


def test_endpoints_may_have_a_slash():
    key = names.endpoint_key("dynamo", "Frontend", "chat/completions", 0x1F)
    assert key == "dynamo/components/Frontend/chat/completions:1f"
    subject = names.endpoint_subject("dynamo", "Frontend", "chat/completions", 0x1F)
    assert subject.endswith(".chat/completions-1f")


def test_no_endpoint_s_prefix_covers_another_s():
    prefixes = [
        names.endpoint_prefix("dynamo", component, endpoint)
        for component in ("VllmWorker", "VllmWorker2", "Vllm")
        for endpoint in ("generate", "generate2", "gen")
    ]
    for prefix in prefixes:
        assert [p for p in prefixes if p.startswith(prefix)] == [prefix]
    assert not names.components_prefix("t2").startswith(names.components_prefix("t"))


def test_every_other_name():
    assert names.nixl_metadata_key("dynamo", "e1") == "dynamo/nixl_metadata/e1"
    assert names.nixl_metadata_prefix("dynamo") == "dynamo/nixl_metadata/"
    assert names.kv_subject("dynamo", "VllmWorker") == "dynamo_kv.VllmWorker"
    snapshots = names.kv_snapshot_subject("dynamo", "VllmWorker", 0x1F)
    assert snapshots == "dynamo_kv.VllmWorker.1f.snapshot"
    assert names.fates_subject("dynamo", 0x1F) == "dynamo_router.1f.fates"
    assert names.prefill_stream("dynamo") == "dynamo_prefill_queue"
    assert names.prefill_jobs_subject("dynamo") == "dynamo_prefill_queue.jobs"
    assert names.claim_subject("dynamo", "e1") == "dynamo_engine.e1.claim"
    assert names.done_subject("dynamo", "e1") == "dynamo_engine.e1.done"
    assert names.describe_subject("dynamo", "e1") == "dynamo_engine.e1.describe"
    assert names.explain_subject("dynamo", "e1") == "dynamo_engine.e1.explain"
    assert names.forward_explain_subject("dynamo", 0x1F) == "dynamo_forward.1f.explain"
    assert names.live_options_key("dynamo", "VllmWorker") == "dynamo/config/VllmWorker"
    assert names.planner_leader_key("dynamo") == "dynamo/planner/leader"
    assert names.planner_wanted_key("dynamo") == "dynamo/planner/wanted"
    assert names.leave_subject("dynamo", "e1") == "dynamo_engine.e1.leave"
    assert names.health_subject("dynamo", "VllmWorker") == "dynamo_health.VllmWorker"


def test_subjects_differ_by_namespace_component_endpoint_and_lease():
    subjects = {
        names.endpoint_subject(namespace, component, endpoint, lease)
        for namespace in ("a", "b")
        for component in ("W", "w", "Worker")
        for endpoint in ("x", "y")
        for lease in (1, 16)
    }
    assert len(subjects) == 2 * 3 * 2 * 2


@pytest.mark.parametrize("text", ["a", "dynamo", "t-ab12cd", "0", "a" * 63])
def test_namespaces(text):
    assert names.is_namespace(text)


@pytest.mark.parametrize(
    "text", ["", "-a", "A", "a.b", "a/b", "a b", "a*", "a>", "a_b", "a\n", "é", "a" * 64]
)
def test_not_namespaces(text):
    assert not names.is_namespace(text)


@pytest.mark.parametrize("text", ["e1", "0a1b2c", "Abc-1_dp0", "a" * 64])
def test_engine_ids(text):
    assert names.is_engine_id(text)


@pytest.mark.parametrize("text", ["", "-a", "a.b", "a/b", "../x", "a*", "a>", "a\n", "a" * 65])
def test_not_engine_ids(text):
    assert not names.is_engine_id(text)
