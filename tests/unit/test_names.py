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


def test_no_endpoint_s_prefix_covers_another_s():
    prefixes = [
        names.endpoint_prefix("dynamo", component, endpoint)
        for component in ("VllmWorker", "VllmWorker2", "Vllm")
        for endpoint in ("generate", "generate2", "gen")
    ]
    for prefix in prefixes:
        assert [p for p in prefixes if p.startswith(prefix)] == [prefix]
    assert not names.components_prefix("t2").startswith(names.components_prefix("t"))


def test_subjects_differ_by_namespace_component_endpoint_and_lease():
    subjects = {
        names.endpoint_subject(namespace, component, endpoint, lease)
        for namespace in ("a", "b")
        for component in ("W", "w", "Worker")
        for endpoint in ("x", "y")
        for lease in (1, 16)
    }
    assert len(subjects) == 2 * 3 * 2 * 2


@pytest.mark.parametrize(
    ("is_one", "good", "bad"),
    [
        (
            names.is_namespace,
            ["a", "dynamo", "t-ab12cd", "0", "a" * 63],
            ["", "-a", "A", "a.b", "a/b", "a b", "a*", "a>", "a_b", "a\n", "é", "a" * 64],
        ),
        (
            names.is_engine_id,
            ["e1", "0a1b2c", "Abc-1_dp0", "a" * 64],
            ["", "-a", "a.b", "a/b", "../x", "a*", "a>", "a\n", "a" * 65],
        ),
    ],
)
def test_what_a_name_may_have(is_one, good, bad):
    assert [text for text in good if not is_one(text)] == []
    assert [text for text in bad if is_one(text)] == []
