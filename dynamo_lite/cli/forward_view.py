"""Prints decisions of Forwarders: one in full, many as a table."""

from dynamo_lite.cli.listing import as_clock, as_time
from dynamo_lite.protocol.forwarding import ForwardAttempt, ForwardDecision, LegChoice, LegTaken

#: Of the lease in JSON.
KEY = "forwarder"
COLUMNS = ("at", "request", "prompt", "how", "prefill", "decode", "status", "outcome", "took")


def as_text(at: float, lease_id: int, d: ForwardDecision) -> str:
    ids = ", ".join(d.ids)
    lines = [
        f"{_name(d)}  {as_clock(at)}  Forwarder {lease_id:x}",
        f"  verdict     {_verdict(d)}",
        f"  request     {d.route}, {d.protocol}{f'; X-Request-Id {ids}' if ids else ''}",
        f"  prompt      about {d.prompt_tokens} tokens, {d.cached_tokens} of them cached at the"
        f" decode engine; {_threshold(d)}",
    ]
    for number, attempt in enumerate(d.attempts, 1):
        lines += _attempt(attempt, number)
    if d.error:
        lines.append(f"  error       {d.error}")
    lines.append(f"  answer      {_answer(d)}")
    return "\n".join(lines)


def _name(d: ForwardDecision) -> str:
    return d.request_id or next(iter(d.ids), "?")


def _verdict(d: ForwardDecision) -> str:
    return f"{d.how or 'none'}{'/' if d.reason else ''}{d.reason}"


def _threshold(d: ForwardDecision) -> str:
    if not d.max_local_prefill_length:
        return "every prompt gets a prefill leg (max-local-prefill-length 0)"
    return f"no prefill leg up to {d.max_local_prefill_length} uncached tokens"


def _attempt(attempt: ForwardAttempt, number: int) -> list[str]:
    what = f"{attempt.order}, both legs" if attempt.order else f"decode leg alone: {attempt.alone}"
    lines = [f"  attempt {number}   {what}"]
    lines += [f"    {_choice(choice)}" for choice in attempt.choices]
    lines += [f"    {_leg(leg)}" for leg in attempt.legs]
    if attempt.failure:
        lines.append(f"    failed    {attempt.failure}")
    return lines


def _choice(one: LegChoice) -> str:
    of = f" of {one.of}" if one.of > 1 else ""
    return (
        f"{one.leg:<8}  {one.engine}: {one.reason}{of}; {one.matched_tokens} tokens cached,"
        f" {one.load_tokens} queued, KV use {one.kv_usage:.0%}"
    )


def _leg(leg: LegTaken) -> str:
    result = leg.failure or (f"status {leg.status}" if leg.status else "no answer yet")
    if leg.failure and leg.status:
        result = f"{leg.failure} {leg.status}"
    head = "" if leg.head_s is None else f", head after {as_time(leg.head_s)}"
    took = "under way" if leg.took_s is None else f"took {as_time(leg.took_s)}"
    sent = f"sent after {as_time(leg.after_s)}"
    return f"leg       {leg.leg} at {leg.engine}: {result}; {sent}{head}, {took}"


def _answer(d: ForwardDecision) -> str:
    status = f"status {d.status}" if d.status else "no answer"
    first = "" if d.first_byte_s is None else f", first byte after {as_time(d.first_byte_s)}"
    took = "" if d.took_s is None else f", took {as_time(d.took_s)}"
    return f"{d.outcome or 'under way'}: {status}{first}{took}"


def cells(at: float, d: ForwardDecision) -> list[str]:
    chosen = {one.leg: one.engine for one in d.attempts[-1].choices} if d.attempts else {}
    return [
        as_clock(at),
        _name(d),
        str(d.prompt_tokens),
        _verdict(d),
        chosen.get("prefill", "-"),
        chosen.get("decode", "-"),
        str(d.status or "-"),
        d.outcome or "under way",
        "" if d.took_s is None else as_time(d.took_s),
    ]
