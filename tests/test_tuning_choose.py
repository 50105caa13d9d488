"""From times to rows: few variants, within 3 %, nothing that gains nothing, and dispatch never worse off for a row."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_family import H200, install, spec, toy  # noqa: F401

from kdagen import dispatch, families, files, table
from kdagen.spec import Problem, Schedule
from kdagen.tuning import choose
from kdagen.tuning.choose import Finals, Timed

pytestmark = pytest.mark.usefixtures("toy")

DEFAULT = Schedule.make(bv=16, warps=2, stages=1)
A, B, C = (Schedule.make(bv=bv, warps=1, stages=1) for bv in (8, 32, 64))
A2 = Schedule.make(bv=8, warps=4, stages=1)  # A's file, other launch options
ENV = {"gpu": "stub", "arch": "sm90", "slug": "h200", "sms": 132, "triton": "3.6.0"}


def finals(load, times: dict, noise=0.001):
    return Finals(load, DEFAULT, tuple(Timed(s, us, noise, 1e-3, 20) for s, us in times.items()))


def test_fewest_variants_within_three_percent():
    at = [finals((0, 0), {DEFAULT: 20, A: 10.0, B: 10.2, C: 15}), finals((1, 0), {DEFAULT: 20, A: 14, B: 10.2, C: 10.0}),
          finals((2, 0), {DEFAULT: 20, A: 30, B: 10.0, C: 12})]
    assert {load: t.schedule for load, t in choose.fewest(at).items()} == dict.fromkeys([(0, 0), (1, 0), (2, 0)], B)
    assert choose.fewest(at, within=0.01)[(0, 0)].schedule == A, "with a tighter share each bucket takes its own"


def test_the_defaults_file_is_free_with_any_launch_options():
    other = Schedule.make(bv=16, warps=4, stages=1)
    at = [finals((0, 0), {DEFAULT: 12, other: 10.1, A: 10.0})]
    assert choose.fewest(at)[(0, 0)].schedule == other


def test_among_the_chosen_files_each_bucket_takes_its_fastest_options():
    at = [finals((0, 0), {DEFAULT: 20, A: 10.0, A2: 10.5}), finals((1, 0), {DEFAULT: 20, A: 10.5, A2: 10.0})]
    assert [t.schedule for t in choose.fewest(at).values()] == [A, A2]


def test_a_bucket_whose_default_was_not_timed_is_left_out():
    assert choose.fewest([finals((0, 0), {A: 10.0})]) == {}
    assert choose.rows(spec(), [finals((0, 0), {A: 10.0})], ENV) == []


@pytest.mark.parametrize("us, noise, row", [(9.9, 0.001, False), (9.7, 0.001, True), (9.7, 0.02, False), (9.0, 0.02, True)])
def test_a_row_must_gain_more_than_two_percent_and_the_noise(us, noise, row):
    made = choose.rows(spec(), [finals((3, 3), {DEFAULT: 10.0, A: us}, noise)], ENV)
    assert bool(made) is row


def test_rows_carry_the_evidence():
    (row,) = choose.rows(spec(), [finals((3, 4), {DEFAULT: 10.0, A: 8.0, B: 8.5})], ENV)
    assert (row.us, row.default_us, row.next_us, row.err, row.repeat) == (8.0, 10.0, 8.5, 1e-3, 20)
    assert row.schedule == A and row.load == (3, 4) and row.env == ENV and not table.is_stale(row)
    assert table.Row.of_line(row.line(), "x") == row


def written(at: list[Finals], **changes) -> tuple[list[table.Row], list[table.Row]]:
    """(tuned rows, kept defaults) of these times, in the tables that dispatch reads; ``changes`` are of their env."""
    rows = choose.rows(spec(), at, ENV | changes)
    kept = choose.kept(spec(), at, rows, ENV | changes)
    install(files.generated_dir(), *rows)
    install(files.generated_dir(), *kept, name="sm90-h200.swept")
    return rows, kept


def picked(one: Finals) -> Schedule:
    return dispatch.pick(spec(), Problem(1 << one.load[1], 1, 1 << one.load[0]), H200).schedule


@pytest.mark.parametrize("product", ["h200", "h100"])
@pytest.mark.parametrize("times", [{A: 20.0}, {A: 10.1}, {B: 10.0}, {}], ids=["bad", "no gain", "another", "alone"])
def test_a_kept_default_keeps_a_neighbours_row_out(times, product):
    """A gains much in one bucket. In the next, where it does not or was not timed, no row says so: the kept default does, on
    the product that was measured and on others of its architecture."""
    at = [finals((3, 3), {DEFAULT: 10.0, A: 5.0}), finals((4, 3), {DEFAULT: 10.0} | times),
          finals((9, 3), {DEFAULT: 10.0, A: 20.0})]
    rows, kept = written(at, slug=product)
    assert {row.load: row.schedule for row in rows} == {(3, 3): A}
    assert {row.load: row.schedule for row in kept} == {(4, 3): DEFAULT, (9, 3): DEFAULT}
    assert [picked(one) for one in at] == [A, DEFAULT, DEFAULT]


schedules = st.sampled_from([DEFAULT, A, A2, B, C])
tables = st.dictionaries(
    st.tuples(st.integers(0, 6), st.integers(0, 3)),
    st.dictionaries(schedules, st.floats(5.0, 20.0), max_size=5).map(lambda times: {DEFAULT: 12.0} | times),
    min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(tables)
def test_no_measured_bucket_is_worse_off(times):
    """With the tables installed, dispatch's choice in every measured bucket is within 3 % of the best or at the default."""
    at = [finals(load, by) for load, by in times.items()]
    rows, kept = written(at)
    assert not table.collisions(rows + kept) and len(rows + kept) == len(at)
    for one in at:
        mine = one.of(picked(one))
        assert mine is not None, "dispatch would run what was never timed there"
        assert mine.us <= one.best.us * 1.031 or mine.us <= one.of(DEFAULT).us * 1.021
    assert choose.rows(spec(), list(reversed(at)), ENV) == rows


def test_installed_rows_are_what_pick_finds(toy):  # noqa: F811
    install(toy, *choose.rows(spec(), [finals((5, 6), {DEFAULT: 10.0, A: 8.0})], ENV))
    assert dispatch.pick(spec(), Problem(64, 1, 32), H200).schedule == A
    assert families.get("toy").load(spec(), Problem(64, 1, 32)) == (32, 64)


def test_buckets_left_to_the_default_say_what_it_took_and_the_best_beside_it():
    at = [finals((0, 0), {DEFAULT: 20, A: 10.0}), finals((6, 0), {DEFAULT: 10.0, A: 9.9, B: 11})._replace(ran=7),
          finals((9, 0), {A: 10.0})]
    rows = choose.rows(spec(), at, ENV)
    assert [row.load for row in rows] == [(0, 0)]
    (kept,) = choose.kept(spec(), at, rows, ENV)
    assert (kept.load, kept.schedule, kept.us, kept.default_us, kept.next_us, kept.candidates) == (
        (6, 0), DEFAULT, 10.0, 10.0, 9.9, 7)
    assert kept.err == 1e-3 and kept.repeat == 20 and not table.is_stale(kept)
