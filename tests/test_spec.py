"""Names and their round trip, flags, schedules: codegen/spec.py."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdagen import families
from kdagen.errors import UnknownName, Unsupported
from kdagen.spec import CHUNKS, DTYPES, Flag, Schedule, Spec, Variant, parse


@st.composite
def variants(draw):
    family = draw(st.sampled_from(families.everyone()))
    flags = {flag.name: draw(st.sampled_from(flag.values)) for flag in family.flags.values()}
    spec = Spec.make(family.name, chunk=draw(st.sampled_from((0, *CHUNKS))), k=draw(st.integers(0, 256)),
                     v=draw(st.integers(0, 256)), dtype=draw(st.sampled_from(tuple(DTYPES))), **flags)
    blocks = {name: draw(st.integers(1, 512)) for name in family.space}
    return Variant(spec, Schedule.make(warps=0, stages=0, form=draw(st.sampled_from(family.forms)), **blocks))


@given(variants())
@settings(max_examples=200, deadline=None)
def test_name_round_trip(variant):
    assert parse(variant.name) == variant
    assert variant.name.isidentifier()
    assert Spec.of_literal(variant.spec.literal) == variant.spec


@given(variants(), variants())
@settings(max_examples=200, deadline=None)
def test_names_are_distinct(a, b):
    assert (a.name == b.name) == (a == b)


@pytest.mark.parametrize("family", families.everyone(), ids=lambda f: f.name)
def test_flag_tokens_cannot_be_mistaken(family):
    tokens = [flag.token(value) for flag in family.flags.values() for value in flag.values if value != flag.default]
    assert len(tokens) == len(set(tokens))
    for token in tokens:
        assert "_" not in token and token not in DTYPES
        assert not (token[0] in "ckv" and token[1:].isdigit()), f"{token} reads as a size"


@pytest.mark.parametrize("name", ["", "prefill", "a__b__c__d", "nothing__c64", "step_tables__c64_zzz", "step_tables__zz9"])
def test_bad_names_are_refused(name):
    with pytest.raises(UnknownName) as error:
        parse(name)
    assert "expected" in str(error.value)


def test_non_canonical_name_is_refused():
    variant = Variant(next(iter(families.get("step_tables").committed())), Schedule.make(warps=0, stages=0))
    shuffled = "__".join([variant.spec.family, "_".join(reversed(variant.spec.name.split("__")[1].split("_")))])
    if shuffled != variant.spec.name:
        with pytest.raises(UnknownName, match="canonical"):
            parse(shuffled)


def test_unknown_flag_and_value_are_refused():
    family = families.everyone()[0]
    with pytest.raises(Unsupported, match="no_such_flag"):
        Spec.make(family.name, no_such_flag=True)
    flagged = next(f for f in families.everyone() if f.flags)
    flag = next(iter(flagged.flags.values()))
    with pytest.raises(Unsupported, match="one of"):
        Spec.make(flagged.name, **{flag.name: "no such value"})
    with pytest.raises(Unsupported, match="dtype"):
        Spec.make(family.name, dtype="fp8")


def test_true_is_not_one():
    with pytest.raises(Unsupported):
        Flag("n", (1, 2)).check(True)


def test_flags_read_as_attributes_and_survive_pickling():
    family = next(f for f in families.everyone() if f.flags)
    flag = next(iter(family.flags.values()))
    spec = pickle.loads(pickle.dumps(Spec.make(family.name, **{flag.name: flag.values[-1]})))
    assert getattr(spec, flag.name) == flag.values[-1]
    assert getattr(Spec.make(family.name), flag.name) == flag.default
    with pytest.raises(AttributeError):
        _ = spec.no_such_flag


def test_warps_and_stages_share_a_file():
    family = families.everyone()[0]
    spec = Spec.make(family.name, chunk=64)
    a, b = (Variant(spec, Schedule.make(warps=w, stages=s, bv=64).source_key) for w, s in ((2, 2), (4, 3)))
    assert a == b and a.path == b.path
