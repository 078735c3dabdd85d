"""The metrics of several Frontends on one page."""

from contextlib import AsyncExitStack

import httpx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import PlainTextResponse

from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport
from dynamo_lite.runtime.process.status import StatusServer
from dynamo_lite.serve.services.frontend.shared_metrics import SharedMetrics, merged


def page(answers: int, latency_s: float) -> str:
    registry = CollectorRegistry()
    finished = Counter("vllm:request_success", "Finished.", ["reason"], registry=registry)
    finished.labels("stop").inc(answers)
    Gauge("vllm:num_requests_running", "Running.", registry=registry).set(answers)
    Histogram("vllm:ttft", "Latency.", buckets=[1.0, 2.0], registry=registry).observe(latency_s)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """By name, Frontend, and what other labels say."""
    return {
        (
            sample.name,
            sample.labels["frontend"],
            "".join(v for k, v in sample.labels.items() if k != "frontend"),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_each_sample_of_each_page_has_the_number_of_its_process():
    text = merged({"0": page(3, 0.5), "1": page(4, 1.5)}).decode()
    found = samples(text)
    assert found["vllm:request_success_total", "0", "stop"] == 3
    assert found["vllm:request_success_total", "1", "stop"] == 4
    assert found["vllm:num_requests_running", "1", ""] == 4
    assert [found["vllm:ttft_bucket", f, "1.0"] for f in "01"] == [1, 0]
    assert [found["vllm:ttft_sum", f, ""] for f in "01"] == [0.5, 1.5]
    # Prometheus refuses a page with a family twice.
    assert text.count("# TYPE vllm:ttft histogram") == 1


def member(instance: int, url: str) -> EndpointRecord:
    return EndpointRecord(
        component="Frontend",
        endpoint="http",
        namespace="n",
        lease_id=instance + 1,
        transport=EndpointTransport(nats_tcp=""),
        instance=instance,
        status_url=url,
    )


async def test_the_port_serves_what_each_process_reports():
    vllm = CollectorRegistry()
    counter = Counter("vllm:of_this_test", "In the registry of vLLM's metrics.", registry=vllm)
    counter.inc(7)
    app = PlainTextResponse("the app's")
    async with AsyncExitStack() as stack:
        status = await stack.enter_async_context(
            StatusServer(dict, CollectorRegistry(), vllm_registry=vllm)
        )
        members = [member(0, status.url), member(1, status.url), member(2, "http://[::1]:1")]
        shared = SharedMetrics(app, lambda: members)
        transport = httpx.ASGITransport(shared)
        http = httpx.AsyncClient(transport=transport, base_url="http://x")
        await stack.enter_async_context(http)
        for path in ("/metrics", "/metrics/"):
            found = samples((await http.get(path)).text)
            ours = {key: value for key, value in found.items() if "of_this_test" in key[0]}
            assert ours == {
                ("vllm:of_this_test_total", "0", ""): 7,
                ("vllm:of_this_test_total", "1", ""): 7,
            }
        assert (await http.get("/metrics/other")).text == "the app's"
        assert (await http.get("/v1/models")).text == "the app's"
