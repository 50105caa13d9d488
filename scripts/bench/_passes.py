"""How a section with peers goes through its cases: all of ours first, then beside one peer more at a time.

A peer may compile and tune for minutes, fail, or break the device for whatever comes after it in the process. What was
measured before it is on the report then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .common import Budget, Lap, Timing, peer, race, skipped

PEER_S = 60.0  # a peer's first call of a case may take so long
Keep = Callable[[list[dict]], None]


def alone_then_beside(section: str, cases: Iterable, peers: tuple[str, ...], measure: Callable, *, budget: Budget,
                      keep: Keep, lacks: Callable = lambda case, who: None) -> list[dict]:
    """The section's rows: ours alone in all cases, then again beside the first peer, beside the first two, and so on.

    ``measure(case, peers, seconds)`` checks and times one case (a tuple with a name and an op), ours and those peers in
    turn, and gives up a peer whose first call takes longer; ``lacks(case, who)`` says why a peer has no such case. What a
    later pass measured replaces the earlier rows, so that the rows of a case are of one moment and ours stand beside the
    most peers; what ours took alone stays as ``how="graph, alone"``.
    ``keep(rows)`` hears of all rows after every case.
    """
    cases, here = list(cases), tuple(who for who in peers if peer(who) is not None)
    found, alone, failed = {}, {}, {}

    def timed(rows: Iterable[dict]) -> set[str]:
        return {row["implementation"] for row in rows if row["implementation"] in here and "us" in row}

    def rows() -> list[dict]:
        ops = ", ".join(dict.fromkeys(case.op for case in cases))
        out = [skipped(section, "all", ops, who, "not installed") for who in peers if who not in here]
        for case in found:
            told = {row["implementation"] for row in found[case]}
            out += found[case]
            out += alone[case] if timed(found[case]) else []
            out += [skipped(section, case.name, case.op, who,
                            lacks(case, who) or failed.get((case, who)) or "no time left")
                    for who in here if who not in told]
        return out

    for asked in (here[:turn] for turn in range(len(here) + 1)):
        for case in budget.over(case for case in (found if asked else cases) if not asked or not lacks(case, asked[-1])):
            try:
                torch.cuda.empty_cache()
                made = measure(case, tuple(who for who in asked if not lacks(case, who)), min(PEER_S, budget.left))
            except Exception as failure:  # a case of ours alone must run; this one did, until the peer came
                if not asked:
                    raise
                failed[case, asked[-1]] = f"{type(failure).__name__}: {failure}"[:200]
                continue
            if len(timed(made)) < len(timed(found.get(case, ()))):
                failed[case, asked[-1]] = "beside it another peer failed"
                continue
            if not asked:
                alone[case] = [row | {"how": "graph, alone"} for row in made
                               if row["implementation"] == "kdagen" and row.get("how") == "graph"]
            found[case] = [_told(row, made, asked) for row in made]
            keep(rows())
    return rows()


def in_turn(calls: dict[str, Sequence[Callable]], *, budget_ms: float = 60.0) -> tuple[dict[str, Timing], dict[str, str]]:
    """(who -> graph time of one call, their replays taking turns; who -> why a peer cannot be captured)"""
    laps, failed = {}, {}
    for who, group in calls.items():
        try:
            laps[who] = Lap.of(group)
        except RuntimeError as failure:
            if who.startswith("kdagen"):
                raise
            failed[who] = f"graph: {failure}"[:200]
    return dict(zip(laps, race(list(laps.values()), budget_ms=budget_ms) if laps else ())), failed


def _told(row: dict, made: list[dict], asked: tuple[str, ...]) -> dict:
    """Our row with a note on the peers that its replays took turns with."""
    timed = [who for who in asked if any((one["implementation"], one.get("how")) == (who, "graph") for one in made)]
    if not timed or not row["implementation"].startswith("kdagen") or row.get("how") != "graph":
        return row
    return row | {"note": "; ".join(filter(None, [row.get("note"), f"replays in turn with {' and '.join(timed)}"]))}
