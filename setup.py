"""Which packages the wheel has; pyproject.toml has everything else.

`graphs/`, `configs/` and `scripts/` are folders of the repository, where they are easy to find.
In the wheel they are inside the package, because other projects use these names, too.
"""

from setuptools import find_packages, setup

FOLDERS = ("graphs", "configs", "scripts")

setup(
    packages=[*find_packages(include=["dynamo_lite*"]), *(f"dynamo_lite.{f}" for f in FOLDERS)],
    package_dir={f"dynamo_lite.{folder}": folder for folder in FOLDERS},
)
