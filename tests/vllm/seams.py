"""What the project uses of vLLM, held against a vLLM's Python files: nothing is imported or run.

    python -m tests.vllm.seams [FOLDER OF VLLM]

Read from the project's own files: what it imports, which methods it overrides and with which
parameters, which keywords it passes, and which options of vLLM's configuration it reads. Objects
that arrive without a name (a request, a scheduler's fields) stand in `MEMBERS`.
"""

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from dynamo_lite.vllm.compat import vllm_version

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dynamo_lite"
#: Has the alternatives between versions, each with a condition of its own.
COMPAT = PACKAGE / "vllm" / "compat.py"

#: By class: the attributes and methods that are used, and the file that uses them.
MEMBERS: dict[str, tuple[str, str]] = {
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "running waiting kv_holding_waiting max_num_running_reqs max_num_active_reqs connector"
        " finished_recving_kv_req_ids failed_recving_kv_req_ids _inflight_prefills"
        " _handle_blocked_waiting_request vllm_config",
        "vllm/engine/short_first.py, arrivals.py",
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "total_num_scheduled_tokens kv_connector_metadata",
        "vllm/engine/arrivals.py",
    ),
    "vllm.v1.request:Request": (
        "request_id status priority num_computed_tokens num_prompt_tokens prompt_token_ids"
        " block_hashes kv_transfer_params cache_salt mm_features prompt_embeds"
        " skip_reading_prefix_cache prefill_stats events",
        "disagg/decode/, disagg/prefill/scheduler.py",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": (
        "block_pool cache_blocks get_block_ids get_blocks",
        "vllm/engine/connector.py",
    ),
    "vllm.v1.core.block_pool:BlockPool": (
        "blocks free_block_queue touch free_blocks get_num_free_blocks num_gpu_blocks",
        "disagg/decode/scheduler.py, vllm/engine/free_blocks.py",
    ),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": (
        "num_free_blocks popleft popleft_n remove append append_n prepend_n get_all_free_blocks",
        "vllm/engine/free_blocks.py",
    ),
    "vllm.distributed.kv_events:BlockStored": (
        "block_hashes parent_block_hash token_ids block_size medium lora_name extra_keys group_idx",
        "vllm/engine/kv_events.py",
    ),
    "vllm.distributed.kv_events:BlockRemoved": (
        "block_hashes medium group_idx",
        "vllm/engine/kv_events.py",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector": (
        "_connectors _requests_to_connector _extra_async_saves _get_connector_classes_and_configs",
        "vllm/engine/multi_connector.py",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:"
    "OffloadingConnectorScheduler": (
        "_current_batch_allocated_block_ids",
        "vllm/engine/multi_connector.py",
    ),
    "vllm.v1.engine.core:EngineCore": (
        "get_kv_cache_group_metadata",
        "vllm/engine/core.py",
    ),
    "vllm.v1.kv_cache_interface:KVCacheConfig": (
        "kv_cache_groups num_blocks transfer_group_ids",
        "vllm/engine/kv_groups.py, supported.py",
    ),
    "vllm.v1.kv_cache_interface:MambaSpec": (
        "shapes dtypes mamba_type tp_replicated",
        "vllm/engine/kv_groups.py, kv_memory.py",
    ),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": ("sliding_window", "vllm/engine/kv_groups.py"),
    "vllm.v1.engine.async_llm:AsyncLLM": (
        "_run_output_handler _add_request check_admission shutdown output_handler engine_core"
        " output_processor input_processor",
        "vllm/frontend/remote_client.py",
    ),
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels": (
        "load_lora_adapter unload_lora_adapter lora_requests",
        "vllm/frontend/graph_adapters.py",
    ),
    "vllm.config.lora:LoRAConfig": (
        "max_lora_rank lora_dtype fully_sharded_loras target_modules",
        "vllm/engine/fingerprint.py",
    ),
    "vllm.v1.engine.output_processor:OutputProcessor": (
        "request_states abort_requests",
        "vllm/frontend/remote_client.py",
    ),
    "vllm.v1.engine.output_processor:RequestState": (
        "queue parent_req",
        "vllm/frontend/remote_client.py",
    ),
    "vllm.v1.engine:EngineCoreOutputs": (
        "outputs scheduler_stats timestamp engine_index",
        "vllm/engine/core.py, decode_engine.py",
    ),
    "vllm.multimodal.inputs:MultiModalFeatureSpec": (
        "data modality mm_position",
        "vllm/inputs.py",
    ),
    "vllm.multimodal.inputs:PlaceholderRange": (
        "offset length is_embed get_num_embeds",
        "vllm/inputs.py",
    ),
    "vllm.multimodal.encoder_budget:MultiModalBudget": (
        "encoder_cache_size",
        "vllm/engine/core.py",
    ),
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id new_token_ids new_logprobs new_prompt_logprobs_tensors finish_reason"
        " stop_reason events prefill_stats",
        "vllm/wire.py",
    ),
    "vllm.sampling_params:SamplingParams": (
        "clone verify sampling_type extra_args structured_outputs n max_tokens min_tokens logprobs"
        " prompt_logprobs bad_words bad_words_token_ids stop_token_ids eos_token_id"
        " presence_penalty frequency_penalty repetition_penalty repetition_detection logit_bias"
        " allowed_token_ids thinking_token_budget trace_decode_token_ids watermarking"
        " skip_reading_prefix_cache",
        "vllm/migratable.py, first_token.py, requests.py",
    ),
}

#: The parts of vLLM's configuration, by the attribute under which `VllmConfig` has them.
CONFIGS = {
    "model_config": "ModelConfig",
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "scheduler_config": "SchedulerConfig",
    "observability_config": "ObservabilityConfig",
    "compilation_config": "CompilationConfig",
    "kv_transfer_config": "KVTransferConfig",
    "speculative_config": "SpeculativeConfig",
}


@dataclass
class Break:
    """Something that the project uses and this vLLM does not have."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what}   used in {self.where}"


@dataclass
class Type:
    """A class of vLLM with what it inherits."""

    members: set[str] = field(default_factory=set)
    methods: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    #: Fields that its constructor takes, where it has none of its own.
    fields: set[str] = field(default_factory=set)
    #: Whether it inherits from a class that was not found here.
    open: bool = False


class Source:
    """A vLLM's Python files. folder: its package."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            base = self._folder.joinpath(*module.split(".")[1:])
            files = (base / "__init__.py", base.with_suffix(".py"))
            found = next((file for file in files if file.is_file()), None)
            self._trees[module] = None if found is None else ast.parse(found.read_text())
        return self._trees[module]

    def find(self, module: str, name: str) -> ast.AST | None:
        """The statement that binds a module's name, followed through its own imports; the module
        of that name in a package."""
        tree = self.tree(module)
        for node in () if tree is None else _statements(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found = self._follow(module, node.module, node.level, alias.name)
                        return node if found is None else found
            elif name in _bound(node):
                return node
        return self.tree(f"{module}.{name}")

    def _follow(self, module: str, source: str | None, level: int, name: str) -> ast.AST | None:
        if level:
            parts = module.split(".")
            package = self._folder.joinpath(*parts[1:]).is_dir()
            kept = parts[: len(parts) - level + package]
            source = ".".join([*kept, *([source] if source else [])])
        if source is None or source.partition(".")[0] != "vllm" or source == module:
            return None
        return self.find(source, name)

    @functools.cache  # noqa: B019  (one short-lived object)
    def type_of(self, module: str, name: str) -> Type | None:
        node = self.find(module, name)
        if not isinstance(node, ast.ClassDef):
            return None
        home = self._home(module, name)
        found = Type()
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if not isinstance(plain, ast.Name):
                continue
            if (above := self.type_of(home, plain.id)) is not None:
                found.members |= above.members
                found.methods |= above.methods
                found.fields |= above.fields
                found.open |= above.open
            elif plain.id not in ("ABC", "Generic", "Protocol", "object"):
                found.open = self.find(home, plain.id) is not None or found.open
        for part in node.body:
            match part:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.methods[part.name] = part
                    found.members.add(part.name)
                    found.members |= _of_self(part, ast.Store)
                case ast.AnnAssign(target=ast.Name(id=field_name)):
                    found.members.add(field_name)
                    found.fields.add(field_name)
                case ast.Assign(targets=[ast.Name(id=constant)]):
                    found.members.add(constant)
                case _:
                    pass
        return found

    def _home(self, module: str, name: str) -> str:
        """The module that defines the class."""
        tree = self.tree(module)
        for node in () if tree is None else _statements(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name and node.module.startswith("vllm"):
                        return self._home(node.module, alias.name)
        return module


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.Import(names=names):
            return {alias.asname or alias.name.partition(".")[0] for alias in names}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case _:
            return set()


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Those of the module, also under `if` and `try`."""
    pending = list(tree.body)
    while pending:
        node = pending.pop(0)
        yield node
        match node:
            case ast.If(body=body, orelse=orelse):
                pending = body + orelse + pending
            case ast.Try(body=body, orelse=orelse, handlers=handlers):
                pending = body + orelse + [s for h in handlers for s in h.body] + pending
            case _:
                pass


def breaks(folder: Path) -> list[Break]:
    """What the project uses and a vLLM does not have. folder: its package."""
    source = Source(folder)
    found = [broken for file in own_files() for broken in _breaks_of(file, source)]
    return [*found, *_missing_members(source)]


def own_files() -> list[Path]:
    """Files of the project that import vLLM."""
    files = sorted((PACKAGE / "vllm").rglob("*.py"))
    return [file for file in files if file != COMPAT and "from vllm" in file.read_text()]


def _breaks_of(file: Path, source: Source) -> Iterator[Break]:
    tree = ast.parse(file.read_text())
    #: The project's name for something of vLLM's: its module and name there.
    names: dict[str, tuple[str, str]] = {}
    nodes = [
        (node, f"{file.relative_to(PACKAGE)}:{node.lineno}")
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.expr)
    ]
    for node, where in nodes:
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from _imports(node, where, source, names)
    for node, where in nodes:
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in names:
                    yield from _overrides(node, *names[base.id], file, source)
                    yield from _unset(node, *names[base.id], where, source)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in names:
                yield from _keywords(node, *names[node.func.id], where, source)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            yield from _options(node, node.value.attr, where, source)


def _imports(
    node: ast.ImportFrom | ast.Import, where: str, source: Source, names: dict[str, tuple[str, str]]
) -> Iterator[Break]:
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        for alias in node.names if module.partition(".")[0] == "vllm" else ():
            names[alias.asname or alias.name] = module, alias.name
            if source.tree(module) is None:
                yield Break(f"there is no module {module}", where)
            elif source.find(module, alias.name) is None:
                yield Break(f"{module} has no {alias.name}", where)
        return
    for alias in node.names:
        if alias.name.partition(".")[0] == "vllm" and source.tree(alias.name) is None:
            yield Break(f"there is no module {alias.name}", where)


def _overrides(
    node: ast.ClassDef, module: str, name: str, file: Path, source: Source
) -> Iterator[Break]:
    """Methods whose parameters differ from those of the class above."""
    above = source.type_of(module, name)
    if above is None:
        return
    for own in node.body:
        if not isinstance(own, ast.FunctionDef | ast.AsyncFunctionDef) or own.name == "__init__":
            continue
        theirs = above.methods.get(own.name)
        if theirs is None or own.args.vararg or own.args.kwarg:
            continue
        mine, wanted = _parameters(own), _parameters(theirs)
        if mine[: len(wanted)] != wanted and not own.name.startswith("__"):
            yield Break(
                f"{module}.{name}.{own.name} takes ({', '.join(wanted)}), ours ({', '.join(mine)})",
                f"{file.relative_to(PACKAGE)}:{own.lineno}",
            )


def _unset(
    node: ast.ClassDef, module: str, name: str, where: str, source: Source
) -> Iterator[Break]:
    """Where a constructor does not call vLLM's: attributes that vLLM's sets, and its other methods
    read, and ours does not set."""
    own = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), 0)
    above = source.type_of(module, name)
    if not own or above is None or "super().__init__" in ast.unparse(own):
        return
    theirs = above.methods.get("__init__")
    if theirs is None:
        return
    read: set[str] = set()
    for method_name, method in above.methods.items():
        if method_name != "__init__":
            read |= _of_self(method, ast.Load)
    for missing in sorted((_of_self(theirs, ast.Store) & read) - _of_self(own, ast.Store)):
        if missing not in above.methods:
            yield Break(f"{module}.{name} reads {missing}, which ours does not set", where)


def _of_self(function: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Names of the attributes of `self` that a method reads or sets."""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, context)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    args = function.args
    return [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)][1:]


def _keywords(
    call: ast.Call, module: str, name: str, where: str, source: Source
) -> Iterator[Break]:
    """Keywords that the class or function does not take."""
    target = source.find(module, name)
    accepted: set[str] | None = None
    if isinstance(target, ast.FunctionDef | ast.AsyncFunctionDef):
        args = target.args
        if args.kwarg is None:
            accepted = {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
    elif (made := source.type_of(module, name)) is not None and not made.open:
        init = made.methods.get("__init__")
        if init is None:
            accepted = made.fields
        elif init.args.kwarg is None:
            accepted = set(_parameters(init))
    for keyword in call.keywords:
        if keyword.arg and accepted is not None and keyword.arg not in accepted:
            yield Break(f"{module}.{name} takes no {keyword.arg}", where)


def _options(node: ast.Attribute, part: str, where: str, source: Source) -> Iterator[Break]:
    """An option that a part of vLLM's configuration does not have."""
    if (name := CONFIGS.get(part)) is None:
        return
    config = source.type_of("vllm.config", name)
    if config is None:
        yield Break(f"vllm.config has no {name}", where)
    elif node.attr not in config.members and not config.open:
        yield Break(f"vllm.config.{name} has no {node.attr}", where)


def _missing_members(source: Source) -> Iterator[Break]:
    for target, (members, where) in MEMBERS.items():
        module, _, name = target.partition(":")
        found = source.type_of(module, name)
        if found is None:
            yield Break(f"{module} has no class {name}", where)
            continue
        for member in members.split():
            if member not in found.members:
                yield Break(f"{module}.{name} has no {member}", where)


def vllm_minor() -> int:
    """32 for vLLM 0.32.0."""
    return int(vllm_version().rpartition(" ")[2].split(".")[1])


def installed() -> Path:
    """The package of the installed vLLM."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else installed()
    found = breaks(folder)
    for broken in found:
        print(broken)
    print(f"{len(found)} breaks in {folder}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
