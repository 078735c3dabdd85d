"""The documentation names only files that exist, links only to what is there, and stays short."""

import functools
import os
import re
from collections.abc import Iterator
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
def entries() -> frozenset[str]:
    """Every file of the repository, and every folder that has one, as paths from the top."""
    every: set[str] = set()
    for folder, names, files in os.walk(ROOT):
        names[:] = [name for name in names if not _NOT_OURS.fullmatch(name)]
        for file in files:
            path = (Path(folder) / file).relative_to(ROOT)
            every.update(str(one) for one in (path, *path.parents) if one.name)
    return frozenset(every)


def names_a_path(word: str) -> bool:
    """Whether a word is meant as a path of the repository.

    It ends like a file or a folder, or begins with a folder at the top or of the package.
    """
    if _PATH.fullmatch(word) is None or word in ELSEWHERE or MADE.fullmatch(word):
        return False
    first, slash, _ = word.partition("/")
    folders = {first, f"{PACKAGE}/{first}"} if slash else set[str]()
    return word.endswith(("/", *FILE_ENDINGS)) or not entries().isdisjoint(folders)


def is_there(word: str) -> bool:
    """Paths are from the top or from the package; a file's name may stand alone. `*` stands for
    any characters of a name."""
    path = re.escape(word.rstrip("/")).replace(r"\*", "[^/]*")
    place = f"({PACKAGE}/)?" if "/" in word else "(.*/)?"
    found = [name for name in entries() if re.fullmatch(place + path, name)]
    return any((ROOT / name).is_dir() for name in found) if word.endswith("/") else bool(found)


def words_of_code(text: str) -> Iterator[str]:
    for code in _CODE.findall(without_fences(text)):
        yield from code.split()


def words_of_commands(text: str) -> Iterator[str]:
    """Of fenced blocks only what begins with a folder at the top: the rest is output."""
    for word in re.findall(r"[\w./*-]+", "".join(_FENCE.findall(text))):
        if "/" in word and word.partition("/")[0] in entries():
            yield word


def missing_paths(text: str) -> set[str]:
    words = {*words_of_code(text), *words_of_commands(text)}
    return {word for word in words if names_a_path(word) and not is_there(word)}


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
    assert missing_paths(page.read_text(encoding="utf-8")) == set()
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
