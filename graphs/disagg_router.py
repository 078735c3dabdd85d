"""Conditional disaggregation with a KV-aware Router process; takes configs/disagg.yaml."""

from dynamo_lite.serve.services.services import FRONTEND, PREFILL_WORKER, ROUTER, VLLM_WORKER

Frontend = (
    FRONTEND.with_defaults(router="component").link(ROUTER).link(VLLM_WORKER).link(PREFILL_WORKER)
)
