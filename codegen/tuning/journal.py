"""The journal of a sweep: one JSON line an event, flushed at once, so that a sweep can stop anywhere and go on.

Events, each with the hash of what was measured (``inputs``), so that a later template invalidates an old entry:
``compiled`` (resources, or why not), ``screened`` (microseconds), ``verified`` (error and repeats), ``timed`` (final
time and noise), and ``failed`` (which stage, why). The last event of a (stage, point, candidate) counts.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Lock

STAGES = ("compiled", "screened", "verified", "timed")


class Journal:
    """Append-only; ``Journal(path, resume=True)`` reads what is there, without ``resume`` it begins anew."""

    def __init__(self, path: Path, *, resume: bool = False):
        self.path, self._lock = path, Lock()
        self._known: dict[tuple, dict] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            text = path.read_text()
            for line in text.splitlines():
                try:
                    self._learn(json.loads(line))
                except (ValueError, KeyError, TypeError):
                    continue  # a line cut off by a kill
            self._file = path.open("a")
            if text and not text.endswith("\n"):
                self._file.write("\n")
        else:
            self._file = path.open("w")

    def _learn(self, event: dict) -> None:
        self._known[(event["stage"], event["point"], event["candidate"], event["inputs"])] = event

    def note(self, stage: str, point: str, candidate: str, inputs: str, **values) -> dict:
        """Write one event; ``failed="..."`` among the values marks a failure of that stage."""
        event = {"stage": stage, "point": point, "candidate": candidate, "inputs": inputs,
                 "at": round(time.time(), 2)} | values
        with self._lock:
            self._learn(event)
            self._file.write(json.dumps(event, sort_keys=True) + "\n")
            self._file.flush()
        return event

    def known(self, stage: str, point: str, candidate: str, inputs: str) -> dict | None:
        """The last event of this stage, or None: then it is still to do."""
        with self._lock:
            return self._known.get((stage, point, candidate, inputs))

    def failures(self) -> list[dict]:
        with self._lock:
            return [event for event in self._known.values() if event.get("failed")]

    def close(self) -> None:
        self._file.close()
