"""The results of many seeds, as text."""

from collections.abc import Iterator

from tests.simulation.tally import Tally

#: Groups of the report: the beginnings of the counts' names.
_GROUPS = {
    "profiles": "profile ",
    "faults": "fault ",
    "process ends": "exit ",
    "requests": "request ",
    "local prefills": "decision/local/",
    "remote prefills": "decision/remote/",
    "ended": "remote/",
    "attempts": "attempt ",
    "aborts while": "abort ",
    "writes landed": "writes landed ",
    "dropped": "dropped/",
    "planners": "planner ",
}
_SINGLE = (
    "fenced_writes",
    "late_notices",
    "commit_mismatches",
    "leases expired",
    "leases revoked by supervisors",
    "requests migrated",
)


def replay_command(seed: int, mutant: str | None = None) -> str:
    """The command that repeats the seed and prints its trace."""
    words = ["python", "-m", "tests.simulation", "--seed", str(seed), "--trace"]
    return " ".join([*words, "--mutant", mutant] if mutant else words)


def violated_lines(seed: int, why: str, mutant: str | None = None) -> list[str]:
    return [f"seed {seed}: {why}", f"    {replay_command(seed, mutant)}"]


def coverage_lines(tally: Tally) -> Iterator[str]:
    """What the seeds have reached; the same for the same seeds."""
    counts = tally.counts
    for title, prefix in _GROUPS.items():
        rows = [(name[len(prefix) :], n) for name, n in counts.items() if name.startswith(prefix)]
        rows.sort(key=lambda row: (-row[1], row[0]))
        if rows:
            total = sum(number for _, number in rows)
            yield _line(title, f"{total:,}: " + ", ".join(f"{name} {n:,}" for name, n in rows))
    singles = [f"{name.replace('_', ' ')} {counts[name]:,}" for name in _SINGLE if counts[name]]
    if singles:
        yield _line("also", ", ".join(singles))
    if sent := counts["cancels sent to writers"]:
        arrived = counts["cancels that reached writers"]
        yield _line(
            "cancels",
            f"{sent:,} sent to writers, {arrived:,} arrived, after {tally.cancel_s:.3f} s at most",
        )
    if tally.waits.longest is not None and tally.waits.latest is not None:
        late = tally.waits.latest
        when = "after" if late.over_s > 0 else "before"
        yield _line("longest wait", str(tally.waits.longest))
        yield _line("latest end", f"{abs(late.over_s):.3f} s {when} its deadline: {late}")
    yield _line("virtual time", f"{tally.virtual_s / 3600:,.1f} hours")


def verdict_line(tally: Tally) -> str:
    played = f"{tally.seeds:,} seeds played"
    lost = f", {len(tally.lost):,} lost" if tally.lost else ""
    if not tally.violated:
        return f"{played}{lost}: no invariant violated"
    return f"{played}{lost}: {len(tally.violated):,} violated"


def _line(title: str, text: str) -> str:
    return f"  {title:<16} {text}"
