"""Messages byte for byte, and what is not a message.

A golden value that changes breaks running peers: add a defaulted field and
extend the value, or raise WIRE_VERSION.
"""

import hashlib
import inspect

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.protocol import (
    decisions,
    forwarding,
    generate,
    grant,
    health,
    kv,
    prefill,
    queue,
    records,
    routing,
)
from dynamo_lite.protocol.codec import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    Decoder,
    SealedDecoder,
    decode_json,
    encode,
    encode_json,
    encode_sealed,
)
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError
from dynamo_lite.protocol.generate import (
    Accepted,
    Cancel,
    Deltas,
    GenerateRequest,
    Hello,
    LogprobRows,
    PrefillCounts,
    RequestRefused,
    Submit,
    SubmitReply,
    TokenDelta,
    Welcome,
)
from dynamo_lite.protocol.grant import Grant
from dynamo_lite.protocol.options import DecisionThresholds
from dynamo_lite.protocol.prefill import (
    CancelAttempt,
    Claim,
    ClaimRefused,
    Committed,
    EngineStatus,
    FirstToken,
    FirstTokenSampling,
    FirstTokenWanted,
    Granted,
    Landed,
    Leave,
    Part,
    RemotePrefillRequest,
    StayAccepted,
    StayRefused,
    WriterDone,
    WriterStays,
)
from dynamo_lite.protocol.records import (
    EndpointRecord,
    EndpointTransport,
    EngineMetadata,
    EngineRecord,
    KvArray,
    KvRegion,
    LinkRecord,
    RankMetadata,
    StockEngine,
)

LEASE = 0x694D967DA694EA1A

ENGINE = EngineMetadata(
    engine_id="e1",
    lease_id=LEASE,
    fingerprint={"dtype": "bf16"},
    block_size_tokens=32,
    num_blocks=64,
    ranks=(
        RankMetadata(
            agent=b"nixl\x00\xff",
            memory="DRAM",
            device=0,
            regions=(
                KvRegion(
                    layer="model.layers.0",
                    plane=0,
                    base=1 << 46,
                    stride_bytes=8192,
                    block_bytes=4096,
                    tokens=32,
                    arrays=(
                        KvArray(
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

#: ENGINE in msgpack.
ENGINE_PACKED = (
    b"\x86\xa9engine_id\xa2e1"
    b"\xa8lease_id\xcfiM\x96}\xa6\x94\xea\x1a\xabfingerprint\x81\xa5dtype\xa4bf16"
    b"\xb1block_size_tokens \xaanum_blocks@\xa5ranks\x91\x84"
    b"\xa5agent\xc4\x06nixl\x00\xff\xa6memory\xa4DRAM\xa6device\x00"
    b"\xa7regions\x91\x89\xa5layer\xaemodel.layers.0\xa5plane\x00"
    b"\xa4base\xcf\x00\x00@\x00\x00\x00\x00\x00\xacstride_bytes\xcd \x00"
    b"\xabblock_bytes\xcd\x10\x00\xaafirst_head\x00\xaahead_bytes\x00"
    b"\xa6tokens \xa6arrays\x91\x87\xa6offset\x00\xabhead_stride\xcd\x10\x00"
    b"\xacgroup_stride\xcc\x80\xabitem_stride\x00\xacgroup_tokens\x01\xa5items\x01"
    b"\xaaitem_bytes\xcc\x80"
)

REQUEST = GenerateRequest(
    request_id="r1",
    client_id="c1",
    prompt_token_ids=[1, 2, 70000],
    sampling=b"\x81",
    arrival_time=1.5,
)
FULL_REQUEST = GenerateRequest(
    request_id="r1",
    client_id="c1",
    prompt_token_ids=[],
    sampling=b"",
    arrival_time=1.5,
    priority=-1,
    cache_salt="s",
    trace_headers={"traceparent": "00"},
    reasoning_ended=True,
    reasoning_parser_kwargs={"a": [1]},
    output_token_ids=[3],
    timeout_s=0.5,
    moved=True,
    session="t",
    wire_version=8,
)
DELTAS = Deltas(
    deltas=[
        TokenDelta(request_id="r1", token_ids=[7]),
        TokenDelta(request_id="r2", token_ids=[], finish_reason="stop", stop_reason=2),
    ]
)
FULL_DELTAS = Deltas(
    deltas=[
        TokenDelta(
            request_id="r1",
            token_ids=[7],
            finish_reason="stop",
            stop_reason="END",
            prefill=PrefillCounts(
                prompt_tokens=9,
                local_cached_tokens=3,
                external_cached_tokens=5,
                waited_s=0.5,
                prefill_s=0.25,
            ),
            logprobs=LogprobRows(1, 1, b"\x07" + bytes(7), bytes(4), b"\x01" + bytes(7)),
            prompt_logprobs=LogprobRows(0, 0, b"", b"", b""),
        )
    ]
)
JOB = RemotePrefillRequest(
    engine_id="e1",
    request_id="r1",
    attempt="a1",
    prompt_token_ids=[1, 2, 3],
    num_computed_tokens=32,
    block_ids=[4, 5],
    prefix_block_ids=[3],
    deadline=2.5,
)
FULL_JOB = RemotePrefillRequest(
    engine_id="e1",
    request_id="r1",
    attempt="a1",
    prompt_token_ids=[],
    num_computed_tokens=0,
    block_ids=[],
    deadline=2.5,
    priority=3,
    cache_salt="s",
    trace_headers={"t": "0"},
    first_token=FirstTokenWanted(
        sampling=FirstTokenSampling(temperature=0.5, top_k=5, min_p=0.25, seed=-8),
        last_token_id=9,
        cached_tokens=32,
    ),
    wire_version=8,
)
STATUS = EngineStatus(
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
                            candidates=[forwarding.LegCandidate(engine="a:1", score=-1.0)],
                            of=1,
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
        jobs=1,
        prefill_workers=2,
        age_s=0.25,
        tokens=900,
        prefill_workers_alive=3,
    ),
    time_left_s=30.0,
    request_id="cmpl-1-0-0a1b2c3d#1",
    age_s=1.5,
    verdict="remote",
    reason="long",
    thresholds=DecisionThresholds(
        max_local_prefill_length=512,
        max_prefill_queue_size=8,
        queue_view_max_age_s=3.0,
        remote_prefill_timeout_s=30.0,
    ),
    asked=decisions.Asked(attempt="a1", outcome="committed", stages_s={"fill": 0.5}),
)

LOAD = kv.Load(running=1, waiting=2, kv_usage=0.5, prefill_tokens=3)

# (message, its decoder, its bytes)
GOLDEN = [
    (
        queue.QueueReading(engine_id="e1", jobs=3, tokens=900, identity="2026 x", age_s=0.25),
        queue.decode_queue_reading,
        b"\x86\xa9engine_id\xa2e1\xa4jobs\x03\xa6tokens\xcd\x03\x84\xa8identity\xa62026 x\xa5age_s"
        b"\xcb?\xd0\x00\x00\x00\x00\x00\x00\xacwire_version\x08",
    ),
    (
        decisions.Explain(request_id="cmpl-1", last=20),
        decisions.decode_explain,
        b"\x83\xaarequest_id\xa6cmpl-1\xa4last\x14\xa8within_s\xcbA\xcd\xcde\x00\x00\x00\x00",
    ),
    (
        FORWARDED,
        forwarding.decode_forward_explained,
        b"\x82\xa8lease_id\x1f\xa9decisions\x91\xde\x00\x10\xaarequest_id\xa6cmpl-1\xa3i"
        b"ds\x91\xa11\xa5age_s\xcb?\xe0\x00\x00\x00\x00\x00\x00\xa5route\xaf/v1/completions\xa8pr"
        b"otocol\xa4nixl\xadprompt_tokens\x08\xadcached_tokens\x00\xb8max"
        b"_local_prefill_length\x00\xa3how\xaddisaggregated\xa6reas"
        b"on\xa0\xa8attempts\x91\x85\xa5order\xa6serial\xa5alone\xa0\xa7choices\x91\x85\xa3"
        b"leg\xa7prefill\xa6engine\xa3a:1\xa6reason\xa4load\xaacandidates"
        b"\x91\x85\xa6engine\xa3a:1\xaematched_tokens\x00\xabload_tokens\x00\xa8kv"
        b"_usage\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xa5score\xcb\xbf\xf0\x00\x00\x00\x00\x00\x00\xa2of\x01\xa4legs\x91\x87\xa3leg"
        b"\xa7prefill\xa6engine\xa3a:1\xa6status\xcc\xc8\xa7failure\xa0\xa7after_s"
        b"\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xa6head_s\xc0\xa6took_s\xc0\xa7failure\xa0\xa6status\x00\xa7ou"
        b"tcome\xa0\xa5error\xa0\xacfirst_byte_s\xc0\xa6took_s\xc0",
    ),
    (
        decisions.Explained(engine_id="e1", lease_id=31, decisions=[DECISION]),
        decisions.decode_explained,
        b"\x83\xa9engine_id\xa2e1\xa8lease_id\x1f\xa9decisions\x91\x8e\xadprompt_tokens\xcd\x03"
        b"\x84\xadcached_tokens \xa5queue\x85\xa4jobs\x01\xafprefill_workers\x02\xa5age_s\xcb?"
        b"\xd0\x00\x00\x00\x00\x00\x00\xa6tokens\xcd\x03\x84\xb5prefill_workers_alive\x03\xabtime_left_s\xcb@>\x00\x00\x00\x00\x00\x00"
        b"\xactransferable\xc3\xa7leaving\xc2\xaeprefix_awaited\xc2\xaarequest_id\xb3cmpl-1-0-"
        b"0a1b2c3d#1\xa5age_s\xcb?\xf8\x00\x00\x00\x00\x00\x00\xa7verdict\xa6remote\xa6reason"
        b"\xa4long\xaathresholds\x85\xb8max_local_prefill_length\xcd\x02\x00\xb6"
        b"max_prefill_queue_size\x08\xb4queue_view_max_age_s\xcb@\x08\x00\x00\x00\x00\x00\x00"
        b"\xb8remote_prefill_timeout_s\xcb@>\x00\x00\x00\x00\x00\x00\xb8max_prefill_queue_token"
        b"s\x00\xaacomputed_s\xc0\xa5asked\x84\xa7attempt\xa2a1\xa7outcome\xa9committed\xa8stag"
        b"es_s\x81\xa4fill\xcb?\xe0\x00\x00\x00\x00\x00\x00\xa6detail\xa0",
    ),
    (
        kv.KvNotice(
            lease_id=10,
            number=3,
            load=LOAD,
            changes=[
                kv.KvStored(hashes=[(1 << 56) - 1]),
                kv.KvRemoved(hashes=[1], cut=[2]),
                kv.KvCleared(),
            ],
        ),
        kv.decode_kv_notice,
        b"\x85\xa8lease_id\x0a\xa6number\x03\xa4load\x94\x01\x02\xcb?\xe0\x00\x00\x00\x00\x00\x00"
        b"\x03\xa7changes\x93\x92\xa1s\x91\xcf\x00\xff\xff\xff\xff\xff\xff\xff"
        b"\x93\xa1r\x91\x01\x91\x02\x91\xa1c\xacwire_version\x08",
    ),
    (
        routing.PickRequest(
            client=10,
            request_id="r",
            prompt_token_ids=[1],
            candidates=[2],
            cache_salt="s",
            session="t",
        ),
        routing.decode_pick_request,
        b"\x87\xa6client\x0a\xaarequest_id\xa1r\xb0prompt_token_ids\x91\x01\xaacandidates\x91\x02"
        b"\xaacache_salt\xa1s\xa7session\xa1t\xacwire_version\x08",
    ),
    (
        routing.Chosen(lease_id=2, reason="load"),
        routing.decode_pick_reply,
        b"\x83\xa4type\xa6Chosen\xa8lease_id\x02\xa6reason\xa4load",
    ),
    (
        routing.NobodyKnown(),
        routing.decode_pick_reply,
        b"\x81\xa4type\xabNobodyKnown",
    ),
    (
        routing.RequestOutcomes(client=10, answered=["a"], released=["b"]),
        routing.decode_fates,
        b"\x84\xa6client\x0a\xa8answered\x91\xa1a\xa8released\x91\xa1b\xacwire_version\x08",
    ),
    (
        kv.KvSnapshotRequest(part=1, parts=2),
        kv.decode_kv_snapshot_request,
        b"\x82\xa4part\x01\xa5parts\x02",
    ),
    (
        kv.KvSnapshot(
            lease_id=10,
            number=3,
            part=1,
            parts=2,
            block_size_tokens=32,
            load=LOAD,
            held=[1],
            cut=[3],
        ),
        kv.decode_kv_snapshot,
        b"\x89\xa8lease_id\x0a\xa6number\x03\xa4part\x01\xa5parts\x02\xb1block_size_tokens \xa4load"
        b"\x94\x01\x02\xcb?\xe0\x00\x00\x00\x00\x00\x00\x03\xa4held\x91\x01\xa3cut\x91\x03"
        b"\xacwire_version\x08",
    ),
    (
        health.Heartbeat(lease_id=10, number=3, ok=False, detail="stuck"),
        health.decode_heartbeat,
        b"\x85\xa8lease_id\x0a\xa6number\x03\xa2ok\xc2\xa6detail\xa5stuck\xacwire_version\x08",
    ),
    (
        REQUEST,
        generate.decode_generate_request,
        b"\x8f\xaarequest_id\xa2r1\xa9client_id\xa2c1"
        b"\xb0prompt_token_ids\x93\x01\x02\xce\x00\x01\x11p\xa8sampling\xc4\x01\x81"
        b"\xacarrival_time\xcb?\xf8\x00\x00\x00\x00\x00\x00\xa8priority\x00"
        b"\xaacache_salt\xc0\xadtrace_headers\xc0\xafreasoning_ended\xc0"
        b"\xb7reasoning_parser_kwargs\xc0\xb0output_token_ids\x90\xa9timeout_s\xc0"
        b"\xa5moved\xc2\xa7session\xc0\xacwire_version\x08",
    ),
    (
        FULL_REQUEST,
        generate.decode_generate_request,
        b"\x8f\xaarequest_id\xa2r1\xa9client_id\xa2c1\xb0prompt_token_ids\x90"
        b"\xa8sampling\xc4\x00\xacarrival_time\xcb?\xf8\x00\x00\x00\x00\x00\x00"
        b"\xa8priority\xff\xaacache_salt\xa1s\xadtrace_headers\x81"
        b"\xabtraceparent\xa200\xafreasoning_ended\xc3"
        b"\xb7reasoning_parser_kwargs\x81\xa1a\x91\x01\xb0output_token_ids\x91\x03"
        b"\xa9timeout_s\xcb?\xe0\x00\x00\x00\x00\x00\x00\xa5moved\xc3\xa7session\xa1t"
        b"\xacwire_version\x08",
    ),
    (
        Hello(client_id="c1"),
        generate.decode_client_frame,
        b"\x83\xa4type\xa5Hello\xa9client_id\xa2c1\xacwire_version\x08",
    ),
    (
        Welcome(),
        generate.decode_worker_frame,
        b"\x81\xa4type\xa7Welcome",
    ),
    (
        Submit(request_id="r1", request=b"\x8f"),
        generate.decode_client_frame,
        b"\x83\xa4type\xa6Submit\xaarequest_id\xa2r1\xa7request\xc4\x01\x8f",
    ),
    (
        SubmitReply(request_id="r1", reply=Accepted()),
        generate.decode_worker_frame,
        b"\x83\xa4type\xabSubmitReply\xaarequest_id\xa2r1\xa5reply\x81\xa4type\xa8Accepted",
    ),
    (
        SubmitReply(request_id="r1", reply=RequestRefused(reason="full", elsewhere=True)),
        generate.decode_worker_frame,
        b"\x83\xa4type\xabSubmitReply\xaarequest_id\xa2r1"
        b"\xa5reply\x85\xa4type\xaeRequestRefused\xa6reason\xa4full\xa9elsewhere\xc3"
        b"\xa4busy\xc2\xadretry_after_s\xcb?\xf0\x00\x00\x00\x00\x00\x00",
    ),
    (
        Cancel(request_ids=["r1", "r2"]),
        generate.decode_client_frame,
        b"\x82\xa4type\xa6Cancel\xabrequest_ids\x92\xa2r1\xa2r2",
    ),
    (
        DELTAS,
        generate.decode_worker_frame,
        b"\x82\xa4type\xa6Deltas"
        b"\xa6deltas\x92\x97\xa2r1\x91\x07\xc0\xc0\xc0\xc0\xc0\x97\xa2r2\x90"
        b"\xa4stop\x02\xc0\xc0\xc0",
    ),
    (
        FULL_DELTAS,
        generate.decode_worker_frame,
        b"\x82\xa4type\xa6Deltas\xa6deltas\x91\x97\xa2r1\x91\x07"
        b"\xa4stop\xa3END\x95\t\x03\x05\xcb?\xe0"
        b"\x00\x00\x00\x00\x00\x00\xcb?\xd0\x00\x00\x00\x00\x00\x00\x95"
        b"\x01\x01\xc4\x08\x07\x00\x00\x00\x00\x00\x00\x00\xc4\x04\x00\x00"
        b"\x00\x00\xc4\x08\x01\x00\x00\x00\x00\x00\x00\x00\x95\x00\x00\xc4"
        b"\x00\xc4\x00\xc4\x00",
    ),
    (
        JOB,
        prefill.decode_job,
        b"\x8d\xa9engine_id\xa2e1\xaarequest_id\xa2r1\xa7attempt\xa2a1"
        b"\xb0prompt_token_ids\x93\x01\x02\x03\xb3num_computed_tokens "
        b"\xa9block_ids\x92\x04\x05\xb0prefix_block_ids\x91\x03"
        b"\xa8deadline\xcb@\x04\x00\x00\x00\x00\x00\x00"
        b"\xa8priority\x00\xaacache_salt\xc0\xadtrace_headers\xc0\xabfirst_token\xc0"
        b"\xacwire_version\x08",
    ),
    (
        FULL_JOB,
        prefill.decode_job,
        b"\x8d\xa9engine_id\xa2e1\xaarequest_id\xa2r1\xa7attempt\xa2a1"
        b"\xb0prompt_token_ids\x90\xb3num_computed_tokens\x00\xa9block_ids\x90"
        b"\xb0prefix_block_ids\x90\xa8deadline\xcb@\x04\x00\x00\x00\x00\x00\x00\xa8priority\x03"
        b"\xaacache_salt\xa1s\xadtrace_headers\x81\xa1t\xa10"
        b"\xabfirst_token\x83\xa8sampling\x85\xabtemperature\xcb?\xe0\x00\x00\x00\x00\x00\x00"
        b"\xa5top_p\xcb?\xf0\x00\x00\x00\x00\x00\x00\xa5top_k\x05"
        b"\xa5min_p\xcb?\xd0\x00\x00\x00\x00\x00\x00\xa4seed\xf8"
        b"\xadlast_token_id\x09\xadcached_tokens\x20\xacwire_version\x08",
    ),
    (
        Claim(attempt="a1", writer_lease_id=LEASE, held_s=0.5, number=3),
        prefill.decode_claim,
        b"\x84\xa7attempt\xa2a1\xafwriter_lease_id\xcfiM\x96}\xa6\x94\xea\x1a"
        b"\xa6held_s\xcb?\xe0\x00\x00\x00\x00\x00\x00\xa6number\x03",
    ),
    (
        Granted(
            granted_at=0.5,
            grant=Grant(
                id=7,
                engine_id="e1",
                attempt="a1",
                writer_lease_id=31,
                claim=3,
                blocks=b"01",
                for_s=0.5,
                seal=b"23",
            ),
        ),
        prefill.decode_claim_reply,
        b"\x83\xa4type\xa7Granted\xaagranted_at\xcb?\xe0\x00\x00\x00\x00\x00\x00"
        b"\xa5grant\x88\xa2id\x07\xa9engine_id\xa2e1\xa7attempt\xa2a1\xafwriter_lease_id\x1f"
        b"\xa5claim\x03\xa6blocks\xc4\x0201\xa5for_s\xcb?\xe0\x00\x00\x00\x00\x00\x00"
        b"\xa4seal\xc4\x0223",
    ),
    (
        ClaimRefused(reason="withdrawn"),
        prefill.decode_claim_reply,
        b"\x83\xa4type\xacClaimRefused\xa6reason\xa9withdrawn\xa9elsewhere\xc2",
    ),
    (
        WriterDone(attempt="a1", outcome="failed", detail="why", writer_lease_id=31, number=3),
        prefill.decode_writer_done,
        b"\x86\xa7attempt\xa2a1\xa7outcome\xa6failed\xa6detail\xa3why\xafwriter_lease_id\x1f"
        b"\xa6took_s\xc0\xa6number\x03",
    ),
    (
        FirstToken(request_id="r1", attempt="a1", token_id=7, cached_tokens=32),
        prefill.decode_first_token,
        b"\x84\xaarequest_id\xa2r1\xa7attempt\xa2a1\xa8token_id\x07\xadcached_tokens ",
    ),
    (
        WriterStays(attempt="a1", writer_lease_id=31, for_s=3.0, number=7),
        prefill.decode_writer_stays,
        b"\x84\xa7attempt\xa2a1\xafwriter_lease_id\x1f\xa5for_s\xcb@\x08\x00\x00\x00\x00\x00\x00"
        b"\xa6number\x07",
    ),
    (StayAccepted(), prefill.decode_stay_reply, b"\x81\xa4type\xacStayAccepted"),
    (
        StayRefused(reason="not claimed"),
        prefill.decode_stay_reply,
        b"\x82\xa4type\xabStayRefused\xa6reason\xabnot claimed",
    ),
    (
        CancelAttempt(attempt="a1", engine_id="e1"),
        prefill.decode_cancel_attempt,
        b"\x82\xa7attempt\xa2a1\xa9engine_id\xa2e1",
    ),
    (
        Leave(lease_id=31),
        prefill.decode_leave,
        b"\x81\xa8lease_id\x1f",
    ),
    (
        Committed(
            attempt="a1",
            rank=1,
            num_blocks=63,
            writers=2,
            parts=[Part(0, 4, 64, 128)],
            grant=7,
        ),
        prefill.decode_notice,
        b"\x87\xa4type\xa9Committed\xa7attempt\xa2a1\xa4rank\x01\xaanum_blocks?"
        b"\xa7writers\x02\xa5parts\x91\x94\x00\x04@\xcc\x80\xa5grant\x07",
    ),
    (
        Landed(
            attempt="a1",
            rank=1,
            first=16,
            num_blocks=8,
            writers=2,
            parts=[Part(0, 4, 64, 128)],
            grant=7,
        ),
        prefill.decode_notice,
        b"\x88\xa4type\xa6Landed\xa7attempt\xa2a1\xa4rank\x01\xa5first\x10\xaanum_blocks\x08"
        b"\xa7writers\x02\xa5parts\x91\x94\x00\x04@\xcc\x80\xa5grant\x07",
    ),
    (
        STATUS,
        prefill.decode_engine_status,
        b"\x8c\xa8metadata" + ENGINE_PACKED + b"\xabfree_blocks<\xactotal_blocks@\xa7waiting\x00"
        b"\xaewaiting_tokens\x00\xabquarantined\x00\xaaqueue_jobs\xc0\xacqueue_tokens\xc0"
        b"\xaflast_step_age_s\xcb?\xe0\x00\x00\x00\x00\x00\x00"
        b"\xb4unresponsive_writers\x02\xb0unusable_writers\x01"
        b"\xa7writers\x91\xcfiM\x96}\xa6\x94\xea\x1a",
    ),
]

RECORDS = [
    (
        ENGINE,
        b'{"engine_id":"e1","lease_id":7587886413599009306,"fingerprint":{"dtype":"bf16"},'
        b'"block_size_tokens":32,"num_blocks":64,"ranks":[{"agent":"bml4bAD/","memory":"DRAM",'
        b'"device":0,"regions":[{"layer":"model.layers.0","plane":0,"base":70368744177664,'
        b'"stride_bytes":8192,"block_bytes":4096,"first_head":0,"head_bytes":0,'
        b'"tokens":32,"arrays":[{"offset":0,"head_stride":4096,"group_stride":128,'
        b'"item_stride":0,"group_tokens":1,"items":1,"item_bytes":128}]}]}]}',
    ),
    (
        LinkRecord(
            prefill_lease_id=31,
            engine_id="e1",
            decode_lease_id=32,
            detail="reset",
            next_try=1.5,
        ),
        b'{"prefill_lease_id":31,"engine_id":"e1","decode_lease_id":32,"detail":"reset",'
        b'"next_try":1.5}',
    ),
    (
        EndpointRecord(
            component="VllmWorker",
            endpoint="generate",
            namespace="dynamo",
            lease_id=31,
            transport=EndpointTransport(nats_tcp="s.generate-1f", stream="10.0.0.1:4000"),
            pid=7,
            host="h",
            status_url="http://h:1",
            started_at=1.5,
            model="m",
        ),
        b'{"component":"VllmWorker","endpoint":"generate","namespace":"dynamo","lease_id":31,'
        b'"transport":{"nats_tcp":"s.generate-1f","stream":"10.0.0.1:4000"},"pid":7,"host":"h",'
        b'"status_url":"http://h:1","started_at":1.5,"model":"m"}',
    ),
    (
        EndpointRecord(
            component="PrefillWorker",
            endpoint="prefill",
            namespace="dynamo",
            lease_id=31,
            transport=EndpointTransport(nats_tcp="s"),
        ),
        b'{"component":"PrefillWorker","endpoint":"prefill","namespace":"dynamo","lease_id":31,'
        b'"transport":{"nats_tcp":"s"}}',
    ),
    (
        EndpointRecord(
            component="PrefillEngine",
            endpoint="http",
            namespace="dynamo",
            lease_id=31,
            transport=EndpointTransport(nats_tcp="s", stream="10.0.0.1:8100"),
            engine=StockEngine(
                url="http://10.0.0.1:8100",
                role="prefill",
                protocol="moriio-read",
                transfer_host="10.1.0.1",
                transfer_port=6301,
                notify_port=61005,
            ),
        ),
        b'{"component":"PrefillEngine","endpoint":"http","namespace":"dynamo","lease_id":31,'
        b'"transport":{"nats_tcp":"s","stream":"10.0.0.1:8100"},'
        b'"engine":{"url":"http://10.0.0.1:8100","role":"prefill","protocol":"moriio-read",'
        b'"transfer_host":"10.1.0.1","transfer_port":6301,"notify_port":61005}}',
    ),
    (
        EngineRecord(checksum="00ff", metadata=msgspec.Raw(b'{"engine_id":"e1"}')),
        b'{"checksum":"00ff","metadata":{"engine_id":"e1"}}',
    ),
]

MODULES = (decisions, forwarding, grant, generate, health, kv, prefill, queue, routing)
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


def wire(decode: Decoder, data: bytes) -> bytes:
    """What travels of a message whose msgpack is `data`."""
    if isinstance(decode, SealedDecoder):
        return hashlib.blake2b(data, digest_size=8).digest() + data
    return data


@pytest.mark.parametrize(("message", "decode", "golden"), GOLDEN)
def test_messages_are_these_bytes_and_come_back(message, decode, golden):
    assert encode(message) == golden
    sent = wire(decode, golden)
    assert sent == (encode_sealed(message) if sent != golden else golden)
    assert decode(sent) == message
    assert decode(memoryview(sent)) == decode(bytearray(sent)) == message


def test_a_seal_is_these_bytes():
    seal = bytes.fromhex("dead292ee10d7215")
    assert encode_sealed(Leave(lease_id=31)) == seal + b"\x81\xa8lease_id\x1f"


SEALED = [(message, decode) for message, decode, _ in GOLDEN if isinstance(decode, SealedDecoder)]


@settings(max_examples=200, deadline=None)
@given(case=st.sampled_from(SEALED), at=st.integers(min_value=0), bit=st.integers(0, 7))
def test_no_change_of_a_sealed_message_goes_unnoticed(case, at, bit):
    message, decode = case
    sent = bytearray(encode_sealed(message))
    sent[at % len(sent)] ^= 1 << bit
    with pytest.raises(ProtocolError, match="seal is broken"):
        decode(bytes(sent))


@pytest.mark.parametrize(("message", "decode"), SEALED)
def test_who_may_write_is_said_in_sealed_messages_only(message, decode):
    with pytest.raises(ProtocolError, match="seal is broken"):
        decode(encode(message))


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
    sent = wire(decode, golden)
    for end in range(len(sent)):
        with pytest.raises(ProtocolError, match="malformed message"):
            decode(sent[:end])
    for end in range(len(golden)):
        with pytest.raises(ProtocolError, match="malformed message"):
            decode(wire(decode, golden[:end]))
    with pytest.raises(ProtocolError):
        decode(wire(decode, golden + b"\x00"))


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=200))
def test_foreign_bytes_are_refused(name, data):
    """The only error is ours, whatever arrives."""
    try:
        decoder(name)(wire(decoder(name), data))
    except DynamoLiteError as exc:
        assert isinstance(exc, ProtocolError)


MSGPACK = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
    | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["type", "attempt", "request_id", "deltas", "reason", "wire_version"]),
        inner | st.sampled_from(["Hello", "Accepted", "Granted", "Deltas"]),
        max_size=5,
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=60, deadline=None)
@given(value=MSGPACK)
def test_well_formed_data_of_another_shape_is_refused_or_a_message(name, value):
    try:
        message = decoder(name)(wire(decoder(name), msgspec.msgpack.encode(value)))
    except ProtocolError:
        return
    assert isinstance(message, msgspec.Struct)


@settings(max_examples=200, deadline=None)
@given(case=st.sampled_from(GOLDEN), at=st.integers(min_value=0), byte=st.integers(0, 255))
def test_a_damaged_message_is_refused_or_still_a_message(case, at, byte):
    _, decode, golden = case
    damaged = bytearray(golden)
    damaged[at % len(golden)] = byte
    try:
        message = decode(wire(decode, bytes(damaged)))
    except ProtocolError:
        return
    assert isinstance(message, msgspec.Struct)


@pytest.mark.parametrize("name", DECODERS)
def test_nesting_without_end_is_refused(name):
    with pytest.raises(ProtocolError):
        decoder(name)(wire(decoder(name), b"\x91" * 100_000))
    nested = b"\x81\xa1x" + b"\x91" * 100_000 + b"\x00"
    with pytest.raises(ProtocolError):
        decoder(name)(wire(decoder(name), nested))


def test_the_largest_message_is_read_and_a_larger_one_is_not():
    def request(size):
        return encode(msgspec.structs.replace(REQUEST, sampling=bytes(size)))

    overhead = len(request(1 << 20)) - (1 << 20)
    largest = request(MAX_MESSAGE_BYTES - overhead)
    assert len(largest) == MAX_MESSAGE_BYTES
    assert generate.decode_generate_request(largest).request_id == "r1"
    with pytest.raises(ProtocolError, match=f"{MAX_MESSAGE_BYTES + 1} bytes exceeds"):
        generate.decode_generate_request(request(MAX_MESSAGE_BYTES - overhead + 1))


@pytest.mark.parametrize(
    ("decode", "message", "change"),
    [
        (generate.decode_generate_request, REQUEST, {"request_id": ""}),
        (generate.decode_generate_request, REQUEST, {"request_id": "r" * 257}),
        (generate.decode_generate_request, REQUEST, {"prompt_token_ids": [-1]}),
        (generate.decode_generate_request, REQUEST, {"prompt_token_ids": [1 << 31]}),
        (generate.decode_generate_request, REQUEST, {"prompt_token_ids": [1.5]}),
        (generate.decode_generate_request, REQUEST, {"prompt_token_ids": None}),
        (generate.decode_client_frame, Hello(client_id="c"), {"client_id": ""}),
        (generate.decode_client_frame, Hello(client_id="c"), {"client_id": "c" * 129}),
        (generate.decode_client_frame, Cancel(request_ids=["r"]), {"request_ids": [""]}),
        (generate.decode_client_frame, Submit(request_id="r", request=b""), {"request_id": ""}),
        (generate.decode_client_frame, Submit(request_id="r", request=b""), {"request": 1}),
        (
            generate.decode_worker_frame,
            SubmitReply(request_id="r", reply=Accepted()),
            {"reply": {"type": "Welcome"}},
        ),
        (prefill.decode_job, JOB, {"attempt": ""}),
        (prefill.decode_job, JOB, {"attempt": "a" * 65}),
        (prefill.decode_job, JOB, {"engine_id": ""}),
        (prefill.decode_job, JOB, {"num_computed_tokens": -1}),
        (prefill.decode_job, JOB, {"block_ids": [-1]}),
        (prefill.decode_job, JOB, {"block_ids": [1 << 31]}),
        (prefill.decode_job, JOB, {"deadline": "soon"}),
        (
            prefill.decode_writer_done,
            WriterDone(attempt="a", outcome="written"),
            {"outcome": "perhaps"},
        ),
        (
            prefill.decode_first_token,
            FirstToken(request_id="r", attempt="a", token_id=1),
            {"token_id": -1},
        ),
        (
            prefill.decode_first_token,
            FirstToken(request_id="r", attempt="a", token_id=1),
            {"cached_tokens": 1 << 31},
        ),
        (prefill.decode_job, FULL_JOB, {"first_token": {"last_token_id": 1}}),
        (
            prefill.decode_writer_stays,
            WriterStays(attempt="a", writer_lease_id=1, for_s=1.0),
            {"for_s": 0.0},
        ),
        (
            prefill.decode_writer_stays,
            WriterStays(attempt="a", writer_lease_id=1, for_s=1.0),
            {"for_s": 61.0},
        ),
        (prefill.decode_notice, Committed(attempt="a", rank=0, num_blocks=1), {"rank": -1}),
        (prefill.decode_notice, Committed(attempt="a", rank=0, num_blocks=1), {"writers": 0}),
        (
            prefill.decode_notice,
            Committed(attempt="a", rank=0, num_blocks=1),
            {"parts": [[0, 0, 0, 64]]},
        ),
    ],
)
def test_values_out_of_range_are_refused(decode, message, change):
    assert decode(wire(decode, encode(message))) == message
    fields = msgspec.msgpack.decode(encode(message)) | change
    with pytest.raises(ProtocolError):
        decode(wire(decode, msgspec.msgpack.encode(fields)))


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
        decode_json(msgspec.json.encode(fields), EngineMetadata)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=100) | st.text(max_size=100).map(str.encode))
def test_foreign_records_are_refused(data):
    for record_type in (EngineMetadata, EndpointRecord):
        with pytest.raises(ProtocolError):
            decode_json(data, record_type)


def test_a_record_nested_without_end_is_refused():
    for data in (b"[" * 100_000, b'{"component":' * 100_000):
        with pytest.raises(ProtocolError):
            decode_json(data, EndpointRecord)


def test_fields_of_a_newer_peer_are_ignored():
    newer = msgspec.msgpack.decode(encode(JOB)) | {"colour": "blue"}
    assert prefill.decode_job(wire(prefill.decode_job, msgspec.msgpack.encode(newer))) == JOB
    newer = msgspec.json.decode(encode_json(ENGINE)) | {"colour": "blue"}
    assert decode_json(msgspec.json.encode(newer), EngineMetadata) == ENGINE


@pytest.mark.parametrize("message", [REQUEST, JOB, Hello(client_id="c")])
def test_a_peer_of_another_version_sees_ours(message):
    """Left out as a default, the version would be read as the reader's own."""
    assert message.wire_version == WIRE_VERSION
    assert msgspec.msgpack.decode(encode(message))["wire_version"] == WIRE_VERSION


def test_what_earlier_versions_say_of_claims_and_promises_can_be_read():
    promise = b"\x83\xa7attempt\xa2a1\xafwriter_lease_id\x1f\xa5for_s\xcb@\x08\0\0\0\0\0\0"
    stays = prefill.decode_writer_stays(wire(prefill.decode_writer_stays, promise))
    assert stays == WriterStays(attempt="a1", writer_lease_id=31, for_s=3.0, number=0)
    assert prefill.decode_claim_reply(b"\x81\xa4type\xa7Granted") == Granted()


def test_a_job_of_an_earlier_version_asks_for_no_first_token():
    fields = msgspec.msgpack.decode(encode(FULL_JOB))
    del fields["first_token"]
    old = wire(prefill.decode_job, msgspec.msgpack.encode(fields))
    assert prefill.decode_job(old) == msgspec.structs.replace(FULL_JOB, first_token=None)


def test_the_empty_answer_of_earlier_versions_is_no_accepted_promise():
    with pytest.raises(ProtocolError):
        prefill.decode_stay_reply(b"")
