"""The documentation names only files that exist, links only to what is there, and stays short."""

import functools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "dynamo_lite"
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        ROOT / "benchmarks/README.md",
        *(ROOT / "docs").glob("*.md"),
    ]
)
LONGEST = {"README.md": 180, "ARCHITECTURE.md": 300}

#: Look like paths of the repository and are something else: files of the state directory, and
#: a prefix of keys in etcd.
ELSEWHERE = {
    *(
        "run.json",
        "dynamo-lite-servers/etcd/",
        "dynamo-lite-servers/nats/",
        "plans/",
        "run/",
    ),
    "NAMESPACE/",
}
#: What a command of the repository makes: this folder and all in it.
MADE = re.compile(r"deploy/secrets(/.*)?")
#: A span of code with one of these at its end is a file's name.
FILE_ENDINGS = (".py", ".md", ".yaml", ".json", ".js", ".png", ".svg", ".toml")

_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_NOT_OURS = re.compile(r"__pycache__|\.git|\.venv|\.dynamo-lite|build|.*_cache|.*\.egg-info")
_PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)*/?")


def without_fences(text: str) -> str:
    return _FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """The ids that GitHub gives the headings of a page."""
    ids: set[str] = set()
    for heading in _HEADING.findall(without_fences(text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        repeats = 0
        while (unique := slug if not repeats else f"{slug}-{repeats}") in ids:
            repeats += 1
        ids.add(unique)
    return ids


@functools.cache
def entries(root: Path) -> frozenset[str]:
    """Every file of the repository, and every folder that has one, as paths from the top."""
    every: set[str] = set()
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if not _NOT_OURS.fullmatch(name)]
        for file in files:
            path = (Path(folder) / file).relative_to(root)
            every.update(str(one) for one in (path, *path.parents) if one.name)
    return frozenset(every)


def begins_with(word: str, root: Path, inside: str = "") -> bool:
    """Whether the first part of a path is a folder at the top, or in the folder `inside`."""
    return inside + word.split("/")[0] in entries(root)


def names_a_path(word: str, root: Path) -> bool:
    """Whether a word is meant as a path of the repository.

    It ends like a file or a folder, or begins with a folder at the top or of the package.
    """
    if _PATH.fullmatch(word) is None or word in ELSEWHERE or MADE.fullmatch(word):
        return False
    if word.endswith(("/", *FILE_ENDINGS)):
        return True
    return "/" in word and (begins_with(word, root) or begins_with(word, root, f"{PACKAGE}/"))


def found(word: str, root: Path, folders: Iterable[str]) -> str | None:
    """The first entry that a path names in one of these folders. `*` stands for any characters
    of a name."""
    for folder in folders:
        for name in matching(folder + word.rstrip("/"), root):
            if root.joinpath(name).is_dir() or not word.endswith("/"):
                return name
    return None


def matching(path: str, root: Path) -> list[str]:
    if "*" not in path:
        return [path] if path in entries(root) else []
    pattern = re.compile(re.escape(path).replace(r"\*", "[^/]*"))
    return [name for name in entries(root) if pattern.fullmatch(name)]


def words_of_code(text: str) -> Iterator[str]:
    for code in _CODE.findall(without_fences(text)):
        yield from code.split()


def words_of_commands(text: str, root: Path) -> Iterator[str]:
    """Of fenced blocks only what begins with a folder at the top: the rest is output."""
    for block in _FENCE.findall(text):
        for word in re.findall(r"[\w./*-]+", block):
            if "/" in word and begins_with(word, root) and not MADE.fullmatch(word):
                yield word


def missing_paths(text: str, root: Path, own: str = "") -> list[str]:
    """Paths are from the top or from the package. A file's name alone is that of a file in the
    folder that was named last, in the page's own folder, or at the top."""
    missing = {word for word in words_of_commands(text, root) if found(word, root, [""]) is None}
    last = ""
    for word in words_of_code(text):
        if not names_a_path(word, root):
            continue
        alone = "/" not in word
        name = found(word, root, [last, own, ""] if alone else ["", f"{PACKAGE}/"])
        if name is None:
            missing.add(word)
        elif not alone:
            last = f"{name}/" if (root / name).is_dir() else f"{name.rpartition('/')[0]}/"
    return sorted(missing)


def broken_links(page: Path) -> list[str]:
    broken: list[str] = []
    for target in _LINK.findall(without_fences(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            broken.append(target)
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_and_link_of_a_page_leads_somewhere(page: Path):
    own = f"{page.parent.relative_to(ROOT)}/" if page.parent != ROOT else ""
    assert missing_paths(page.read_text(encoding="utf-8"), ROOT, own) == []
    assert broken_links(page) == []


def test_every_link_of_the_changelog_leads_somewhere():
    """It also names files that are gone."""
    assert broken_links(ROOT / "CHANGELOG.md") == []


@pytest.mark.parametrize("name", LONGEST)
def test_the_first_pages_stay_short(name: str):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= LONGEST[name]


def test_the_readme_makes_the_command_before_it_uses_it():
    for block in _FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        before, command, _ = block.partition("\ndynamo-lite ")
        assert not command or re.search(r"^(pip install|source \.venv)", before, re.MULTILINE)


def test_every_page_can_be_reached_from_the_readme():
    reached, left = set[Path](), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        for target in _LINK.findall(without_fences(page.read_text(encoding="utf-8"))):
            if not re.match(r"[a-z]+:|#", target):
                left.append((page.parent / target.partition("#")[0]).resolve())
    assert set(PAGES) <= reached


def test_what_looks_like_a_path_and_is_none_is_still_named_somewhere():
    named = {word for page in PAGES for word in words_of_code(page.read_text(encoding="utf-8"))}
    assert ELSEWHERE - named == set()
