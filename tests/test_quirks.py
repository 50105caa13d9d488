"""quirks.toml: complete entries or a refusal; a match is exact in family, architecture, Triton range and fields."""

import pytest

from kdagen import devices, families, quirks
from kdagen.errors import CorruptFile
from kdagen.spec import Problem, Schedule, Spec, Target

TARGET = Target("sm90", "h200", 132, 232448)
SPEC = Spec("prefill_state", 64, 128, 128, "bf16")
SCHEDULE = Schedule.make(bv=64, warps=8, stages=2, form="tma")
ENTRY = {"family": "prefill_state", "arch": "sm90", "triton": ["3.6", "3.7"], "match": {"form": "tma", "warps": 8},
         "why": "hangs on the last chunk", "link": "https://example.org/1"}


def reason(triton="3.6.0", spec=SPEC, schedule=SCHEDULE, target=TARGET, **changes):
    return quirks.reason(spec, schedule, target, triton, known=(ENTRY | changes,))


def test_a_match_says_why_and_where():
    assert reason() == "hangs on the last chunk (https://example.org/1)"


@pytest.mark.parametrize("triton, hit", [("3.5.1", False), ("3.6.0", True), ("3.7.4", True), ("3.8.0", False),
                                         ("3.10.0", False), ("", False)])
def test_the_range_of_triton_minors_is_inclusive(triton, hit):
    assert (reason(triton) is not None) is hit


@pytest.mark.parametrize("changes, hit", [
    ({"family": "*"}, True), ({"family": "prefill_prepare"}, False), ({"arch": "sm100"}, False), ({"match": {}}, True),
    ({"match": {"bv": 64, "stages": 2}}, True), ({"match": {"bv": 32}}, False), ({"match": {"form": ""}}, False),
    ({"match": {"bc": 16}}, False),
    ({"match": {"dtype": "bf16", "k": 128, "bv": 64}}, True),
    ({"match": {"chunk": 32}}, False),
])
def test_every_field_must_match(changes, hit):
    assert (reason(**changes) is not None) is hit


def test_the_first_matching_entry_speaks():
    known = (ENTRY | {"arch": "sm80", "why": "no"}, ENTRY | {"why": "first"}, ENTRY | {"why": "second"})
    assert quirks.reason(SPEC, SCHEDULE, TARGET, "3.6.0", known=known).startswith("first")


def write(tmp_path, text):
    path = tmp_path / "quirks.toml"
    path.write_text(text)
    return path


GOOD = """
[[quirk]]
family = "prefill_state"
arch = "sm90"
triton = ["3.6", "3.6"]
match = { form = "tma", warps = 8 }
why = "hangs"
link = "https://example.org/1"
"""


def test_reading(tmp_path):
    assert quirks.read(write(tmp_path, "# nothing\n")) == []
    (entry,) = quirks.read(write(tmp_path, GOOD))
    assert entry["match"] == {"form": "tma", "warps": 8}
    assert quirks.reason(SPEC, SCHEDULE, TARGET, "3.6.1", known=(entry,)) == "hangs (https://example.org/1)"


@pytest.mark.parametrize("old, new", [
    ('why = "hangs"\n', ""), ('link = "https://example.org/1"\n', ""), ('triton = ["3.6", "3.6"]', 'triton = ["3.6"]'),
    ('triton = ["3.6", "3.6"]', 'triton = "36"'), ('triton = ["3.6", "3.6"]', 'triton = ["new", "3.6"]'),
    ('arch = "sm90"\n', 'arch = "sm90"\nsince = "today"\n'), ("match = { form", "match = [1]\nnot = { form"),
    ("[[quirk]]", "[[quirk]"), ("match = { form = \"tma\", warps = 8 }", "match = 3"),
])
def test_incomplete_entries_are_refused(tmp_path, old, new):
    assert old in GOOD
    with pytest.raises(CorruptFile, match=r"quirks\.toml"):
        quirks.read(write(tmp_path, GOOD.replace(old, new)))


def test_no_shipped_quirk_takes_a_default_away():
    """A family's own rule must not run into a known-bad schedule on any device and with any Triton it is known for."""
    for family in families.everyone():
        for spec in family.committed():
            for target in map(devices.named, devices.table()):
                for problem in (None, Problem(64, 64, 32), Problem(8192, 1, 32), Problem(65536, 64, 96)):
                    for triton in ("3.6.0", "3.7.0", "3.9.0"):
                        assert quirks.reason(spec, family.default(spec, target, problem), target, triton) is None


def test_the_shipped_file_reads():
    for entry in quirks.entries():
        assert entry["why"] and entry["link"].startswith("http"), "each quirk says why and where it was seen"
