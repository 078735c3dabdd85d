"""The flags of llm-d's routing sidecar, so that its command lines work here.

Source: llm-d/llm-d-router, `pkg/sidecar/proxy/options.go` (2026-08). Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

#: llm-d's names of what hands over.
_CONNECTORS = {"nixlv2": "nixl", "nixl": "nixl", "mooncake": "mooncake", "sglang": "sglang"}
_STAGES = ("prefiller", "decoder")
#: With nothing to set here: they are accepted without effect.
_IGNORED = (
    *("max-idle-conns-per-host", "prefill-max-retries", "prefill-retry-backoff", "pool-group"),
    *("inference-pool", "inference-pool-name", "inference-pool-namespace", "v", "tracing"),
    *("zap-log-level", "zap-encoder", "zap-devel", "zap-stacktrace-level", "zap-time-encoding"),
)
#: What would change the answers, and is not here: refused unless it is turned off.
_MISSING = {
    "ec-connector": "encoder disaggregation",
    "enable-p2p-pull": "pulling cached prefixes from other engines",
    "decode-chunk-size": "chunked decode",
    "moriio-write-mode": "write it as --protocol moriio-write --transfer-host HOST",
    "enable-ssrf-protection": "watching an InferencePool; write the hosts: --allow-prefiller",
    "configuration": "its YAML; write flags",
    "configuration-file": "its YAML; write flags",
}
_FLAGS = {"secure-proxy", "enable-prefiller-sampling", "tracing", "zap-devel", "enable-p2p-pull"}
_FLAGS |= {"enable-ssrf-protection", "moriio-write-mode"}
_NUMBERS = {
    "vllm-port": "decode_port",
    "model-server-port": "decode_port",
    "data-parallel-size": "ranks",
    "mooncake-bootstrap-port": "transfer_port",
}
_SWITCHES = {"secure-proxy": "secure", "enable-prefiller-sampling": "sampling"}
_STAGED = {"enable-tls": "https", "tls-insecure-skip-verify": "unverified"}
_OFF = ("false", "0", "f", "")


@dataclass(kw_only=True)
class LlmdFlags:
    """What llm-d's flags ask for. None, or empty: not said."""

    decode_port: int | None = None
    protocol: str | None = None
    ranks: int | None = None
    transfer_port: int | None = None
    sampling: bool = False
    #: Folder with `tls.crt` and `tls.key`.
    cert_path: str | None = None
    secure: bool | None = None
    https: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    ignored: list[str] = field(default_factory=list[str])
    mistakes: list[str] = field(default_factory=list[str])


def parse(arguments: Sequence[str]) -> LlmdFlags:
    """arguments: those that are not options of ours."""
    found, left = LlmdFlags(), list(arguments)
    while left:
        argument = left.pop(0)
        name, sign, value = argument.removeprefix("-").removeprefix("-").partition("=")
        if not argument.startswith("-") or not name:
            found.mistakes.append(f"{argument}: unexpected; options begin with --")
            continue
        if not sign:
            if name in _FLAGS:
                value = "true"
            elif left and not left[0].startswith("-"):
                value = left.pop(0)
            else:
                value = ""
        _take(found, name, value)
    return found


def _take(found: LlmdFlags, name: str, value: str) -> None:
    off = value.lower() in _OFF
    if name in _NUMBERS:
        setattr(found, _NUMBERS[name], _number(found, name, value))
    elif name in _STAGED:
        setattr(found, _STAGED[name], _stages(found, name, value))
    elif name in ("connector", "kv-connector"):
        found.protocol = _protocol(found, name, value)
    elif name == "cert-path":
        found.cert_path = value
    elif name in _SWITCHES:
        setattr(found, _SWITCHES[name], not off)
    elif name in _IGNORED:
        found.ignored.append(f"--{name}")
    elif name not in _MISSING:
        found.mistakes.append(f"--{name}: no such option; see dynamo-lite sidecar --help")
    elif not off:
        found.mistakes.append(f"--{name}: not supported ({_MISSING[name]})")


def _protocol(found: LlmdFlags, name: str, value: str) -> str | None:
    if value not in _CONNECTORS:
        known = ", ".join(_CONNECTORS)
        found.mistakes.append(f"--{name} {value}: not supported; here are {known}")
    return _CONNECTORS.get(value)


def _number(found: LlmdFlags, name: str, value: str) -> int | None:
    if value.isascii() and value.isdigit():
        return int(value)
    found.mistakes.append(f"--{name}: expected a number, got {value!r}")
    return None


def _stages(found: LlmdFlags, name: str, value: str) -> tuple[str, ...]:
    given = tuple(part.strip() for part in value.split(","))
    wrong = [part for part in given if part not in _STAGES]
    if wrong:
        known = ", ".join(_STAGES)
        found.mistakes.append(f"--{name} {wrong[0]}: not supported; here are {known}")
    return given
