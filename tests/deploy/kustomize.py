"""Builds what our kustomizations use of kustomize, and refuses the rest.

`kubectl kustomize` is not everywhere. Where it is, a test compares. A difference on purpose: the
names of generated ConfigMaps have no hash of their content.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

_KEYS = {
    *("apiVersion", "kind", "resources", "components", "labels", "images", "configMapGenerator"),
    "patches",
}


def build(folder: Path) -> list[Resource]:
    """Raises ValueError for anything that this reader does not know."""
    resources: list[Resource] = []
    _add(folder, resources)
    return resources


def _add(folder: Path, resources: list[Resource]) -> None:
    """A kustomization's transformations see its own resources, a component's all so far."""
    content = yaml.safe_load((folder / "kustomization.yaml").read_text())
    only(content, _KEYS)
    seen = resources if content["kind"] == "Component" else list[Resource]()
    for name in content.get("resources", []):
        path = folder / name
        if path.is_dir():
            _add(path, seen)
        else:
            seen += [one for one in yaml.safe_load_all(path.read_text()) if one is not None]
    seen += _config_maps(content.get("configMapGenerator", []), folder)
    for name in content.get("components", []):
        _add(folder / name, seen)
    for patch in content.get("patches", []):
        _patch(patch, seen)
    for label in content.get("labels", []):
        only(label, {"pairs", "includeSelectors"})
        for resource in seen:
            _label(resource, label["pairs"])
    _name_images(content.get("images", []), seen)
    if seen is not resources:
        resources += seen


def _config_maps(generators: list[dict[str, Any]], folder: Path) -> Iterator[Resource]:
    for generator in generators:
        only(generator, {"name", "files"})
        data = {name: (folder / name).read_text() for name in generator["files"]}
        metadata = {"name": generator["name"]}
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _name_images(images: list[dict[str, str]], resources: list[Resource]) -> None:
    for image in images:
        only(image, {"name", "newName", "newTag"})
        for container in _containers(resources):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"


def _containers(resources: list[Resource]) -> Iterator[dict[str, Any]]:
    for resource in resources:
        if resource["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield from resource["spec"]["template"]["spec"]["containers"]


def _label(resource: Resource, pairs: dict[str, str]) -> None:
    """Labels, selectors and templates, as `includeSelectors: true` does."""
    resource["metadata"].setdefault("labels", {}).update(pairs)
    spec = resource.get("spec", {})
    match resource["kind"]:
        case "Deployment":
            template = spec["template"]
            template["metadata"]["labels"].update(pairs)
            spec["selector"]["matchLabels"].update(pairs)
            for spread in template["spec"].get("topologySpreadConstraints", []):
                spread["labelSelector"]["matchLabels"].update(pairs)
        case "PodDisruptionBudget":
            spec["selector"]["matchLabels"].update(pairs)
        case "Service":
            spec["selector"].update(pairs)
        case "NetworkPolicy":
            spec["podSelector"]["matchLabels"].update(pairs)
        case kind:
            raise ValueError(f"labels: unknown kind {kind}")


def _patch(patch: dict[str, Any], resources: list[Resource]) -> None:
    """JSON patches (RFC 6902) of the resources of a kind, or of one of them."""
    only(patch, {"target", "patch"})
    target = patch["target"]
    only(target, {"kind", "name"})
    chosen = [
        one
        for one in resources
        if one["kind"] == target["kind"]
        and target.get("name", one["metadata"]["name"]) == one["metadata"]["name"]
    ]
    if not chosen:
        raise ValueError(f"a patch has no target: {target}")
    for resource in chosen:
        for operation in yaml.safe_load(patch["patch"]):
            _apply(operation, resource)


def _apply(operation: dict[str, Any], resource: Resource) -> None:
    only(operation, {"op", "path", "value"})
    steps = [
        step.replace("~1", "/").replace("~0", "~") for step in operation["path"].split("/")[1:]
    ]
    node: Any = resource
    for step in steps[:-1]:
        node = node[int(step)] if isinstance(node, list) else node[step]
    key = int(steps[-1]) if isinstance(node, list) else steps[-1]
    if operation["op"] == "replace":
        node[key]  # it must be there
    elif operation["op"] != "add" or isinstance(node, list):
        raise ValueError(f"unknown operation: {operation}")
    node[key] = operation["value"]


def only(content: dict[str, Any], keys: set[str]) -> None:
    if unknown := content.keys() - keys:
        raise ValueError(f"unknown keys {sorted(unknown)}")
