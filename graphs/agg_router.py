"""Aggregated serving with a KV-aware Router process; takes configs/agg.yaml."""

from dynamo_lite.serve.services.services import FRONTEND, ROUTER, VLLM_WORKER

Frontend = (
    FRONTEND.with_defaults(router="component")
    .link(ROUTER)
    .link(VLLM_WORKER.with_defaults(remote_prefill=False))
)
