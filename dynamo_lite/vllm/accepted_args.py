"""Which of vLLM's arguments a section of the configuration may have.

`vllm serve` takes all arguments in one process. Here vLLM's front half and its engine are
separate processes, so an argument has no effect in the wrong section. Such arguments are
refused with advice: no argument without an effect is accepted.
"""

import argparse
from typing import Literal

SectionKind = Literal["engine", "frontend"]

_ENGINES = "it has no effect in this section: set it in the sections of the workers"
_FRONTENDS = "it has no effect in this section: set it in the section of the Frontend"
_ONE_PROCESS = "the number of Frontend processes is Frontend.ServiceArgs.workers"
_NO_LORA = "LoRA adapters are not served here; remove it"
_NO_GRPC = "gRPC is not served here; remove it"
_NO_POOLING = "pooling models are not served here; remove it"
_LOGS = "the Frontend's logs are set by --log-format and --verbose, and VLLM_LOGGING_LEVEL"
_NOT_SENT = "what it makes the engine produce is not sent to clients here; remove it"
_NOT_EXPORTED = "a worker has metrics of its own, without these; remove it"
_NO_SLEEP = (
    "engines are not put to sleep here: that would take their KV memory away from transfers; remove"
    " it"
)

#: Groups of vLLM's parser that describe an engine.
_ENGINE_GROUPS = frozenset(
    {
        *("LoadConfig", "AttentionConfig", "MambaConfig", "ParallelConfig", "CacheConfig"),
        *("OffloadConfig", "CompilationConfig", "KernelConfig", "SchedulerConfig"),
        *("ObservabilityConfig", "VllmConfig"),
    }
)
#: Arguments of these groups that vLLM's front half reads.
_READ_IN_FRONT = frozenset(
    {
        *("stream-interval", "max-num-queued-reqs", "max-num-queued-tokens"),
        *("show-hidden-metrics-for-version", "custom-histogram-buckets"),
        "structured-outputs-config",
    }
)

_BOTH = {
    **dict.fromkeys(
        (
            *("enable-return-routed-experts", "return-sampling-mask"),
            "per-request-spec-decode-metrics",
        ),
        _NOT_SENT,
    ),
    **dict.fromkeys(
        ("kv-cache-metrics", "kv-cache-metrics-sample", "cudagraph-metrics", "enable-mfu-metrics"),
        _NOT_EXPORTED,
    ),
    **dict.fromkeys(("lora-modules", "default-mm-loras"), _NO_LORA),
    **dict.fromkeys(
        (
            *("enable-sleep-mode", "sleep-mode-offload-cudagraph"),
            "sleep-preserve-parameter-names",
        ),
        _NO_SLEEP,
    ),
    "kv-transfer-config": "set by dynamo-lite itself; remove it",
    "aggregate-engine-logging": "there is one engine per worker; remove it",
    "data-parallel-multi-port-external-lb": _ONE_PROCESS,
    "data-parallel-start-rank": _ONE_PROCESS,
}

_FRONTEND = {
    **dict.fromkeys(("headless", "api-server-count"), _ONE_PROCESS),
    **dict.fromkeys(
        (
            "data-parallel-supervisor-port",
            "dp-supervisor-probe-interval-s",
            "dp-supervisor-probe-timeout-s",
            "dp-supervisor-probe-failure-threshold",
        ),
        _ONE_PROCESS,
    ),
    **dict.fromkeys(("grpc", "grpc-port"), _NO_GRPC),
    **dict.fromkeys(("logging-config", "log-level", "log-config-file"), _LOGS),
    **dict.fromkeys(("gdn-prefill-backend", "kda-prefill-backend", "kda-decode-backend"), _ENGINES),
    "config": "write its keys into this section",
    "uds": "the Frontend listens on TCP: set host and port",
    "enable-flash-late-interaction": _NO_POOLING,
    "fail-on-environ-validation": _ENGINES,
    "shutdown-timeout": "the time of a drain is Graph.grace-s",
    "otlp-traces-endpoint": "traces are Graph.otlp-endpoint",
    "collect-detailed-traces": "traces are Graph.otlp-endpoint",
}

_ENGINE = {
    "kv-events-config": "set by dynamo-lite itself, see VllmWorker.kv-events; remove it",
    **dict.fromkeys(
        (
            *("disable-log-stats", "enable-log-requests", "stream-interval"),
            *("max-num-queued-reqs", "max-num-queued-tokens"),
            *("show-hidden-metrics-for-version", "custom-histogram-buckets"),
            *("renderer-num-workers", "io-processor-plugin"),
        ),
        _FRONTENDS,
    ),
}


def refusal(kind: SectionKind, key: str, group: str) -> str:
    """Returns why a section of this kind may not have the argument; "" if it may.

    key: in kebab-case. group: the title of its group in vLLM's parser.
    """
    if reason := _BOTH.get(key):
        return reason
    if group == "LoRAConfig":
        return _NO_LORA
    if kind == "engine":
        return _ENGINE.get(key, "")
    if reason := _FRONTEND.get(key):
        return reason
    if group in _ENGINE_GROUPS and key not in _READ_IN_FRONT:
        return _ENGINES
    return ""


def groups_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Maps each argument in kebab-case to the title of its group."""
    return {
        option.removeprefix("--"): group.title or ""
        for group in parser._action_groups
        for action in group._group_actions
        for option in action.option_strings
        if option.startswith("--") and "_" not in option
    }
