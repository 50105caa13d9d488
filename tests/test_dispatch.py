"""Dispatch is a table read: never another Spec, never a schedule that does not fit, always the same answer."""

import logging
import random
import threading

import pytest
import toy_family
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_family import H100, H200, PROBLEM, install, row, spec, toy  # noqa: F401

from kdagen import devices, dispatch, families, loader, quirks, table
from kdagen.errors import ArgumentError, UnknownName, Unsupported
from kdagen.spec import Problem, Schedule, Spec, Target

pytestmark = pytest.mark.usefixtures("toy")

DEFAULT = Schedule.make(bv=16, warps=2, stages=1)
TUNED = Schedule.make(bv=32, warps=4, stages=2)
OTHER = Schedule.make(bv=64, warps=1, stages=1)


def pick(problem=PROBLEM, target=H200, of=None):
    return dispatch.pick(of or spec(), problem, target)


def test_without_rows_the_default_rule_answers():
    choice = pick()
    assert (choice.schedule, choice.how) == (DEFAULT, "default")
    assert choice.variant.name == "toy__k128_v128_bf16__bv16"


def test_an_exact_row(toy):  # noqa: F811
    install(toy, row(TUNED), row(OTHER, load=(9, 9)))
    choice = pick()
    assert (choice.schedule, choice.how) == (TUNED, "exact")
    assert choice.variant.spec == spec()
    assert choice.variant.schedule == TUNED.source_key, "warps and stages do not name a file"


@pytest.mark.parametrize("load, how", [((5, 6), "exact"), ((5, 7), "near"), ((7, 4), "near"), ((8, 6), "default"),
                                       ((5, 3), "default")])
def test_rows_reach_two_octaves(toy, load, how):  # noqa: F811
    install(toy, row(TUNED, load=load))
    choice = pick()
    assert choice.how == how and choice.schedule == (DEFAULT if how == "default" else TUNED)


def test_the_order_of_preference(toy):  # noqa: F811
    """Same product first, then the Triton minor, then the load, then the name."""
    ladder = [
        row(Schedule.make(bv=8, warps=1)),
        row(Schedule.make(bv=8, warps=2), load=(6, 6)),
        row(Schedule.make(bv=8, warps=4), load=(7, 6)),
        row(Schedule.make(bv=16, warps=1), triton="3.7.0"),
        row(Schedule.make(bv=16, warps=4), triton="3.9.0"),
        row(Schedule.make(bv=32, warps=1), slug="h100"),
    ]
    while ladder:
        install(toy, *random.sample(ladder, len(ladder)))
        best = ladder.pop(0)
        assert pick().schedule == best.schedule
    install(toy)
    assert pick().how == "default"


def test_a_row_of_another_product_of_the_arch_answers_as_arch(toy):  # noqa: F811
    install(toy, row(TUNED, slug="h100"), name="sm90-h100.jsonl")
    assert (pick().schedule, pick().how) == (TUNED, "arch")
    assert pick(target=H100).how == "exact"
    assert pick(target=devices.named("a100")).how == "default", "rows never cross architectures"


def test_the_same_product_with_fewer_sms_is_another_device(toy):  # noqa: F811
    install(toy, row(TUNED, sms=66))
    assert pick().how == "arch"


def test_rows_of_other_specs_do_not_count(toy):  # noqa: F811
    fast = Spec("toy", k=128, v=128, dtype="bf16", flags=(("fast", True),))
    install(toy, row(TUNED, of=fast), row(OTHER, of=Spec("toy", k=64, v=128, dtype="bf16")))
    assert pick().how == "default"
    assert pick(of=fast).schedule == TUNED


def test_a_stale_row_is_passed_over(toy):  # noqa: F811
    install(toy, row(TUNED, inputs="0" * 64), row(OTHER, load=(6, 6)))
    assert pick().schedule == OTHER
    _, verdicts = dispatch.explain(spec(), PROBLEM, H200)
    assert any(v.rank is None and "stale" in v.why and v.schedule == TUNED for v in verdicts)


def test_quirks_are_passed_over(toy, monkeypatch):  # noqa: F811
    install(toy, row(TUNED), row(OTHER, load=(6, 6)))
    entry = {"family": "toy", "arch": "sm90", "triton": ["3.6", "3.6"], "match": {"bv": 32}, "why": "hangs", "link": "url"}
    monkeypatch.setattr(quirks, "entries", lambda: (entry,))
    assert pick().schedule == OTHER


def test_a_row_too_big_for_the_device_is_passed_over(toy):  # noqa: F811
    small = Target("sm90", "h200", 132, 50 * toy_family.BYTES_A_BLOCK)
    install(toy, row(TUNED), row(OTHER, load=(6, 6)))
    assert pick().schedule == TUNED
    assert pick(target=small).schedule == DEFAULT
    _, verdicts = dispatch.explain(spec(), PROBLEM, small)
    assert sum("does not fit" in v.why for v in verdicts) == 2


def test_a_default_that_does_not_fit_is_refused_with_where_the_limits_are():
    tiny = Target("sm90", "h200", 132, 1024)
    with pytest.raises(Unsupported, match=r"does not fit h200.*docs/limits.md"):
        pick(target=tiny)


SCHEDULES = [Schedule.make(bv=bv, warps=w, stages=s, form=form)
             for bv in (8, 32, 64, 128) for w in (1, 4) for s in (1, 2) for form in ("", "tma")]
rows = st.lists(st.tuples(
    st.sampled_from(SCHEDULES), st.booleans(), st.integers(3, 8), st.integers(4, 8), st.sampled_from(["h200", "h100"]),
    st.sampled_from(["3.6.0", "3.7.0", ""]), st.booleans()), max_size=8)
targets = st.builds(Target, st.sampled_from(["sm90", "sm80"]), st.sampled_from(["h200", "h100"]), st.just(132),
                    st.sampled_from([70_000, 140_000, 232_448]))


@settings(max_examples=80, deadline=None)
@given(rows, targets, st.booleans(), st.randoms())
def test_whatever_the_tables_hold(table_rows, target, fast, shuffle):
    """Never another Spec, never over the shared memory, never a form without its arch; the rows' order is nothing."""
    asked = spec(fast=True) if fast else spec()
    made = tuple(row(s, of=spec(fast=True) if other else spec(), load=(a, b), slug=slug, triton=triton,
                     **({"inputs": "0" * 64} if stale else {}))
                 for s, other, a, b, slug, triton, stale in table_rows)
    load = families.get("toy").load(asked, PROBLEM)
    ranked = dispatch.rank(asked, load, target, made)
    assert len(ranked) == sum(one.spec == asked for one in made)
    usable = [verdict for verdict in ranked if verdict.rank is not None]
    assert [verdict.rank for verdict in usable] == list(range(len(usable)))
    for verdict in usable:
        block, schedule = verdict.schedule.block, verdict.schedule
        assert verdict.row.spec == asked
        assert block["bv"] * schedule.stages * toy_family.BYTES_A_BLOCK <= target.smem
        assert not schedule.form or target.arch == "sm90"
        assert not table.is_stale(verdict.row)
    assert all(verdict.why for verdict in ranked)
    again = dispatch.rank(asked, load, target, tuple(shuffle.sample(made, len(made))))
    assert again == ranked


def test_pin(toy):  # noqa: F811
    install(toy, row(TUNED))
    with dispatch.pin("toy__k128_v128_bf16__bv64"):
        assert (pick().schedule, pick().how) == (Schedule.make(bv=64, warps=2, stages=1), "pinned")
        with dispatch.pin("toy__k128_v128_bf16__tma_bv8", warps=4, stages=2):
            assert pick().schedule == Schedule.make(bv=8, warps=4, stages=2, form="tma")
        assert pick().schedule.block["bv"] == 64
        assert pick(of=Spec("toy", k=64, v=128, dtype="bf16")).how == "default", "a pin holds for its Spec alone"
    assert pick().how == "exact"


def test_a_pin_is_lifted_by_an_exception():
    with pytest.raises(ZeroDivisionError), dispatch.pin("toy__k128_v128_bf16__bv64"):
        raise ZeroDivisionError
    assert pick().how == "default"


def test_a_pin_that_does_not_fit_is_refused():
    with dispatch.pin("toy__k128_v128_bf16__bv128", stages=2), pytest.raises(Unsupported, match="does not fit h200"):
        pick()
    with pytest.raises(UnknownName), dispatch.pin("toy__k128_q7__bv8"):
        pass


def test_pins_from_the_environment(monkeypatch):
    monkeypatch.setenv("KDAGEN_PIN", "toy__k128_v128_bf16__bv64, toy__k64_v128_bf16__bv8:w4:s2")
    assert (pick().schedule, pick().how) == (Schedule.make(bv=64, warps=2, stages=1), "pinned")
    assert pick(of=Spec("toy", k=64, v=128, dtype="bf16")).schedule == Schedule.make(bv=8, warps=4, stages=2)
    with dispatch.pin("toy__k128_v128_bf16__bv8"):
        assert pick().schedule.block["bv"] == 8, "the block is nearer than the environment"


@pytest.mark.parametrize("value", ["toy__k128_v128_bf16__bv64:x4", "toy__k128_v128_bf16__bv64:w", "nobody__k1:w1"])
def test_a_bad_pin_from_the_environment(monkeypatch, value):
    monkeypatch.setenv("KDAGEN_PIN", value)
    with pytest.raises((ArgumentError, UnknownName), match="KDAGEN_PIN: got"):
        pick()


def test_modes(toy, monkeypatch):  # noqa: F811
    install(toy, row(TUNED))
    for mode, how in (("tuned", "exact"), ("strict", "exact"), ("default", "default")):
        monkeypatch.setenv("KDAGEN_MODE", mode)
        assert pick().how == how
    monkeypatch.setenv("KDAGEN_MODE", "fast")
    with pytest.raises(ArgumentError, match="tuned, default or strict"):
        pick()


def test_corrupted_rows_are_skipped_with_one_line_each(toy, caplog):  # noqa: F811
    install(toy, row(TUNED))
    path = toy / "tuned" / "sm90-h200.jsonl"
    path.write_text("{broken\n" + path.read_text() + '{"variant": "nobody__k1"}\n')
    dispatch.reset()
    loader._said.clear()
    with caplog.at_level(logging.WARNING, "kdagen"):
        for _ in range(3):
            assert pick().schedule == TUNED
            dispatch.reset()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all("skipped a tuned row: sm90-h200.jsonl:" in line and "kdagen tuned prune" in line for line in said)


def test_the_digest_follows_all_that_dispatch_depends_on(toy, monkeypatch):  # noqa: F811
    seen = [dispatch.digest(H200)]

    def changed() -> bool:
        seen.append(dispatch.digest(H200))
        return seen[-1] not in seen[:-1]

    assert dispatch.digest(H200) == seen[0]
    install(toy, row(TUNED))
    assert changed()
    install(toy, row(OTHER))
    assert changed()
    (toy / "MANIFEST.json").write_text('{"format": 1, "variants": {}}')
    assert changed()
    with dispatch.pin("toy__k128_v128_bf16__bv64"):
        assert changed()
    assert dispatch.digest(H200) == seen[-2]
    assert dispatch.digest(H100) not in seen
    monkeypatch.setenv("KDAGEN_MODE", "strict")
    assert changed()
    monkeypatch.setenv("KDAGEN_PIN", "toy__k128_v128_bf16__bv64")
    assert changed()
    monkeypatch.setattr(quirks, "entries", lambda: ({"family": "toy"},))
    assert changed()
    monkeypatch.setattr(dispatch, "triton_version", lambda: "3.9.0")
    assert changed()


def test_memos_are_emptied_when_a_pin_or_a_table_changes():
    memo = dispatch.memo("test_dispatch")
    assert dispatch.memo("test_dispatch") is memo
    memo["key"] = pick()
    with dispatch.pin("toy__k128_v128_bf16__bv64"):
        assert not memo
        memo["key"] = pick()
    assert not memo
    memo["key"] = pick()
    dispatch.reset()
    assert not memo


def test_explain_tells_winner_losers_and_default(toy):  # noqa: F811
    install(toy, row(TUNED), row(OTHER, load=(9, 9)), row(Schedule.make(bv=8, warps=1), load=(6, 6)))
    choice, verdicts = dispatch.explain(spec(), PROBLEM, H200)
    assert choice.schedule == TUNED
    told = {verdict.schedule: (verdict.rank, verdict.why) for verdict in verdicts}
    assert told[TUNED] == (0, "exact")
    assert told[Schedule.make(bv=8, warps=1)] == (1, "near")
    assert told[OTHER][0] is None and "octaves away" in told[OTHER][1]
    assert told[DEFAULT] == (None, "the family's default rule")


@pytest.mark.parametrize("kept, told", [
    ([], "not swept near this load"),
    ([(DEFAULT, dict(us=10.0, next_us=11.0, candidates=14))], "swept: the fastest of 14 schedules"),
    ([(DEFAULT, dict(us=10.0, next_us=9.92, candidates=14))], "swept: within 0.8% of the fastest of 14 schedules"),
    ([(DEFAULT, dict(load=(6, 6), us=10.0, next_us=None))], "swept 1 octave away: the fastest of several schedules"),
    ([(DEFAULT, dict(load=(5, 4), us=10.0, candidates=3)), (DEFAULT, dict(load=(8, 6), us=10.0, next_us=9.0))],
     "swept 2 octaves away: the fastest of 3 schedules"),
    ([(DEFAULT, dict(us=10.0, candidates=2, slug="h100"))], "swept on h100: the fastest of 2 schedules"),
    ([(DEFAULT, dict(inputs="0" * 64))], "not swept near this load"),
    ([(TUNED, dict(us=10.0, next_us=11.0))], "not swept near this load"),
], ids=["never", "fastest", "within", "near", "nearest", "arch", "stale", "another default"])
def test_explain_tells_what_a_sweep_found_of_the_default(toy, kept, told):  # noqa: F811
    install(toy, *(row(schedule, **changes) for schedule, changes in kept), name="sm90-h200.swept")
    choice, verdicts = dispatch.explain(spec(), PROBLEM, H200)
    assert (choice.how, choice.schedule) == ("default", DEFAULT), "kept defaults choose nothing"
    assert [verdict.why for verdict in verdicts] == [f"the family's default rule; {told}"]


@pytest.mark.parametrize("kept, how", [
    (dict(load=(6, 6)), "default"), (dict(load=(5, 7)), "default"), (dict(load=(8, 6)), "near"),
    (dict(load=(6, 6), inputs="0" * 64), "near"), (dict(load=(6, 6), slug="h100"), "near"),
], ids=["nearer", "as near", "farther", "stale", "of another product"])
def test_a_nearer_load_that_was_left_to_the_default(toy, kept, how):  # noqa: F811
    """Against a row one octave away: what a sweep found nearest to a load decides, be it a row or the default."""
    load = table.bucket(families.get("toy").load(spec(), PROBLEM))
    install(toy, row(TUNED, load=(load[0], load[1] + 1)))
    assert pick().how == "near"
    before = dispatch.digest(H200)
    shift = [a - b for a, b in zip(kept["load"], (5, 6))]
    install(toy, row(DEFAULT, **kept | {"load": tuple(a + b for a, b in zip(load, shift))}), name="sm90-h200.swept")
    assert pick().how == how and pick().schedule == (DEFAULT if how == "default" else TUNED)
    assert dispatch.digest(H200) != before
    choice, verdicts = dispatch.explain(spec(), PROBLEM, H200)
    assert choice.how == how and (verdicts[0].rank == 0) == (how == "near")


def test_threads_agree(toy):  # noqa: F811
    install(toy, *(row(Schedule.make(bv=bv, warps=1), load=(load, 6)) for bv, load in ((8, 5), (32, 6), (64, 7))))
    problems = [Problem(64, 1, heads) for heads in (16, 32, 64, 128, 256)]
    wanted = [pick(problem) for problem in problems]
    found: list[list] = []

    def ask():
        found.append([pick(problem) for problem in problems for _ in range(5)])

    dispatch.reset()
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[choice for choice in wanted for _ in range(5)]] * 4


def test_shipped_families_never_exceed_what_they_support():
    """Every committed Spec: the default is supported on each device that the family supports it on at all."""
    for family in families.everyone():
        for one in family.committed():
            for device in devices.table():
                target = devices.named(device)
                try:
                    choice = dispatch.pick(one, Problem(8192, 4, 32), target)
                except Unsupported as error:
                    assert "docs/limits.md" in str(error)
                    continue
                assert choice.variant.spec == one
                assert family.supports(one, choice.schedule, target) is None
