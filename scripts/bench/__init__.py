"""The sections of scripts/benchmark.py, one module a family.

A section is a module ``scripts/bench/<name>.py`` with one function:

    def run(budget_s: float, *, peers: tuple[str, ...] = (), keep=lambda rows: None) -> list[dict]:

It checks each result against the oracle or a peer before it times it, makes its rows with ``common.row``, stops near
the budget (``common.Budget``), most wanted cases first, and prints nothing. Inputs are random and rotate; never zeros.
``peers`` and ``keep`` are for sections that have peers, which go through their cases by ``_passes.alone_then_beside``.
"""
