"""What the users that `dynamo-lite access` prints may not do, on a real nats-server and etcd."""

import asyncio
from collections.abc import Iterator

import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DeadlineExceeded, StoreUnavailable
from dynamo_lite.queue.base import QueueConfig
from dynamo_lite.queue.open import open_queue
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.store import Put, Snapshot
from tests.builders import eventually
from tests.least_rights import LeastRights, least_rights

NAMESPACE = "n-1"


@pytest.fixture(scope="module")
def rights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeastRights]:
    with least_rights(tmp_path_factory.mktemp("rights"), NAMESPACE) as made:
        yield made


async def test_a_job_goes_from_a_decode_to_a_prefill_worker(rights: LeastRights):
    config = QueueConfig()
    seen = len(rights.violations())
    decode, prefill = (
        open_queue(rights.nats_url(who), NAMESPACE, config, None)
        for who in ("VllmWorker", "PrefillWorker")
    )
    async with asyncio.timeout(20), decode, prefill:
        sequence = await decode.push(b"one", message_id="1")
        job = await prefill.pull(timeout_s=5)
        assert job is not None and job.payload == b"one"
        await job.nak()
        again = await prefill.pull(timeout_s=5)
        assert again is not None
        await again.extend()
        await again.ack()
        assert (await decode.depth()).waiting == 0
        sequence = await decode.push(b"two", message_id="2")
        assert await decode.delete(sequence)
    assert rights.violations()[seen:] == []


async def test_requests_are_answered_on_the_asker_s_own_inbox(rights: LeastRights):
    claim = names.claim_subject(NAMESPACE, "e1")
    seen = len(rights.violations())

    async def answer(payload: bytes) -> bytes:
        return payload

    async with (
        asyncio.timeout(20),
        NatsMessaging(rights.nats_url("VllmWorker")) as decode,
        NatsMessaging(rights.nats_url("PrefillWorker")) as prefill,
        decode.serve(claim, answer),
    ):
        assert await prefill.request(claim, b"x", timeout_s=5) == b"x"
    assert rights.violations()[seen:] == []


@pytest.mark.parametrize(
    ("who", "subject"),
    [
        ("Frontend", names.claim_subject(NAMESPACE, "e1")),
        ("PrefillWorker", names.cancel_subject(NAMESPACE, 0x1A)),
        ("PrefillWorker", names.prefill_jobs_subject(NAMESPACE)),
        ("VllmWorker", names.claim_subject(NAMESPACE, "e1")),
        ("Engine", names.health_subject(NAMESPACE, "VllmWorker")),
        ("Forwarder", "$JS.API.STREAM.LIST"),
    ],
)
async def test_what_a_component_does_not_need_is_refused(
    rights: LeastRights, who: str, subject: str
):
    async with NatsMessaging(rights.nats_url(who)) as messaging:
        with pytest.raises(DeadlineExceeded):
            await messaging.request(subject, b"x", timeout_s=0.3)
    await eventually(
        lambda: any(f'"{subject}"' in line and f"n-1-{who}" in line for line in rights.violations())
    )


@pytest.mark.parametrize("who", ["Frontend", "Engine", "PrefillWorker"])
async def test_nobody_hears_others_inboxes_or_jobs(rights: LeastRights, who: str):
    async with NatsMessaging(rights.nats_url(who)) as messaging:
        for subject in (">", "_INBOX_n-1-VllmWorker.>", f"{NAMESPACE}_prefill_queue.>"):
            await messaging.client.subscribe(subject)
            await messaging.client.flush()
            # The server answers before the line is in its log.
            await eventually(lambda subject=subject: _refused(rights, subject))


def _refused(rights: LeastRights, subject: str) -> bool:
    lines = [line for line in rights.violations() if f'"{subject}"' in line]
    return any("Subscription Violation" in line for line in lines)


async def test_keys_are_read_and_written_by_those_who_need_them(rights: LeastRights):
    own = names.endpoint_key(NAMESPACE, "PrefillWorker", "prefill", 0x1A)
    metadata = names.nixl_metadata_key(NAMESPACE, "e1")
    async with (
        asyncio.timeout(30),
        EtcdStore(rights.etcd_url("PrefillWorker")) as prefill,
        EtcdStore(rights.etcd_url("VllmWorker")) as decode,
        EtcdStore(rights.etcd_url("Frontend")) as frontend,
        frontend.watch(names.components_prefix(NAMESPACE)) as members,
        prefill.lease(30) as lease,
    ):
        assert await anext(members) == Snapshot({})
        await prefill.put(own, b"1", lease=lease)
        assert await anext(members) == Put(own, b"1")
        assert await lease.verify() is None
        await decode.put(metadata, b"memory")
        assert await prefill.get(metadata) == b"memory"
        with pytest.raises(StoreUnavailable, match="permission denied"):
            await frontend.get(metadata)
        with pytest.raises(StoreUnavailable, match="permission denied"):
            await prefill.put(metadata, b"mine")
        with pytest.raises(StoreUnavailable, match="permission denied"):
            await frontend.delete(own)
        with pytest.raises(StoreUnavailable, match="permission denied"):
            await frontend.revoke(lease.id)
        with pytest.raises(StoreUnavailable, match="permission denied"):
            await decode.put(names.tuning_key(NAMESPACE, "VllmWorker"), b"{}")
        assert await prefill.get(own) == b"1"
