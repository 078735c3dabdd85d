"""The manifests of `deploy/kubernetes/` as kustomize builds them."""

import pytest

from tests.deploy.kubernetes import KUBERNETES, with_components
from tests.deploy.kustomize import Resource, build


@pytest.fixture(scope="session")
def planes() -> list[Resource]:
    return build(KUBERNETES / "planes")


@pytest.fixture(scope="session")
def everything(planes: list[Resource], tmp_path_factory: pytest.TempPathFactory) -> list[Resource]:
    """An overlay of a user's own with all components, and the planes."""
    return [*build(with_components(tmp_path_factory.mktemp("complete"))), *planes]
