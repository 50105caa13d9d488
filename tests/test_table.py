"""Tuned rows: reading, staleness, collisions, and the rule by which one row replaces another."""

import json
from dataclasses import replace

import pytest
import toy_family
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_family import toy  # noqa: F401

from kdagen import table
from kdagen.errors import CorruptFile
from kdagen.spec import Schedule

pytestmark = pytest.mark.usefixtures("toy")


def test_a_row_survives_its_line():
    row = toy_family.row(next_us=None)
    again = table.Row.of_line(row.line(), "here")
    assert again == row and again.env == row.env and again.spec == toy_family.spec()
    assert again.schedule == Schedule.make(bv=32, warps=4, stages=2)


@pytest.mark.parametrize("change", [
    {"repeat": 0}, {"err": None}, {"err": -1.0}, {"us": "fast"}, {"us": float("nan")},
    {"err": float("inf")}, {"noise": -0.1}, {"load": [1]}, {"env": []},
    {"variant": "toy__k128"[:-1] + "x"}, {"variant": "nobody__k128__bv8"}, {"surprise": 1},
])
def test_incomplete_or_odd_rows_are_refused_with_their_place(change):
    data = json.loads(toy_family.row().line()) | change
    with pytest.raises(CorruptFile, match=r"table\.jsonl:7: .*kdagen tuned prune"):
        table.Row.of_line(json.dumps(data), "table.jsonl:7")


@pytest.mark.parametrize("field", ["variant", "err", "repeat", "noise", "inputs", "default_us"])
def test_a_row_without_its_evidence_is_no_row(field):
    data = json.loads(toy_family.row().line())
    del data[field]
    with pytest.raises(CorruptFile):
        table.Row.of_line(json.dumps(data), "x:1")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "NaN", '"toy"'])
def test_lines_that_are_no_json_object(text):
    with pytest.raises(CorruptFile):
        table.Row.of_line(text, "x:1")


def test_reading_notes_bad_lines_or_raises(tmp_path):
    path = tmp_path / "sm90-h200.jsonl"
    assert table.read(path) == []
    good = toy_family.row()
    path.write_text(good.line() + "\n{broken\n")
    skipped = []
    assert table.read(path, skipped=skipped) == [good]
    assert len(skipped) == 1 and skipped[0].startswith("sm90-h200.jsonl:2")
    with pytest.raises(CorruptFile, match=r"sm90-h200\.jsonl:2"):
        table.read(path)


def test_bytes_that_are_no_text_spoil_their_line_alone(tmp_path):
    path, good = tmp_path / "sm90-h200.jsonl", toy_family.row()
    path.write_bytes(b"\xff\x00\n" + good.line().encode() + b"\n")
    skipped = []
    assert table.read(path, skipped=skipped) == [good] and len(skipped) == 1


def test_writing_sorts_and_refuses_collisions(tmp_path):
    path = tmp_path / "t.jsonl"
    a, b = toy_family.row(load=(7, 1)), toy_family.row(load=(3, 1))
    assert table.write(path, [a, b]) is True
    assert table.read(path) == [b, a]
    assert table.write(path, [b, a]) is False
    twin = toy_family.row(Schedule.make(bv=64, warps=1), load=(3, 1))
    assert table.collisions([a, b, twin]) == [b.key]
    with pytest.raises(CorruptFile, match="kdagen tuned merge"):
        table.write(path, [a, b, twin])
    assert table.read(path) == [b, a]


@pytest.mark.parametrize("change, same", [
    ({"load": (5, 7)}, False), ({"sms": 78}, False), ({"triton": "3.7.1"}, False), ({"triton": "3.6.1"}, True),
    ({"us": 1.0}, True), ({"slug": "h100"}, False),
])
def test_what_makes_two_rows_collide(change, same):
    assert (toy_family.row().key == toy_family.row(Schedule.make(bv=8), **change).key) is same


@pytest.mark.parametrize("load, bucket", [((1, 1), (0, 0)), ((2, 3), (1, 1)), ((4, 7), (2, 2)), ((0, 8), (0, 3)),
                                          ((1023, 1024), (9, 10))])
def test_bucket_is_log2_rounded_down(load, bucket):
    assert table.bucket(load) == bucket


@pytest.mark.parametrize("version, minor", [("3.6.0", (3, 6)), ("3.10.1+git", (3, 10)), ("", (0, 0)), ("main", (0, 0)),
                                            ("3", (0, 0))])
def test_triton_minor(version, minor):
    assert table.triton_minor(version) == minor


def test_a_row_is_stale_once_its_template_changed(toy):  # noqa: F811
    row = toy_family.row()
    assert not table.is_stale(row)
    template = toy.parent / "templates" / "toy.py.j2"
    template.write_text(template.read_text() + "# changed\n")
    toy_family.forget()
    assert table.is_stale(row)
    assert not table.is_stale(toy_family.row())


@pytest.mark.parametrize("us, noise, wins", [(9.7, 0.002, True), (9.85, 0.002, False), (9.7, 0.02, False),
                                             (9.0, 0.02, True), (10.0, 0.0, False)])
def test_hysteresis(us, noise, wins):
    holder = toy_family.row(us=10.0, noise=0.001)
    challenger = toy_family.row(Schedule.make(bv=64, warps=1), us=us, noise=noise)
    assert table.replaces(challenger, holder) is wins
    assert table.merge([holder], [challenger]) == [challenger if wins else holder]


def test_a_fresh_row_beats_a_stale_one_however_slow():
    stale = toy_family.row(us=1.0, inputs="0" * 64)
    fresh = toy_family.row(Schedule.make(bv=64, warps=1), us=50.0)
    assert table.merge([stale], [fresh]) == [fresh]
    assert table.merge([fresh], [stale]) == [fresh]


def test_the_same_choice_measured_again_replaces_its_old_figures():
    old, new = toy_family.row(us=10.0), toy_family.row(us=10.4)
    assert table.merge([old], [new]) == [new]


SCHEDULES = [Schedule.make(bv=bv, warps=warps, stages=1) for bv in (8, 32, 64) for warps in (1, 4)]
plans = st.lists(st.tuples(st.sampled_from(SCHEDULES), st.sampled_from([(0, 0), (1, 3)]),
                           st.sampled_from([1.0, 9.85, 9.9, 10.0, 20.0]), st.sampled_from([0.0, 0.01]), st.booleans()),
                 max_size=6)


def build(plan):
    return [toy_family.row(s, load=load, us=us, noise=noise, **({"inputs": "0" * 64} if stale else {}))
            for s, load, us, noise, stale in plan]


@settings(max_examples=60, deadline=None)
@given(plans, plans, st.randoms())
def test_merge_properties(old, new, random):
    old, new = build(old), build(new)
    merged = table.merge(old, new)
    assert not table.collisions(merged) and merged == sorted(merged)
    assert {row.key for row in merged} == {row.key for row in old + new}
    assert set(merged) <= set(old + new)
    shuffled = random.sample(old, len(old)), random.sample(new, len(new))
    assert table.merge(*shuffled) == merged, "the order of the rows decides"
    assert table.merge(merged, new) == merged, "merging again changes the table"
    assert table.merge(merged, []) == merged
    fresh = {row.key for row in old + new if not table.is_stale(row)}
    assert all(not table.is_stale(row) for row in merged if row.key in fresh), "a stale row displaced a fresh one"


@settings(max_examples=40, deadline=None)
@given(plans)
def test_no_row_that_lost_would_replace_the_winner(rows):
    rows = [row for row in build(rows) if not table.is_stale(row)]
    for row in table.merge([], rows):
        assert not any(table.replaces(other, row) for other in rows if other.key == row.key)


def test_variants_named_by_the_tables(toy):  # noqa: F811
    toy_family.install(toy, toy_family.row(), toy_family.row(load=(1, 1)))
    assert {variant.name for variant in table.variants()} == {"toy__k128_v128_bf16__bv32"}


def test_rows_are_plain_values():
    row = toy_family.row()
    assert replace(row, env={}) == row, "env is evidence, not identity"


@pytest.mark.parametrize("candidates", [0, -1, "many", 1.5, True])
def test_odd_numbers_of_candidates(candidates):
    data = json.loads(toy_family.row().line()) | {"candidates": candidates}
    with pytest.raises(CorruptFile):
        table.Row.of_line(json.dumps(data), "x:1")


def test_rows_of_before_candidates_were_counted_are_read():
    data = json.loads(toy_family.row(candidates=14).line())
    assert table.Row.of_line(json.dumps(data), "x:1").candidates == 14
    del data["candidates"]
    assert table.Row.of_line(json.dumps(data), "x:1").candidates is None


def test_of_kept_defaults_the_newest_fresh_ones_stay_where_no_row_chooses(tmp_path):
    at = lambda load, **changes: toy_family.row(load=(load, 1), **changes)
    stale = {"inputs": "0" * 64}
    old = [at(1, us=9.0), at(2, us=9.0), at(3, **stale), at(4)]
    new = [at(2, us=10.0), at(5), at(6, **stale)]
    tuned = [at(4, us=8.0), at(5, us=8.0, **stale)]
    assert table.settle(old, new, tuned) == [at(1, us=9.0), at(2, us=10.0), at(5)]
    assert table.settle(old, [], []) == [at(1, us=9.0), at(2, us=9.0), at(4)]
    path = table.swept_path(table.path_of("sm90", "h200", tmp_path))
    assert path.name == "sm90-h200.swept"
    toy_family.dispatch.files.write_if_different(path, "")
    assert table.variants(tmp_path) == set(), "what is kept by default is not rendered for it"
