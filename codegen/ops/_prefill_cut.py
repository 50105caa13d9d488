"""How the sm90 forms of prefill cut a call, and what is then launched in which order. Rules measured on the H200.

  serial    prepare all rows, then the state pass;
  windows   one long sequence: the state pass of a window runs beside the prepare kernel of the next ones;
  segments  few heads: the head, the first segments, is walked beside the maps of the inner ones; then all others walk at
            once. Where the batch is one sequence, prepare may come in windows here too: head and maps run beside it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

C, K, V = 64, 128, 128   # all that the forms support
WHOLE = 1 << 30          # chunks of the only segment of an uncut sequence
MIN_SEGMENT = 12         # chunks: shorter segments cost more in maps than they save

MAIN, SIDE, HIGH, MAPS = "main", "side", "high", "maps"  # the caller's stream, and three of the thread's own (_lanes.py)


class Plan(NamedTuple):
    """How a call is cut: the row boundaries of its windows (only for one sequence), its segments, how many are the head."""

    form: str  # serial, windows or segments
    cuts: tuple[int, ...] = ()
    segments: int = 1
    seg_chunks: int = WHOLE
    head: int = 1  # more than 1 only for one sequence


class Share(NamedTuple):
    """How one long sequence of few heads is shared out: into segments, of which the first ones are the head; prepare in
    windows that end at these parts of its rows."""

    heads: int
    segments: int
    head: int
    windows: tuple[float, ...]


# By the most heads. The head is as long as prepare takes; the others, two programs a head and segment, walk at once.
SHARES = (
    Share(5, 8, 1, ()), Share(9, 6, 2, (1 / 2,)), Share(13, 5, 2, (1 / 2,)), Share(18, 4, 2, (1 / 2,)),
    Share(33, 4, 3, (1 / 2, 3 / 4)),
)
LONGER = {9: Share(9, 12, 4, (1 / 4, 1 / 2, 3 / 4)), 13: Share(13, 8, 3, (1 / 3, 2 / 3))}  # from 256 chunks on


def plan(rows: int, longest: int, N: int, HV: int, *, segments: bool = True, sms: int = 132) -> Plan:
    """The cut of N sequences of ``rows`` chunks in all; ``longest``: chunks of the longest one, 0 if the host does not know.

    Measured on the H200: one long sequence is cut in segments up to 33 heads, several up to 12 heads in all; windows alone
    pay from 90 heads on, and where a sequence of 16 to 33 heads shall not be cut in segments.
    """
    programs = N * HV
    alone = N == 1 and longest == rows
    if segments and alone and programs <= SHARES[-1].heads and rows >= 3 * MIN_SEGMENT and (programs <= 18 or rows >= 64):
        return _shared(rows, next(share for share in SHARES if programs <= share.heads))
    if alone and rows >= 64 and (16 <= programs <= 33 or programs >= 90):
        return Plan("windows", _edges(rows, (0.65, 0.85) if programs >= 90 else (1 / 2, 3 / 4)))
    if segments and programs <= 12 and longest >= 3 * MIN_SEGMENT:
        # The others beside the first one: as many as walk at once, with two programs a head.
        count = max(2, min(1 + sms // (2 * programs), longest // MIN_SEGMENT))
        seg_chunks = -(-longest // count)
        return Plan("segments", (), -(-longest // seg_chunks), seg_chunks)
    return Plan("serial")


def _shared(rows: int, share: Share) -> Plan:
    """One sequence of ``rows`` chunks; a short one in fewer segments and windows."""
    if rows >= 256:
        share = LONGER.get(share.heads, share)
    count = max(2, min(share.segments, rows // MIN_SEGMENT))
    seg_chunks = -(-rows // count)
    count = -(-rows // seg_chunks)
    head = max(1, min(count - 1, round(share.head * count / share.segments)))
    windows = share.windows if rows >= 64 else share.windows[:1]
    return Plan("segments", _edges(rows, windows), count, seg_chunks, head)


def _edges(rows: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """The row boundaries of windows that end at these parts of all rows; none for a single window."""
    return (0, *(round(share * rows) for share in shares), rows) if shares else ()


class Prepare(NamedTuple):
    """The chunk-local half of the rows [begin, end)."""

    on: str
    begin: int
    end: int


class Walk(NamedTuple):
    """The state over the rows [begin, end), for ``count`` segments of ``chunks`` each, from the ``first`` one.

    A sequence that starts before its segment takes up the state ``read`` segments further in hs than its own place, one
    that does not end in it leaves its state ``write`` segments further; None: never.
    """

    on: str
    begin: int
    end: int
    first: int
    count: int
    chunks: int
    read: int | None
    write: int | None


class Maps(NamedTuple):
    """The maps of ``count`` segments, from the ``first`` one."""

    on: str
    first: int
    count: int


class Combine(NamedTuple):
    """The states at the starts of the segments after the one that starts in hs at ``first``, through the maps."""

    on: str
    first: int


class Record(NamedTuple):
    on: str
    event: int


class Wait(NamedTuple):
    on: str
    event: int


def steps(cut: Plan, rows: int) -> tuple[NamedTuple, ...]:
    """What a call of ``rows`` chunk rows launches, in order, each on its stream, with the events between the streams.

    Nothing runs before what the main stream did before, nor goes on after what it does next. Prepare takes the main and the
    side stream in turns, so that one window's programs fill the other's tail.
    """
    if cut.form == "serial":
        return Prepare(MAIN, 0, rows), Walk(MAIN, 0, rows, 0, 1, WHOLE, None, None)
    edges, made = cut.cuts or (0, rows), []
    ready: list[tuple[int, int]] = []  # the end of each window so far, and the event after its prepare, last window first
    many, mapped, inner = len(edges) > 2, cut.head, cut.segments - 1
    head = WHOLE if cut.segments == 1 else cut.head * cut.seg_chunks  # chunks
    maps = MAPS if many else MAIN

    def record(on: str) -> int:
        made.append(Record(on, len(made)))
        return made[-1].event

    def wait(on: str, *events: int) -> None:
        made.extend(Wait(on, event) for event in events)

    if many:
        wait(SIDE, record(MAIN))
    for number, (begin, end) in enumerate(pairwise(edges)):
        on = SIDE if number % 2 else MAIN
        made.append(Prepare(on, begin, end))
        ready.insert(0, (end, record(on)))
        if begin < head:
            wait(HIGH, ready[0][1])
            ends = cut.segments > 1 and (end >= head or end == rows)
            made.append(Walk(HIGH, begin, end, 0, 1, head, 0 if many else None, cut.head if ends else 0))
        prepared = inner if end == rows else min(inner, end // cut.seg_chunks)
        if prepared > mapped:
            wait(maps, *[event for end, event in ready if end > mapped * cut.seg_chunks])
            made.append(Maps(maps, mapped, prepared - mapped))
            mapped = prepared
    wait(MAIN, record(HIGH), record(maps), *[event for _, event in ready])
    if inner > cut.head:
        made.append(Combine(MAIN, cut.head))
    if inner:
        made.append(Walk(MAIN, 0, rows, cut.head, cut.segments - cut.head, cut.seg_chunks, 0, None))
    return _pruned(made)


def _pruned(made: list[NamedTuple]) -> tuple[NamedTuple, ...]:
    """Without waits for what is over by then in any case, and without records that nothing waits for."""
    known = {on: {} for on in (MAIN, SIDE, HIGH, MAPS)}  # stream -> stream -> how many of its steps are surely over
    recorded, kept = {}, []
    for number, step in enumerate(made):
        mine = known[step.on]
        if isinstance(step, Record) and not mine and step.on != MAIN:
            continue  # nothing ran there, and a capture knows nothing of that stream
        if isinstance(step, Wait):
            source, theirs = recorded.get(step.event, (step.on, {}))
            if source == step.on or mine.get(source, -1) >= theirs[source]:
                continue
            for on, at in theirs.items():
                mine[on] = max(at, mine.get(on, -1))
        mine[step.on] = number
        if isinstance(step, Record):
            recorded[step.event] = step.on, dict(mine)
        kept.append(step)
    waited = [step.event for step in kept if isinstance(step, Wait)]
    events = {event: index for index, event in enumerate(dict.fromkeys(waited))}
    kept = [step for step in kept if not isinstance(step, Record) or step.event in events]
    return tuple(step._replace(event=events[step.event]) if isinstance(step, (Record, Wait)) else step for step in kept)
