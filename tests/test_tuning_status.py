"""What `kdagen tuned` shows and does."""

import csv
import io
import json

import pytest
import toy_family
from toy_family import install, row, spec, toy  # noqa: F401

from kdagen import families, table
from kdagen.errors import ArgumentError, CorruptFile
from kdagen.spec import Schedule, Spec
from kdagen.tuning import status

A = Schedule.make(bv=64, warps=1)


@pytest.fixture(autouse=True)
def committed(toy, monkeypatch):  # noqa: F811
    one = families.get("toy")
    monkeypatch.setattr(one, "committed", lambda: [spec(), Spec("toy", k=64, v=128, dtype="bf16")], raising=False)
    monkeypatch.setattr(families, "everyone", lambda: (one,))


def file(tmp_path, *rows):
    path = tmp_path / "other.jsonl"
    path.write_text("".join(one.line() + "\n" for one in rows))
    return path


def test_status(toy):  # noqa: F811
    install(toy, row(us=10.0, default_us=15.0), row(A, load=(1, 1), us=10.0, default_us=11.0),
            row(A, load=(2, 2), inputs="0" * 64, us=1.0, default_us=99.0))
    columns, rows = status.status()
    shown = dict(zip(columns, rows[0]))
    assert shown["table"] == "sm90-h200" and shown["family"] == "toy"
    assert (shown["specs swept"], shown["rows"], shown["stale"], shown["kept default"]) == ("1 of 2", 3, 1, "")
    assert (shown["median gain"], shown["worst regret"]) == ("1.50x", "1.50x"), "stale rows say nothing of gain"
    assert shown["triton"] == "3.6.0"


def test_status_covers_what_is_left_to_the_default(toy):  # noqa: F811
    install(toy, row(us=10.0, default_us=15.0))
    install(toy, row(load=(1, 1), us=10.0, next_us=9.9), row(load=(2, 2), us=10.0, next_us=12.0),
            row(load=(3, 3), inputs="0" * 64, us=10.0, next_us=1.0), name="sm90-h200.swept")
    columns, rows = status.status()
    shown = dict(zip(columns, rows[0]))
    assert (shown["loads swept"], shown["rows"], shown["stale"], shown["kept default"]) == (3, 1, 1, "within 1.0%")


def test_status_counts_unreadable_lines(toy):  # noqa: F811
    install(toy, row())
    path = toy / "tuned" / "sm90-h200.jsonl"
    path.write_text(path.read_text() + "{\n{\n")
    columns, rows = status.status()
    assert dict(zip(columns, rows[-1])) | {"family": "(unreadable)", "rows": 2} == dict(zip(columns, rows[-1]))


def test_no_tables_no_rows():
    assert status.status()[1] == [] and status.prune() == []


def test_diff(toy, tmp_path):  # noqa: F811
    install(toy, row(load=(1, 1), us=10.0), row(load=(2, 2), us=10.0), row(load=(3, 3), us=10.0), row(load=(4, 4)))
    other = file(tmp_path, row(A, load=(1, 1), us=9.0), row(A, load=(2, 2), us=9.95), row(load=(4, 4), us=8.0),
                 row(load=(5, 5)))
    columns, rows = status.diff(other)
    what = {one[columns.index("load")]: one[columns.index("what")] for one in rows}
    assert what == {"2^1 x 2^1": "replaces", "2^2 x 2^2": "within the margin", "2^3 x 2^3": "only here",
                    "2^5 x 2^5": "only there"}
    assert status.diff(toy / "tuned" / "sm90-h200.jsonl")[1] == []


def test_diff_against_a_broken_file_is_an_error(tmp_path):
    (tmp_path / "other.jsonl").write_text("{\n")
    with pytest.raises(CorruptFile):
        status.diff(tmp_path / "other.jsonl")


def of_device(one, slug):
    return table.Row(**{f: getattr(one, f) for f in one.__dataclass_fields__} | {
        "env": one.env | {"arch": "sm90", "slug": slug}})


def test_merge_sorts_rows_to_their_devices(toy, tmp_path):  # noqa: F811
    held = of_device(row(us=10.0), "h200")
    install(toy, held)
    other = file(tmp_path, of_device(row(A, us=9.95), "h200"), of_device(row(A, load=(1, 1)), "h200"),
                 of_device(row(A, us=3.0), "h100"))
    lines = status.merge([other])
    assert [line.split(":")[0] for line in lines] == ["sm90-h100.jsonl", "sm90-h200.jsonl"]
    assert "1 of 2 rows taken, 2 in all" in lines[1] and "kdagen render" in lines[1]
    assert held in table.read(toy / "tuned" / "sm90-h200.jsonl")
    assert len(table.read(toy / "tuned" / "sm90-h100.jsonl")) == 1
    assert all("0 of" in line for line in status.merge([other])), "merging again takes nothing"


def test_merge_needs_to_know_the_device(tmp_path):
    with pytest.raises(ArgumentError, match="lacks arch or slug"):
        status.merge([file(tmp_path, row())])


def test_prune(toy):  # noqa: F811
    good = row()
    install(toy, good, row(A, load=(1, 1), inputs="0" * 64), row(A, us=99.0))
    path = toy / "tuned" / "sm90-h200.jsonl"
    path.write_text(path.read_text() + "{\n")
    assert status.prune() == ["sm90-h200.jsonl: 1 stale, 1 unreadable, 1 colliding removed, 1 left"]
    assert table.read(path) == [good]


def test_kept_defaults_are_merged_and_pruned_with_their_table(toy, tmp_path):  # noqa: F811
    at = lambda load, **changes: of_device(row(load=(load, 1), **changes), "h200")
    install(toy, at(1))
    install(toy, at(2, us=9.0), at(3), name="sm90-h200.swept")
    other = file(tmp_path, at(3, us=5.0))
    table.write(table.swept_path(other), [at(1), at(2, us=9.5), at(4)])
    (line,) = status.merge([other])
    assert "1 of 1 rows taken, 2 in all, 2 loads left to the default" in line
    swept = toy / "tuned" / "sm90-h200.swept"
    assert table.read(swept) == [at(2, us=9.5), at(4)]
    swept.write_text(swept.read_text() + at(7, inputs="0" * 64).line() + "\n{\n")
    status.prune()
    assert table.read(swept) == [at(2, us=9.5), at(4)]


def test_export(toy):  # noqa: F811
    assert status.export("csv").startswith("table,family,variant")
    install(toy, row(), row(A, load=(1, 1), inputs="0" * 64))
    records = list(csv.DictReader(io.StringIO(status.export("csv"))))
    assert [(one["load"], one["stale"], one["env_slug"]) for one in records] == [
        ("2^5 x 2^6", "False", "h200"), ("2^1 x 2^1", "True", "h200")]
    assert [one["us"] for one in json.loads(status.export("json"))] == [10.0, 10.0]


def test_the_toy_is_what_these_tests_think():
    assert toy_family.spec().name == "toy__k128_v128_bf16"
