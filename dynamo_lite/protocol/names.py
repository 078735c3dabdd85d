"""Every etcd key and NATS subject, one function each.

Lease ids appear in lower-case hexadecimal without prefix or leading zeros.
Endpoint names may contain `/` (`chat/completions`).
"""

import hashlib
import re

_NAMESPACE = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
#: Ids of engine incarnations; they are part of keys and subjects.
ENGINE_ID = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"


def is_namespace(text: str) -> bool:
    """Whether `text` may name a namespace: it becomes part of keys and subjects."""
    return _NAMESPACE.fullmatch(text) is not None


def is_engine_id(text: str) -> bool:
    """Whether `text` may name an engine incarnation."""
    return re.fullmatch(ENGINE_ID, text) is not None


def components_prefix(namespace: str) -> str:
    return f"{namespace}/components/"


def endpoint_prefix(namespace: str, component: str, endpoint: str) -> str:
    return f"{components_prefix(namespace)}{component}/{endpoint}:"


def endpoint_key(namespace: str, component: str, endpoint: str, lease_id: int) -> str:
    return f"{endpoint_prefix(namespace, component, endpoint)}{lease_id:x}"


def endpoint_subject(namespace: str, component: str, endpoint: str, lease_id: int) -> str:
    """The NATS request subject of one instance of one endpoint."""
    digest = hashlib.sha256(f"{namespace}/{component}".encode()).hexdigest()[:8]
    return f"{namespace}_{component.lower()}_{digest}.{endpoint}-{lease_id:x}"


def health_subject(namespace: str, component: str) -> str:
    """Heartbeats of all instances of a component, one per second and instance."""
    return f"{namespace}_health.{component}"


def live_options_key(namespace: str, component: str) -> str:
    """The live options of a component."""
    return f"{namespace}/config/{component}"


def adapters_prefix(namespace: str) -> str:
    return f"{namespace}/adapters/"


def adapter_key(namespace: str, adapter: str) -> str:
    """A LoRA adapter that a client has loaded."""
    return f"{adapters_prefix(namespace)}{adapter}"


def planner_prefix(namespace: str) -> str:
    return f"{namespace}/planner/"


def planner_leader_key(namespace: str) -> str:
    """The planner that acts."""
    return f"{planner_prefix(namespace)}leader"


def planner_wanted_key(namespace: str) -> str:
    """The numbers of workers that are wanted."""
    return f"{planner_prefix(namespace)}wanted"


def kv_subject(namespace: str, component: str) -> str:
    """Notices of all instances of a component: prefixes held, and load."""
    return f"{namespace}_kv.{component}"


def kv_snapshot_subject(namespace: str, component: str, lease_id: int) -> str:
    """Requests to one instance to publish all prefixes that it holds."""
    return f"{kv_subject(namespace, component)}.{lease_id:x}.snapshot"


def fates_subject(namespace: str, router_lease_id: int) -> str:
    """Notices of Frontends to one router: outcomes of requests."""
    return f"{namespace}_router.{router_lease_id:x}.fates"


def nixl_metadata_prefix(namespace: str) -> str:
    return f"{namespace}/nixl_metadata/"


def nixl_metadata_key(namespace: str, engine_id: str) -> str:
    return f"{nixl_metadata_prefix(namespace)}{engine_id}"


def links_prefix(namespace: str) -> str:
    return f"{namespace}/links/"


def link_key(namespace: str, prefill_lease_id: int, engine_id: str) -> str:
    """There while the prefill worker does not use its link to the decode engine."""
    return f"{links_prefix(namespace)}{prefill_lease_id:x}:{engine_id}"


def prefill_stream(namespace: str) -> str:
    """Name of the JetStream stream that holds the prefill queue."""
    return f"{namespace}_prefill_queue"


def prefill_jobs_subject(namespace: str) -> str:
    return f"{prefill_stream(namespace)}.jobs"


def claim_subject(namespace: str, engine_id: str) -> str:
    """Requests from prefill workers to a decode engine: may I write this attempt, or go on?"""
    return f"{namespace}_engine.{engine_id}.claim"


def done_subject(namespace: str, engine_id: str) -> str:
    """Notices to a decode engine: the writer will not touch the attempt again."""
    return f"{namespace}_engine.{engine_id}.done"


def describe_subject(namespace: str, engine_id: str) -> str:
    """Requests to an engine's process for its `EngineStatus`."""
    return f"{namespace}_engine.{engine_id}.describe"


def explain_subject(namespace: str, engine_id: str) -> str:
    """Requests to a decode engine's process: what has it decided?"""
    return f"{namespace}_engine.{engine_id}.explain"


def forward_explain_subject(namespace: str, lease_id: int) -> str:
    """Requests to a Forwarder: what has it decided?"""
    return f"{namespace}_forward.{lease_id:x}.explain"


def leave_subject(namespace: str, engine_id: str) -> str:
    """Requests from a decode worker to its engine: stop asking for remote prefills."""
    return f"{namespace}_engine.{engine_id}.leave"


def first_token_subject(namespace: str, engine_id: str) -> str:
    """Notices from prefill workers to a decode worker: a first token of an answer."""
    return f"{namespace}_engine.{engine_id}.first_token"
