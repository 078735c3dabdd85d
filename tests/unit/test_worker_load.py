"""What a decode worker reports about its load."""

from types import SimpleNamespace
from typing import Any

from dynamo_lite.engine.base import EngineLoad
from dynamo_lite.protocol import names
from dynamo_lite.protocol.backlog import Backlog, Lane
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.kv import Load
from dynamo_lite.runtime.members.backlog import BacklogFollower
from dynamo_lite.services.config import VllmWorkerConfig
from dynamo_lite.services.decode_worker import VllmWorker
from tests.simulation.servers.memory import MemoryMessaging


async def test_the_queue_is_part_of_it_where_there_is_one():
    worker = VllmWorker(VllmWorkerConfig(), None, SimpleNamespace())  # type: ignore[arg-type]
    engine: Any = SimpleNamespace(load=EngineLoad(running=1, waiting=2, kv_usage=1.5))
    server: Any = SimpleNamespace(waiting_tokens=30)
    without = Load(running=1, waiting=2, kv_usage=1.0, prefill_tokens=30)
    assert worker._load(engine, server) == without
    messaging = MemoryMessaging()
    now, drops = [0.0], list[str]()
    worker._backlog = follower = BacklogFollower("t", lambda: now[0], on_drop=drops.append)
    async with follower.follow(messaging):
        for engine_id in ("a", "b"):
            backlog = Backlog(
                engine_id=engine_id,
                number=1,
                queued_jobs=1,
                queued_tokens={Lane.LONG: 100},
                claimed_jobs=1,
                claimed_tokens=50,
            )
            await messaging.publish(names.backlog_subject("t"), encode(backlog))
        await messaging.publish(names.backlog_subject("t"), b"nonsense")
    said = worker._load(engine, server)
    assert (said.queue_jobs, said.queue_tokens, said.prefill_tokens) == (4, 300, 30)
    assert drops == ["demand"]
    now[0] = 10.0
    assert worker._load(engine, server) == without
