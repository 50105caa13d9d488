"""A family that exists in tests only, with its template, device and tuned tables in folders of the test's own."""

from __future__ import annotations

import pytest

from kdagen import dispatch, families, files, quirks, render, table
from kdagen.families.base import Family
from kdagen.render import inputs_hash
from kdagen.spec import Flag, Problem, Schedule, Spec, Target, Variant

H200 = Target("sm90", "h200", 132, 232448)
H100 = Target("sm90", "h100", 132, 232448)
BYTES_A_BLOCK = 1024
TEMPLATE = '"""Toy."""\nSPEC = {{ spec.literal | literal }}\nBLOCK = {{ blocks.bv }}\n'


class Toy(Family):
    name = "toy"
    title = "a toy"
    flags = {"fast": Flag("fast", (False, True))}
    forms = ("", "tma")
    space = {"bv": (8, 16, 32, 64, 128)}
    warps = (1, 2, 4)
    stages = (1, 2)

    def supports(self, spec, schedule, target):
        if target and schedule.block["bv"] * schedule.stages * BYTES_A_BLOCK > target.smem:
            return f"bv {schedule.block['bv']} with {schedule.stages} stages does not fit {target.slug}"
        if schedule.form == "tma" and target and target.arch != "sm90":
            return "the tma form needs sm90"
        return None

    def default(self, spec, target=None, problem=None):
        return Schedule.make(bv=16, warps=2, stages=1)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The family ``toy`` beside the shipped ones; templates and generated/ are folders that the test may change."""
    templates, generated = tmp_path / "templates", tmp_path / "generated"
    templates.mkdir()
    generated.mkdir()
    for form in ("toy.py.j2", "toy_tma.py.j2"):
        (templates / form).write_text(TEMPLATE)
    original, one = families.get, Toy()
    monkeypatch.setattr(families, "get", lambda name: one if name == "toy" else original(name))
    monkeypatch.setattr(files, "templates_dir", lambda: templates)
    monkeypatch.setattr(files, "generated_dir", lambda: generated)
    monkeypatch.setattr(quirks, "entries", lambda: ())
    monkeypatch.setattr(dispatch, "triton_version", lambda: "3.6.0")
    for variable in ("KDAGEN_MODE", "KDAGEN_PIN"):
        monkeypatch.delenv(variable, raising=False)
    forget()
    yield generated
    forget()


def forget() -> None:
    """Drop what was cached of templates and tables."""
    for cached in (render._environment, render.template_sources, render._inputs_hash, render.render):
        cached.cache_clear()
    dispatch.reset()


def spec(**flags) -> Spec:
    return Spec("toy", k=128, v=128, dtype="bf16", flags=tuple(flags.items()))


def row(schedule: Schedule | None = None, *, of: Spec | None = None, **changes) -> table.Row:
    """A fresh, complete row; ``changes`` replace fields, and fields of env by name."""
    schedule = schedule or Schedule.make(bv=32, warps=4, stages=2)
    variant = Variant(of or spec(), schedule.source_key)
    env = {"gpu": "NVIDIA H200", "slug": "h200", "sms": 132, "triton": "3.6.0", "torch": "2.11", "cuda": "13.0",
           "how": "graph"}
    env |= {name: changes.pop(name) for name in list(changes) if name in env}
    fields = dict(variant=variant.name, load=(5, 6), warps=schedule.warps, stages=schedule.stages, us=10.0,
                  default_us=12.0, next_us=11.0, noise=0.002, err=1e-3, repeat=20, inputs=inputs_hash(variant), env=env)
    return table.Row(**fields | changes)


def install(generated, *rows: table.Row, name: str = "sm90-h200.jsonl") -> None:
    """Make these the tuned table, as written lines (collisions and all)."""
    folder = generated / "tuned"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(one.line() + "\n" for one in rows))
    dispatch.reset()


PROBLEM = Problem(tokens=64, seqs=1, heads=32)  # load (32, 64): bucket (5, 6)
