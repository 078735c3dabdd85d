"""Files with requests: Mooncake JSONL, Azure CSV, BurstGPT CSV, ShareGPT JSON.

Every reader streams. Its errors name file, line and accepted range.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from dynamo_lite.protocol.errors import ConfigError

#: Longest accepted prompt and answer, in tokens, and the longest time, in seconds.
MOST_TOKENS, MOST_SECONDS = 10_000_000, 1e9
#: Characters of a ShareGPT file that are read at a time.
_PART = 1 << 20
#: Before, between and after the items of a list.
_BETWEEN = re.compile(r"[\s,\[]*")


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a file. at_s: in the file's own time; None: the file has no times."""

    at_s: float | None
    prompt_tokens: int
    #: 0: the request has failed.
    output_tokens: int
    blocks: tuple[int, ...] = ()
    session: str | None = None


@dataclass(frozen=True)
class FilePlace:
    """Where in a file something is."""

    path: Path
    line: int

    def wrong(self, what: str) -> ConfigError:
        return ConfigError([f"{self.path}:{self.line}: {what}"])

    def number(self, name: str, value: object, most: float, *, whole: bool) -> float:
        """A number from a file. Raises ConfigError."""
        accepted = f"accepted: a {'whole ' if whole else ''}number from 0 to {most:g}"
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError
            made = float(value)
        except ValueError:
            raise self.wrong(f"{name} is {value!r}; {accepted}") from None
        if not 0 <= made <= most or (whole and made != int(made)):
            raise self.wrong(f"{name} is {value}; {accepted}")
        return made

    def tokens(self, name: str, value: object) -> int:
        return int(self.number(name, value, MOST_TOKENS, whole=True))


def _mooncake(path: Path, file: TextIO) -> Iterator[Row]:
    """https://github.com/kvcache-ai/Mooncake, FAST25-release: one object per line, `timestamp` in
    milliseconds, `hash_ids` of 512 tokens each. Also with the names of Dynamo's data generator."""
    last: dict[str, float] = {}
    for number, line in enumerate(file, 1):
        place = FilePlace(path, number)
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise place.wrong(f"not JSON: {exc}; accepted: one object per line") from None
        if not isinstance(row, dict):
            raise place.wrong("not a JSON object; accepted: one object per line")
        prompt = _either(place, row, "input_length", "input_tokens")
        output = _either(place, row, "output_length", "output_tokens")
        session = row.get("session_id")
        session = None if session is None else str(session)[:256]
        given = row.get("timestamp", row.get("created_time"))
        delay = row.get("delay", row.get("delay_ms"))
        if given is None and delay is not None and session in last:
            at_s = last[session] + place.number("delay", delay, MOST_SECONDS, whole=False) / 1e3
        else:
            at_s = place.number("timestamp", given, MOST_SECONDS * 1e3, whole=False) / 1e3
        if session is not None:
            last[session] = at_s
        ids = row.get("hash_ids", [])
        if not isinstance(ids, list):
            raise place.wrong(f"hash_ids is {ids!r}; accepted: a list of whole numbers")
        blocks = tuple(int(place.number("hash_ids", one, 2**63, whole=True)) for one in ids)
        yield Row(at_s, place.tokens(*prompt), place.tokens(*output), blocks, session)


def _either(place: FilePlace, row: dict[str, Any], name: str, other: str) -> tuple[str, object]:
    for one in (name, other):
        if one in row:
            return one, row[one]
    raise place.wrong(f"{name} is missing; accepted: {name} or {other}")


def _azure(path: Path, file: TextIO) -> Iterator[Row]:
    """https://github.com/Azure/AzurePublicDataset, LLM inference traces."""
    for place, row in _csv_rows(path, file):
        at_s = _iso_s(place, row["TIMESTAMP"])
        prompt = place.tokens("ContextTokens", row["ContextTokens"])
        yield Row(at_s, prompt, place.tokens("GeneratedTokens", row["GeneratedTokens"]))


def _iso_s(place: FilePlace, value: str) -> float:
    whole, _, fraction = value.partition(".")
    digits, zone = fraction[:], ""
    for mark in ("+", "Z"):
        digits, found, rest = digits.partition(mark)
        zone = zone or (found + rest if found else "")
    try:
        seconds = datetime.fromisoformat(f"{whole}+00:00").timestamp()
        return seconds + (float(f"0.{digits}") if digits else 0.0)
    except ValueError:
        raise place.wrong(
            f"TIMESTAMP is {value!r}; accepted: a time like 2023-11-16 18:17:03.9799600"
        ) from None


def _burstgpt(path: Path, file: TextIO) -> Iterator[Row]:
    """https://github.com/HPMLL/BurstGPT: times in seconds; 0 response tokens: it has failed."""
    for place, row in _csv_rows(path, file):
        at_s = place.number("Timestamp", row["Timestamp"], MOST_SECONDS, whole=False)
        prompt = place.tokens("Request tokens", row["Request tokens"])
        output = place.tokens("Response tokens", row["Response tokens"])
        yield Row(at_s, prompt, output, session=row.get("Session ID") or None)


def _csv_rows(path: Path, file: TextIO) -> Iterator[tuple[FilePlace, dict[str, str]]]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader)]
    for fields in reader:
        place = FilePlace(path, reader.line_num)
        if not fields:
            continue
        if len(fields) != len(header):
            raise place.wrong(f"{len(fields)} columns; accepted: {len(header)}, as in the header")
        yield place, dict(zip(header, fields, strict=True))


def _sharegpt(path: Path, file: TextIO, count: Callable[[str], int]) -> Iterator[Row]:
    """One list of conversations; each turn of the assistant is a request, whose prompt is all that
    was said before. count: tokens of a text."""
    for number, (place, one) in enumerate(_json_items(path, file)):
        said = one.get("conversations") if isinstance(one, dict) else None
        if not isinstance(said, list):
            raise place.wrong("a conversation without `conversations`; accepted: a list of turns")
        prompt = 0
        for turn in said:
            if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
                raise place.wrong("a turn without a text `value`; accepted: {from, value}")
            tokens = count(turn["value"])
            if turn.get("from") in ("gpt", "assistant", "chatgpt", "bing", "bard") and prompt:
                # All prompts of a conversation begin alike.
                blocks = tuple(number << 14 | block for block in range(prompt // 16))
                yield Row(None, prompt, tokens, blocks, str(number))
            prompt += tokens


def _json_items(path: Path, file: TextIO) -> Iterator[tuple[FilePlace, Any]]:
    """The items of one JSON list, without reading it whole."""
    decoder, text, at, line = json.JSONDecoder(), file.read(_PART), 0, 1
    while True:
        between = _BETWEEN.match(text, at)
        assert between is not None
        start = between.end()
        line += text.count("\n", at, start)
        at = start
        if text.startswith("]", at):
            return
        try:
            item, end = decoder.raw_decode(text, at)
        except ValueError as exc:
            # The rest of the item may come with the next part.
            part = file.read(_PART)
            if not part:
                wrong = f"not JSON: {exc}; accepted: a list of conversations"
                raise FilePlace(path, line).wrong(wrong) from None
            text, at = text[at:] + part, 0
            continue
        yield FilePlace(path, line), item
        line += text.count("\n", at, end)
        at = end


_CSV_FORMATS: dict[frozenset[str], Callable[[Path, TextIO], Iterator[Row]]] = {
    frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}): _azure,
    frozenset({"Timestamp", "Request tokens", "Response tokens"}): _burstgpt,
}


def read_rows(path: Path, count: Callable[[str], int]) -> Iterator[Row]:
    """The requests of a file, whose format its beginning tells. Raises ConfigError.

    count: tokens of a text, for files with texts.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = ""
            while not head.strip():
                head = file.readline(1 << 20)
                if not head:
                    raise ConfigError([f"{path} is empty"])
            file.seek(0)
            if head.lstrip().startswith("{"):
                yield from _mooncake(path, file)
                return
            if head.lstrip().startswith("["):
                yield from _sharegpt(path, file, count)
                return
            columns = {name.strip() for name in next(csv.reader([head]))}
            for needed, read in _CSV_FORMATS.items():
                if needed <= columns:
                    yield from read(path, file)
                    return
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError([f"{path} cannot be read: {exc}"]) from exc
    known = "; ".join(", ".join(sorted(columns)) for columns in _CSV_FORMATS)
    raise ConfigError(
        [
            f"{path}:1: unknown format; accepted: JSON lines with timestamp, input_length,"
            f" output_length and hash_ids (Mooncake), a JSON list of conversations (ShareGPT), or"
            f" CSV with the columns {known}"
        ]
    )
