"""Options and commands that the release before this one had, and what to use instead.

Each is refused with this one line, for one release; then its row goes.
"""

from collections.abc import Mapping
from types import MappingProxyType

_ROUTING = ("Frontend.kv-router", "Router.kv-router")
_BY_LOAD = "nothing: engines are chosen by load, and by the prompts that they were sent"

#: `Section`, or `Section.key`, of the configuration file to what to use instead.
REMOVED_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "Forwarder.body-timeout-s": "nothing: a body may take 60 s to arrive",
        "Forwarder.choose-decode": "nothing: `kvt-staged` chooses after the prefill leg, by itself",
        "Forwarder.connect-timeout-s": "nothing: a connection to an engine may take 2 s",
        "Forwarder.prefill-choice": _BY_LOAD,
        "Forwarder.decode-choice": _BY_LOAD,
        "Forwarder.engines.insecure-skip-verify": "`ca-file`: the authority of its certificate",
        "Forwarder.engines.kv-events": "nothing: engines hold what they were sent",
        "Forwarder.engines.kv-replay": "nothing: engines hold what they were sent",
        "Forwarder.health-timeout-s": "nothing: a check of an engine may take 5 s",
        "Forwarder.joined-insecure-skip-verify": "`joined-ca-file`: the authorities' certificates",
        "Forwarder.load-interval-s": "nothing: the load of engines is read each second",
        "Forwarder.prefill-failure": "nothing: the decode engine computes the prompt",
        "Forwarder.routing": "nothing: a token that an engine holds counts as 2 that wait there",
        "Forwarder.tokenize-timeout-s": "nothing: amounts of tokens are estimates",
        "Frontend.canary": "nothing: heartbeats report an engine that does not work",
        "Frontend.kv-router.temperature": "nothing: the best worker is taken",
        "Frontend.kv-router.max-index-blocks": "nothing: 2,000,000 blocks are remembered",
        "Frontend.max-moves": "nothing: a request survives the loss of three workers",
        "Frontend.request-timeout-s": "nothing: a worker has 5 s to accept a request",
        "PrefillWorker.kv-checksum-rate": "nothing: contents of blocks are not compared",
        "PrefillWorker.transfer-thread": "nothing: a rank whose KV is on a GPU has the thread",
        "Processor": "nothing: it is a part of the Frontend, and has no options",
        "Router.kv-router.max-index-blocks": "nothing: 2,000,000 blocks are remembered",
        "PrefillWorker.stream-layers": "nothing: all layers are written after each step",
        "Router.kv-router.temperature": "nothing: the best worker is taken",
        "VllmWorker.transfer-thread": "nothing: a rank whose KV is on a GPU has the thread",
        "VllmWorker.prefill-policy": "the thresholds decide; remove it",
        "VllmWorker.ttft-target-s": "the thresholds decide; remove it",
        "VllmWorker.itl-target-s": "the thresholds decide; remove it",
        "Graph.status-tls-cert": "`Graph.certificates`: a folder; see `dynamo-lite access certs`",
        "Graph.status-tls-key": "`Graph.certificates`: a folder; see `dynamo-lite access certs`",
        "Graph.restart-max-s": "a crashed process is started again after at most 5 s",
        **{f"{section}.load-weight": "1 always; weigh by `kv-weight`" for section in _ROUTING},
        **{f"{section}.request-load-tokens": "32 tokens always" for section in _ROUTING},
        **{f"{section}.max-kv-usage": "0.95 always" for section in _ROUTING},
        "Planner.connector": "`kubernetes` with a workload in it means Kubernetes",
        "Planner.drain-timeout-s": "`terminationGracePeriodSeconds` of the workers' pods",
        "Planner.kubernetes.timeout-s": "5 s always",
        "Planner.stale-s": "every measurement is of the last tick; remove it",
        "Planner.itl-target-s": "KV blocks, `max-num-seqs` and tokens per second decide; remove it",
        "Planner.decode-max-num-seqs": "decode workers report their `max-num-seqs`; remove it",
        "Planner.young-s": "half the time of a start, 30 s at most; see `start-s`",
        "Planner.down-share": "15/16 of the smaller one of the shares for more; remove it",
        "VllmWorker.steal-back": "VllmWorker.max-queue-wait-s: how long a job may wait unclaimed",
        "VllmWorker.switchable": "a worker keeps its role; `scale` removes one and adds one",
        "PrefillWorker.switchable": "a worker keeps its role; `scale` removes one and adds one",
        **{
            f"{section}.queue.{option}": instead
            for section in ("VllmWorker", "PrefillWorker")
            for option, instead in {
                "order": "short-first always; `short-length: 0` makes every job long",
                "ack-wait-s": "nothing: a writer renews its claim, which holds for 3 s",
                "max-deliver": "`VllmWorker.max-remote-prefills`: a job is delivered once",
            }.items()
        },
    }
)

#: llm-d's names of the sidecar's options.
_LLM_D = {
    "--vllm-port": "`--decode http://127.0.0.1:PORT`",
    "--model-server-port": "`--decode http://127.0.0.1:PORT`",
    "--connector": "`--protocol`",
    "--kv-connector": "`--protocol`",
    "--data-parallel-size": "a sidecar for each rank, whose port `--decode` names",
    "--enable-prefiller-sampling": "nothing: the first healthy engine that is named is taken",
    "--mooncake-bootstrap-port": "`--transfer-port`",
    "--cert-path": "`--tls-cert` and `--tls-key`",
    "--secure-proxy": "`--tls-cert` and `--tls-key`",
    "--enable-tls": "`--prefiller-https`, `--decode https://...`",
    "--tls-insecure-skip-verify": "`--ca-file`: the authority of the engines' certificates",
}

#: `command`, `command subcommand` or `command option` to what to use instead.
REMOVED_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "config seal": "nothing: what is set is stored as plain JSON",
        "config set --dry-run": "set the value, and look at `dynamo-lite explain --last 20`",
        "config watch": "`config get` shows what is set",
        "planner unset": "`planner set` with the number that there is",
        "planner explain": "`planner status`; the planner's log has each decision",
        "drain --json": "nothing: it prints the choice as a line",
        "ps --links": "`dynamo-lite top` shows failed links; all others work",
        "join --insecure-skip-verify": "`--ca-file`: the authority of the engine's certificate",
        "join --kv-events": "nothing: the engine is assumed to hold what it was sent",
        "join --kv-replay": "nothing: the engine is assumed to hold what it was sent",
        **{f"sidecar {flag}": instead for flag, instead in _LLM_D.items()},
        "serve --secret-file": "`--Graph.certificates=DIR`; see `dynamo-lite access certs`",
        **{
            f"{command} --secret-file": "`--certificates DIR`, where a graph has them"
            for command in ("config", "explain", "planner")
        },
        "sidecar --ranks": "a sidecar for each rank, whose port `--decode` names",
        "sidecar --prefiller-choice": "nothing: the first healthy engine that is named is taken",
        "sidecar --insecure-skip-verify": "`--ca-file`: the authority of the engines' certificates",
        **{
            f"access {server} {option}": instead
            for server in ("etcd", "nats")
            for option, instead in {
                "--component": "nothing: it prints the users of all components",
                "--env": "the URL and files that it prints, in the configuration",
            }.items()
        },
        "sidecar --prefill-failure": "nothing: the decode engine computes the prompt",
        "switch": "remove one worker and add one: `scale PrefillWorker=1`, `scale VllmWorker=2`",
        "sim": "`python -m tests.simulation` in a checkout",
        "simulate": "`python -m benchmarks.planner` in a checkout plays loads with a planner",
        "top --nats-url": "nothing: `top` reads etcd and the processes' status servers",
        "top --secret-file": "nothing: `top` reads etcd and the processes' status servers",
    }
)


def removed_option(*path: str) -> str | None:
    """What to tell somebody who sets this option; None if there never was such an option. path:
    with the numbers of list entries."""
    return _sentence(REMOVED_OPTIONS.get(".".join(step for step in path if not step.isdigit())))


def removed_command(*words: str) -> str | None:
    """What to tell somebody who gives this command or option of a command."""
    return _sentence(REMOVED_COMMANDS.get(" ".join(words)))


def _sentence(instead: str | None) -> str | None:
    return None if instead is None else f"removed in 0.3.0: {instead}"
