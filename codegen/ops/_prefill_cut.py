"""How the sm90 forms of prefill cut a call: whole, in windows of rows, or in segments. Plain rules, measured on the H200.

  serial    prepare all rows, then the state pass;
  windows   one long sequence: the state pass of a window runs beside the prepare kernel of the next ones;
  segments  few heads: the maps of inner segments run beside the walk of the first one; then all others walk at once.
"""

from __future__ import annotations

from typing import NamedTuple

C, K, V = 64, 128, 128   # all that the forms support
WHOLE = 1 << 30          # chunks of the only segment of an uncut sequence
MIN_SEGMENT = 10         # chunks: shorter segments cost more in maps than they save


class Plan(NamedTuple):
    """How a call is cut: the row boundaries of its windows, or its segments."""

    form: str  # serial, windows or segments
    cuts: tuple[int, ...] = ()
    segments: int = 1
    seg_chunks: int = WHOLE


def plan(rows: int, longest: int, N: int, HV: int, *, segments: bool = True, sms: int = 132) -> Plan:
    """The cut of N sequences of ``rows`` chunks in all; ``longest``: chunks of the longest one, 0 if the host does not know.

    Measured on the H200: windows pay for one long sequence of 16 to 33 heads, or of 90 and more; segments up to 12 heads.
    """
    programs = N * HV
    if N == 1 and longest == rows and rows >= 32 and (16 <= programs <= 33 or (programs >= 90 and rows >= 64)):
        if programs >= 90:
            shares = (0.6, 0.8)
        elif rows < 64:
            shares = (1 / 2,)
        elif rows >= 256:
            shares = (1 / 2, 4 / 6, 5 / 6)
        else:
            shares = (1 / 2, 3 / 4)
        return Plan("windows", (0, *(round(share * rows) for share in shares), rows))
    if segments and programs <= 12 and longest >= 2 * MIN_SEGMENT:
        # The others beside the first one: as many as walk at once, with two programs a head.
        count = max(2, min(1 + sms // (2 * programs), longest // MIN_SEGMENT))
        seg_chunks = -(-longest // count)
        return Plan("segments", (), -(-longest // seg_chunks), seg_chunks)
    return Plan("serial")
