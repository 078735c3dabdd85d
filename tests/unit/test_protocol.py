"""Messages byte for byte, and what is not a message.

`golden.txt` has the bytes of each message and record, in their order here. One that changes breaks
running peers: add a defaulted field and extend the value, or raise WIRE_VERSION.
`python -m tests.unit.test_protocol` writes it.
"""

import ast
import inspect
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.protocol import (
    decisions,
    forwarding,
    generate,
    health,
    kv,
    prefill,
    records,
    routing,
)
from dynamo_lite.protocol.codec import (
    WIRE_VERSION,
    Decoder,
    decode_json,
    encode,
    encode_json,
)
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.options import DisaggOptions

LEASE = 0x694D967DA694EA1A

ENGINE = records.EngineMetadata(
    engine_id="e1",
    lease_id=LEASE,
    fingerprint={"dtype": "bf16"},
    block_size_tokens=32,
    num_blocks=64,
    ranks=(
        records.RankMetadata(
            agent=b"nixl\x00\xff",
            memory="DRAM",
            device=0,
            regions=(
                records.KvRegion(
                    layer="model.layers.0",
                    base=1 << 46,
                    stride_bytes=8192,
                    block_bytes=4096,
                    tokens=32,
                    arrays=(
                        records.KvArray(
                            offset=0,
                            head_stride=4096,
                            group_stride=128,
                            item_stride=0,
                            group_tokens=1,
                            items=1,
                            item_bytes=128,
                        ),
                    ),
                ),
            ),
        ),
    ),
)

REQUEST = generate.GenerateRequest(
    request_id="r1",
    prompt_token_ids=[1, 2, 70000],
    sampling=b"\x81",
    arrival_time=1.5,
)
FULL_REQUEST = generate.GenerateRequest(
    request_id="r1",
    prompt_token_ids=[],
    sampling=b"",
    arrival_time=1.5,
    priority=-1,
    cache_salt="s",
    adapter=generate.Adapter(name="l", path="/l"),
    trace_headers={"traceparent": "00"},
    reasoning_ended=True,
    reasoning_parser_kwargs={"a": [1]},
    output_token_ids=[3],
    timeout_s=0.5,
    moved=True,
    session="t",
)
DELTAS = generate.Deltas(
    deltas=[
        generate.TokenDelta(request_id="r1", token_ids=[7]),
        generate.TokenDelta(request_id="r2", token_ids=[], finish_reason="stop", stop_reason=2),
    ]
)
FULL_DELTAS = generate.Deltas(
    deltas=[
        generate.TokenDelta(
            request_id="r1",
            token_ids=[7],
            finish_reason="stop",
            stop_reason="END",
            prefill=generate.PrefillCounts(
                prompt_tokens=9,
                local_cached_tokens=3,
                external_cached_tokens=5,
                waited_s=0.5,
                prefill_s=0.25,
                cached_tokens=4,
                created_cache_tokens=2,
            ),
            logprobs=generate.LogprobRows(1, 1, b"\x07" + bytes(7), bytes(4), b"\x01" + bytes(7)),
            prompt_logprobs=generate.LogprobRows(0, 0, b"", b"", b""),
            error=generate.EngineError(message="paused", invalid=False, retryable=True),
        )
    ]
)
JOB = prefill.RemotePrefillRequest(
    engine_id="e1",
    request_id="r1",
    attempt="a1",
    prompt_token_ids=[1, 2, 3],
    num_computed_tokens=32,
    block_ids=[4, 5],
    prefix_block_ids=[3],
    deadline=2.5,
)
FULL_JOB = prefill.RemotePrefillRequest(
    engine_id="e1",
    request_id="r1",
    attempt="a1",
    prompt_token_ids=[],
    num_computed_tokens=0,
    block_ids=[],
    deadline=2.5,
    priority=3,
    cache_salt="s",
    adapter=generate.Adapter(name="l", path="/l", digest="d"),
    trace_headers={"t": "0"},
    first_token=prefill.FirstTokenWanted(
        last_token_id=9,
        cached_tokens=32,
    ),
    wire_version=9,
)
STATUS = health.EngineStatus(
    metadata=ENGINE,
    free_blocks=60,
    total_blocks=64,
    last_step_age_s=0.5,
    unresponsive_writers=2,
    unusable_writers=1,
    writers=[7587886413599009306],
)

FORWARDED = forwarding.ForwardExplained(
    lease_id=31,
    decisions=[
        forwarding.ForwardDecision(
            request_id="cmpl-1",
            ids=["1"],
            age_s=0.5,
            route="/v1/completions",
            protocol="nixl",
            prompt_tokens=8,
            cached_tokens=0,
            max_local_prefill_length=0,
            how="disaggregated",
            reason="",
            attempts=[
                forwarding.ForwardAttempt(
                    order="serial",
                    choices=[
                        forwarding.LegChoice(
                            leg="prefill",
                            engine="a:1",
                            reason="load",
                            of=1,
                            load_tokens=32,
                        )
                    ],
                    legs=[forwarding.LegTaken(leg="prefill", engine="a:1", status=200)],
                )
            ],
        )
    ],
)

DECISION = decisions.Decision(
    prompt_tokens=900,
    cached_tokens=32,
    queue=decisions.QueueSeen(
        jobs=1, prefill_workers=2, age_s=0.25, tokens=900, prefill_workers_alive=3
    ),
    time_left_s=30.0,
    request_id="cmpl-1-0-0a1b2c3d#1",
    age_s=1.5,
    verdict="remote",
    reason="long",
    thresholds=DisaggOptions(
        max_local_prefill_length=512,
        max_prefill_queue_size=8,
        queue_view_max_age_s=3.0,
        remote_prefill_timeout_s=30.0,
    ),
    asked=decisions.Asked(attempt="a1", outcome="committed", stages_s={"fill": 0.5}),
)

LOAD = kv.Load(running=1, waiting=2, kv_usage=0.5, prefill_tokens=3)

# (message, its decoder)
MESSAGES = [
    (decisions.Explain(request_id="cmpl-1", last=20), decisions.decode_explain),
    (FORWARDED, forwarding.decode_forward_explained),
    (
        decisions.Explained(engine_id="e1", lease_id=31, decisions=[DECISION]),
        decisions.decode_explained,
    ),
    (
        kv.KvNotice(
            lease_id=10,
            number=3,
            load=LOAD,
            changes=[
                kv.KvStored(hashes=[(1 << 56) - 1]),
                kv.KvRemoved(hashes=[1]),
                kv.KvCleared(),
            ],
            block_size_tokens=32,
        ),
        kv.decode_kv_notice,
    ),
    (
        routing.PickRequest(
            client=10,
            request_id="r",
            prompt_token_ids=[1],
            candidates=[2],
            cache_salt="s",
            adapter=generate.Adapter(name="l", path="/l"),
            session="t",
        ),
        routing.decode_pick_request,
    ),
    (routing.Chosen(lease_id=2, reason="load"), routing.decode_pick_reply),
    (routing.NobodyKnown(), routing.decode_pick_reply),
    (routing.RequestOutcomes(client=10, answered=["a"], released=["b"]), routing.decode_fates),
    (health.Heartbeat(lease_id=10, number=3, ok=False, detail="stuck"), health.decode_heartbeat),
    (REQUEST, generate.decode_generate_request),
    (FULL_REQUEST, generate.decode_generate_request),
    (generate.Hello(client_id="c1"), generate.decode_client_frame),
    (generate.Welcome(), generate.decode_worker_frame),
    (generate.Submit(request_id="r1", request=b"\x8f"), generate.decode_client_frame),
    (
        generate.SubmitReply(request_id="r1", reply=generate.Accepted()),
        generate.decode_worker_frame,
    ),
    (
        generate.SubmitReply(
            request_id="r1", reply=generate.RequestRefused(reason="full", elsewhere=True)
        ),
        generate.decode_worker_frame,
    ),
    (generate.Cancel(request_ids=["r1", "r2"]), generate.decode_client_frame),
    (DELTAS, generate.decode_worker_frame),
    (FULL_DELTAS, generate.decode_worker_frame),
    (JOB, prefill.decode_job),
    (FULL_JOB, prefill.decode_job),
    (
        prefill.Claim(attempt="a1", claim=(1 << 63) - 1, writer_lease_id=LEASE),
        prefill.decode_claim,
    ),
    (prefill.Held(for_s=3.0), prefill.decode_claim_reply),
    (prefill.ClaimRefused(reason="withdrawn"), prefill.decode_claim_reply),
    (
        prefill.Done(attempt="a1", claim=3, outcome="failed", detail="why"),
        prefill.decode_done,
    ),
    (
        prefill.FirstToken(request_id="r1", attempt="a1", token_id=7, cached_tokens=32),
        prefill.decode_first_token,
    ),
    (health.Leave(lease_id=31), health.decode_leave),
    (
        prefill.Written(
            attempt="a1",
            claim=7,
            rank=1,
            num_blocks=63,
            writers=2,
            parts=[prefill.Part(0, 4, 64, 128)],
            last=True,
        ),
        prefill.decode_written,
    ),
    (
        prefill.Written(
            attempt="a1",
            claim=7,
            rank=1,
            first=16,
            num_blocks=8,
            writers=2,
            parts=[prefill.Part(0, 4, 64, 128)],
        ),
        prefill.decode_written,
    ),
    (STATUS, health.decode_engine_status),
]

RECORDS_SENT = [
    ENGINE,
    generate.Adapter(name="l", path="/l"),
    records.LinkRecord(
        prefill_lease_id=31, engine_id="e1", decode_lease_id=32, detail="reset", next_try=1.5
    ),
    records.EndpointRecord(
        component="VllmWorker",
        endpoint="generate",
        namespace="dynamo",
        lease_id=31,
        transport=records.EndpointTransport(nats_tcp="s.generate-1f", stream="10.0.0.1:4000"),
        pid=7,
        host="h",
        status_url="http://h:1",
        started_at=1.5,
        model="m",
    ),
    records.EndpointRecord(
        component="PrefillWorker",
        endpoint="prefill",
        namespace="dynamo",
        lease_id=31,
        transport=records.EndpointTransport(nats_tcp="s"),
    ),
    records.EndpointRecord(
        component="PrefillEngine",
        endpoint="http",
        namespace="dynamo",
        lease_id=31,
        transport=records.EndpointTransport(nats_tcp="s", stream="10.0.0.1:8100"),
        engine=records.StockEngine(
            url="http://10.0.0.1:8100",
            role="prefill",
            protocol="moriio-read",
            transfer_host="10.1.0.1",
            transfer_port=6301,
            notify_port=61005,
        ),
    ),
]

_GOLDEN = Path(__file__).with_name("golden.txt")
# Before it is read: it may be of other messages.
if __name__ == "__main__":
    bytes_of = [(message, encode(message)) for message, _ in MESSAGES]
    bytes_of += [(record, encode_json(record)) for record in RECORDS_SENT]
    _GOLDEN.write_text("".join(f"{type(one).__name__} {data!r}\n" for one, data in bytes_of))
    raise SystemExit

_SAID = [line.split(" ", 1) for line in _GOLDEN.read_text().splitlines()]
_BYTES = [ast.literal_eval(said) for _, said in _SAID]
GOLDEN = [
    (message, decode, golden)
    for (message, decode), golden in zip(MESSAGES, _BYTES[: len(MESSAGES)], strict=True)
]
RECORDS = list(zip(RECORDS_SENT, _BYTES[len(MESSAGES) :], strict=True))

MODULES = (decisions, forwarding, generate, health, kv, prefill, routing)
DECODERS = sorted(
    {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, Decoder)
    }
)


def decoder(name):
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


@pytest.mark.parametrize(("message", "decode", "golden"), GOLDEN)
def test_messages_are_these_bytes_and_come_back(message, decode, golden):
    assert encode(message) == golden
    assert decode(golden) == message
    assert decode(memoryview(golden)) == decode(bytearray(golden)) == message


@pytest.mark.parametrize(("record", "golden"), RECORDS)
def test_records_are_this_json_and_come_back(record, golden):
    assert encode_json(record) == golden
    assert decode_json(golden, type(record)) == record


def test_everything_that_is_sent_has_a_golden_value():
    def parts(value):
        if isinstance(value, msgspec.Struct):
            yield from type(value).__mro__[: -len(msgspec.Struct.__mro__)]
            for name in value.__struct_fields__:
                yield from parts(getattr(value, name))
        elif isinstance(value, list | tuple):
            for item in value:
                yield from parts(item)

    covered = {t for message, *_ in [*GOLDEN, *RECORDS] for t in parts(message)}
    defined = {
        value
        for module in (*MODULES, records)
        for _, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
    }
    assert covered == defined
    assert {decode for _, decode, _ in GOLDEN} == {decoder(name) for name in DECODERS}


@pytest.mark.parametrize(("message", "decode", "golden"), GOLDEN)
def test_every_truncation_is_refused(message, decode, golden):
    for end in range(len(golden)):
        with pytest.raises(ProtocolError, match="malformed message"):
            decode(golden[:end])
    with pytest.raises(ProtocolError):
        decode(golden + b"\x00")


@settings(max_examples=200)
@given(case=st.sampled_from(GOLDEN), at=st.integers(min_value=0), byte=st.integers(0, 255))
def test_a_damaged_message_is_refused_or_still_a_message(case, at, byte):
    _, decode, golden = case
    damaged = bytearray(golden)
    damaged[at % len(golden)] = byte
    try:
        message = decode(bytes(damaged))
    except ProtocolError:
        return
    assert isinstance(message, msgspec.Struct)


@pytest.mark.parametrize("name", DECODERS)
def test_nesting_without_end_is_refused(name):
    with pytest.raises(ProtocolError):
        decoder(name)(b"\x91" * 100_000)
    nested = b"\x81\xa1x" + b"\x91" * 100_000 + b"\x00"
    with pytest.raises(ProtocolError):
        decoder(name)(nested)


def test_the_largest_message_is_read_and_a_larger_one_is_not():
    def request(size):
        return encode(msgspec.structs.replace(REQUEST, sampling=bytes(size)))

    overhead = len(request(1 << 20)) - (1 << 20)
    limit = generate.MAX_SUBMIT_BYTES
    largest = request(limit - overhead)
    assert len(largest) == limit
    assert generate.decode_generate_request(largest).request_id == "r1"
    with pytest.raises(ProtocolError, match=f"{limit + 1} bytes exceeds"):
        generate.decode_generate_request(request(limit - overhead + 1))


def test_media_have_room_beside_the_text():
    for size, fits in ((generate.MAX_INPUT_BYTES, True), (generate.MAX_INPUT_BYTES + 1, False)):
        sent = encode(msgspec.structs.replace(REQUEST, inputs=bytes(size)))
        if fits:
            assert len(generate.decode_generate_request(sent).inputs or b"") == size
        else:
            with pytest.raises(ProtocolError, match="inputs"):
                generate.decode_generate_request(sent)


HELLO = generate.Hello(client_id="c")
SUBMIT = generate.Submit(request_id="r", request=b"")
FIRST_TOKEN = prefill.FirstToken(request_id="r", attempt="a", token_id=1)
CLAIM = prefill.Claim(attempt="a", claim=1, writer_lease_id=1)
WRITTEN = prefill.Written(attempt="a", claim=1, rank=0, num_blocks=1)
#: Values that a field of a message may not have.
OUT_OF_RANGE = [
    (generate.decode_generate_request, REQUEST, "request_id", ["", "r" * 257]),
    (generate.decode_generate_request, REQUEST, "prompt_token_ids", [[-1], [1 << 31], [1.5], None]),
    (generate.decode_client_frame, HELLO, "client_id", ["", "c" * 129]),
    (generate.decode_client_frame, generate.Cancel(request_ids=["r"]), "request_ids", [[""]]),
    (generate.decode_client_frame, SUBMIT, "request_id", [""]),
    (generate.decode_client_frame, SUBMIT, "request", [1]),
    (
        generate.decode_worker_frame,
        generate.SubmitReply(request_id="r", reply=generate.Accepted()),
        "reply",
        [{"type": "Welcome"}],
    ),
    (
        generate.decode_worker_frame,
        DELTAS,
        "deltas",
        [
            [["r", [-1]]],
            [["r", [1 << 31]]],
            [["r", [7], None, None, [9, 3, 5, -0.5]]],
            [["r", [7], None, None, [9, 3, 5, 0.5, 1e300]]],
            [["r", [7], None, None, None, [-1, 1, b"", b"", b""]]],
        ],
    ),
    (prefill.decode_job, JOB, "attempt", ["", "a" * 65]),
    (prefill.decode_job, JOB, "engine_id", [""]),
    (prefill.decode_job, JOB, "num_computed_tokens", [-1]),
    (prefill.decode_job, JOB, "block_ids", [[-1], [1 << 31]]),
    (prefill.decode_job, JOB, "deadline", ["soon"]),
    (prefill.decode_job, FULL_JOB, "first_token", [{"last_token_id": -1}]),
    (prefill.decode_claim, CLAIM, "claim", [-1, 0, 1 << 63, None, "1"]),
    (prefill.decode_claim_reply, prefill.Held(for_s=1.0), "for_s", [0.0, 61.0]),
    (prefill.decode_done, prefill.Done(attempt="a", outcome="written"), "outcome", ["perhaps"]),
    (prefill.decode_first_token, FIRST_TOKEN, "token_id", [-1]),
    (prefill.decode_first_token, FIRST_TOKEN, "cached_tokens", [1 << 31]),
    (prefill.decode_written, WRITTEN, "claim", [-1, None]),
    (prefill.decode_written, WRITTEN, "rank", [-1]),
    (prefill.decode_written, WRITTEN, "writers", [0]),
    (prefill.decode_written, WRITTEN, "parts", [[[0, 0, 0, 64]]]),
    (decisions.decode_explain, decisions.Explain(last=20), "last", [-1]),
]


@pytest.mark.parametrize(("decode", "message", "field", "values"), OUT_OF_RANGE)
def test_values_out_of_range_are_refused(decode, message, field, values):
    assert decode(encode(message)) == message
    fields = msgspec.msgpack.decode(encode(message))
    for value in values:
        with pytest.raises(ProtocolError):
            decode(msgspec.msgpack.encode(fields | {field: value}))


@pytest.mark.parametrize(
    "change",
    [
        {"block_size_tokens": 0},
        {"num_blocks": 0},
        {"ranks": [{"agent": "not base64!", "memory": "DRAM", "device": 0, "regions": []}]},
        {"fingerprint": {"dtype": 3}},
    ],
)
def test_records_out_of_range_are_refused(change):
    fields = msgspec.json.decode(encode_json(ENGINE)) | change
    with pytest.raises(ProtocolError, match="malformed record"):
        decode_json(msgspec.json.encode(fields), records.EngineMetadata)


@settings(max_examples=150)
@given(data=st.binary(max_size=100) | st.text(max_size=100).map(str.encode))
def test_foreign_records_are_refused(data):
    for record_type in (records.EngineMetadata, records.EndpointRecord):
        with pytest.raises(ProtocolError):
            decode_json(data, record_type)


def test_a_record_nested_without_end_is_refused():
    for data in (b"[" * 100_000, b'{"component":' * 100_000):
        with pytest.raises(ProtocolError):
            decode_json(data, records.EndpointRecord)


def test_fields_of_a_newer_peer_are_ignored():
    newer = msgspec.msgpack.decode(encode(JOB)) | {"colour": "blue"}
    assert prefill.decode_job(msgspec.msgpack.encode(newer)) == JOB
    newer = msgspec.json.decode(encode_json(ENGINE)) | {"colour": "blue"}
    assert decode_json(msgspec.json.encode(newer), records.EngineMetadata) == ENGINE


@pytest.mark.parametrize("message", [JOB, HELLO])
def test_a_peer_of_another_version_sees_ours(message):
    """Left out as a default, the version would be read as the reader's own."""
    assert message.wire_version == WIRE_VERSION
    assert msgspec.msgpack.decode(encode(message))["wire_version"] == WIRE_VERSION


def test_the_status_of_data_parallel_ranks_together():
    def status(free: int, age: float | None, writers: list[int]) -> health.EngineStatus:
        return health.EngineStatus(
            metadata=ENGINE,
            free_blocks=free,
            total_blocks=10,
            waiting=1,
            queue_jobs=3,
            last_step_age_s=age,
            unusable_writers=1,
            writers=writers,
        )

    one, other = status(4, 2.0, [7, 5]), status(6, None, [5])
    both = health.joined([one, other])
    assert (both.free_blocks, both.total_blocks, both.waiting) == (10, 20, 2)
    assert (both.queue_jobs, both.unusable_writers, both.writers) == (3, 1, [5, 7])
    assert both.last_step_age_s == 2.0 and health.joined([other]).last_step_age_s is None
