"""What the users that `dynamo-lite access` prints may not do, on a real nats-server and etcd."""

import asyncio
import itertools
import re
from collections.abc import Iterator

import pytest
from nats.aio.msg import Msg
from nats.js.api import StorageType, StreamSource

from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DeadlineExceeded, StartupError, StoreUnavailable
from dynamo_lite.protocol.permissions import all_permissions
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.process.component import ProcessSpec
from dynamo_lite.runtime.store import Put, Snapshot
from dynamo_lite.runtime.tasks import running
from dynamo_lite.serve.access import check_access
from tests.builders import eventually
from tests.least_rights import FOREIGN, PASSWORD, LeastRights, least_rights
from tests.servers import jetstream_of

NAMESPACE = "n-1"


@pytest.fixture(scope="module")
def rights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeastRights]:
    with least_rights(tmp_path_factory.mktemp("rights"), NAMESPACE) as made:
        yield made


@pytest.mark.parametrize(
    ("who", "subject"),
    [
        ("Frontend", names.claim_subject(NAMESPACE, "e1")),
        ("PrefillWorker", names.explain_subject(NAMESPACE, "e1")),
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


@pytest.mark.parametrize("own", ["Frontend", "VllmWorker", "PrefillWorker"])
async def test_another_component_s_users_are_found_before_the_start(rights: LeastRights, own: str):
    async def check(nats: str = "", etcd: str = "") -> None:
        """nats, etcd: in place of its own URLs."""
        spec = ProcessSpec(
            namespace=NAMESPACE,
            component=own,
            instance=0,
            nats_url=nats or rights.nats_url(own),
            etcd_url=etcd or rights.etcd_url(own),
            state_dir="",
            config={} if own == "Frontend" else {"queue": {}},
        )
        async with (
            NatsMessaging(spec.nats_url) as messaging,
            EtcdStore(spec.etcd_url) as store,
        ):
            await check_access(spec, store, messaging)
            # What it has tried is not subscribed to any more.
            tried = all_permissions(NAMESPACE)[own].subscribe
            assert {one.subject for one in messaging.client._subs.values()}.isdisjoint(tried)

    await check()
    login = re.escape(f"give the login of {own}: ?login=FILE")
    with pytest.raises(StartupError, match=f"permissions violation.*{login}"):
        await check(nats=rights.nats_url("Engine"))
    with pytest.raises(StartupError, match=f"permission denied.*{login}"):
        await check(etcd=rights.etcd_url("Engine"))
    without, _, _ = rights.nats_url(own).partition("&inbox")
    with pytest.raises(StartupError, match=f"{login}&inbox=_INBOX_n-1-{own}$") as refused:
        await check(nats=without)
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize("who", ["Frontend", "Engine", "PrefillWorker"])
async def test_no_user_hears_others_inboxes_or_jobs(rights: LeastRights, who: str):
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
            await decode.put(names.live_options_key(NAMESPACE, "VllmWorker"), b"{}")
        assert await prefill.get(own) == b"1"


#: Of the graph, to which its components send, without JetStream's.
SUBJECTS = sorted(
    {
        subject.replace("*", "e1")
        for one in all_permissions(NAMESPACE).values()
        for subject in (*one.publish, *one.subscribe)
        if not subject.startswith("$")
    }
)
#: A process on a busy machine answers within it.
SILENCE_S = 2.0


async def heard_by(url: str) -> list[bytes]:
    """What comes to a user that listens to all, and sends to all."""
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        # The broker reports no responders, or that it has stored the message.
        if message.data not in (b"", b"forged") and b'"stream"' not in message.data:
            heard.append(message.data)

    async with NatsMessaging(url) as messaging:
        client = messaging.client
        inbox = client.new_inbox()
        for subject in (*SUBJECTS, ">", "_INBOX.>", "$JS.>", inbox):
            await client.subscribe(subject, cb=hear)
        for subject in SUBJECTS:
            await client.publish(subject, b"forged", reply=inbox)
        await client.flush()
        await asyncio.sleep(SILENCE_S)
    return heard


async def recorded_by(url: str, stream: str) -> int:
    """How many of the graph's jobs and messages come into a stream that its maker may make."""
    async with jetstream_of(url) as js:
        made = await js.add_stream(
            name=stream,
            storage=StorageType.MEMORY,
            sources=[StreamSource(name=names.prefill_stream(NAMESPACE))],
            subjects=[f"{NAMESPACE}_{name}.>" for name in ("engine", "kv", "health")],
        )
        assert made.config.sources and made.config.subjects
        await asyncio.sleep(SILENCE_S)
        return (await js.stream_info(stream)).state.messages


async def test_a_user_of_another_graph_hears_asks_and_records_nothing(rights: LeastRights):
    """Whatever component it is of. The graph's messages go to and fro meanwhile."""
    users, stream = all_permissions(FOREIGN), names.prefill_stream(FOREIGN)
    makers = [who for who, one in users.items() if f"$JS.API.STREAM.CREATE.{stream}" in one.publish]
    taken: list[bytes] = []

    async def take(payload: bytes) -> bytes:
        taken.append(payload)
        return b"yes"

    foreign, claim = rights.foreign(), names.claim_subject(NAMESPACE, "e1")
    queue = JetStreamQueue(rights.nats_url("VllmWorker"), NAMESPACE)
    async with (
        NatsMessaging(rights.nats_url("VllmWorker")) as decode,
        NatsMessaging(rights.nats_url("PrefillWorker")) as prefill,
        decode.serve(claim, take),
        queue,
    ):

        async def work() -> None:
            for number in itertools.count():
                assert await prefill.request(claim, b"ours", timeout_s=5) == b"yes"
                await decode.publish(names.kv_subject(NAMESPACE, "VllmWorker"), b"prefixes")
                await queue.push(b"a prompt", message_id=f"{number}")
                await asyncio.sleep(0.05)

        async with running(work(), name="the graph"):
            assert [await recorded_by(foreign.nats_url(who), stream) for who in makers] == [0, 0]
            heard = await asyncio.gather(*(heard_by(foreign.nats_url(who)) for who in users))
            with pytest.raises(StartupError):
                await heard_by(foreign.nats)
    assert heard == [[]] * len(users)
    assert set(taken) == {b"ours"}


async def test_a_user_of_another_graph_reads_and_writes_no_key(rights: LeastRights):
    prefixes = {
        prefix for one in all_permissions(NAMESPACE).values() for prefix in (*one.read, *one.write)
    }
    async with EtcdStore(rights.etcd_url("Operator")) as own, own.lease(30) as lease:
        for prefix in prefixes:
            await own.put(f"{prefix}x", b"ours", lease=lease)
        for who in all_permissions(FOREIGN):
            async with EtcdStore(rights.foreign().etcd_url(who)) as store:
                for prefix in prefixes:
                    key = f"{prefix}x"
                    for tried in (store.get_prefix(prefix), store.put(key, b""), store.delete(key)):
                        with pytest.raises(StoreUnavailable, match="permission denied"):
                            await tried
                with pytest.raises(StoreUnavailable, match="permission denied"):
                    await store.revoke(lease.id)
        assert [await own.get(f"{prefix}x") for prefix in prefixes] == [b"ours"] * len(prefixes)
