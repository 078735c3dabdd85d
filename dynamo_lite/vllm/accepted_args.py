"""Which of vLLM's arguments a section of the configuration may have.

`vllm serve` takes all arguments in one process. Here vLLM's front half and its engine are
separate processes, so an argument has no effect in the wrong section. Such arguments are
refused with advice; those of the model are accepted everywhere.
"""

import argparse
from typing import Literal

SectionKind = Literal["engine", "frontend"]

_ENGINES = "it has no effect in this section: set it in the sections of the workers"
_ONE_PROCESS = "the number of Frontend processes is Frontend.ServiceArgs.workers"

#: Groups of vLLM's parser that describe an engine.
_ENGINE_GROUPS = frozenset(
    {
        *("LoadConfig", "AttentionConfig", "MambaConfig", "ParallelConfig", "CacheConfig"),
        *("OffloadConfig", "CompilationConfig", "KernelConfig", "SchedulerConfig"),
        *("ObservabilityConfig", "VllmConfig", "LoRAConfig"),
    }
)
#: Arguments of these groups that vLLM's front half reads.
_READ_IN_FRONT = frozenset(
    {
        *("stream-interval", "max-num-queued-reqs", "max-num-queued-tokens"),
        *("show-hidden-metrics-for-version", "custom-histogram-buckets"),
        *("structured-outputs-config", "reasoning-config", "enable-lora"),
    }
)


def _table(keys_by_reason: dict[str, str]) -> dict[str, str]:
    """The reason for each key. keys_by_reason: separated by blanks."""
    return {key: reason for reason, keys in keys_by_reason.items() for key in keys.split()}


_BOTH = _table(
    {
        "it is not supported here; remove it": (
            "enable-return-routed-experts return-sampling-mask per-request-spec-decode-metrics"
            " kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics enable-mfu-metrics"
            " default-mm-loras enable-tower-connector-lora enable-mixed-moe-lora-format"
            " enable-moe-shared-loras aggregate-engine-logging watermark-config grpc grpc-port"
            " enable-flash-late-interaction"
        ),
        "engines are not put to sleep here: that would take their KV memory away from transfers;"
        " remove it": (
            "enable-sleep-mode sleep-mode-offload-cudagraph sleep-preserve-parameter-names"
        ),
        _ONE_PROCESS: "data-parallel-multi-port-external-lb data-parallel-start-rank",
    }
)
_FRONTEND = _table(
    {
        _ONE_PROCESS: (
            "headless api-server-count data-parallel-supervisor-port dp-supervisor-probe-interval-s"
            " dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold"
        ),
        _ENGINES: (
            "gdn-prefill-backend kda-prefill-backend kda-decode-backend fail-on-environ-validation"
        ),
        "the Frontend's logs are set by --log-format and --verbose, and VLLM_LOGGING_LEVEL": (
            "logging-config log-level log-config-file"
        ),
        "write its keys into this section": "config",
        "the Frontend listens on TCP: set host and port": "uds",
        "the time of a drain is Graph.grace-s": "shutdown-timeout",
        "traces are Graph.otlp-endpoint": "otlp-traces-endpoint collect-detailed-traces",
    }
)
_ENGINE = _table(
    {
        "it has no effect in this section: set it in the section of the Frontend": (
            "disable-log-stats enable-log-requests stream-interval max-num-queued-reqs"
            " max-num-queued-tokens show-hidden-metrics-for-version custom-histogram-buckets"
            " renderer-num-workers io-processor-plugin lora-modules mm-processor-cache-gb"
            " mm-processor-cache-type mm-shm-cache-max-object-size-mb"
        ),
        "set by dynamo-lite itself, see VllmWorker.kv-events; remove it": "kv-events-config",
        "set by dynamo-lite itself: Graph.devices, and ServiceArgs.devices here": "device-ids",
    }
)


def refusal(kind: SectionKind, key: str, group: str) -> str:
    """Returns why a section of this kind may not have the argument; "" if it may.

    key: in kebab-case. group: the title of its group in vLLM's parser.
    """
    if reason := _BOTH.get(key):
        return reason
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
