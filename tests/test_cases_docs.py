"""docs/cases.md names, for each of the 42 faults, tests that there are."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "cases.md").read_text()


@cache
def defined_in(name: str) -> frozenset[str]:
    return frozenset(node.name for node in ast.walk(ast.parse((TESTS / name).read_text()))
                     if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def named(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`((?:gpu/)?test_\w+\.py)::(test_\w+)`", text)


def test_every_named_test_exists():
    found = named(TEXT)
    assert len(found) > 100
    assert "::" not in re.sub(r"`(?:gpu/)?test_\w+\.py::test_\w+`", "", TEXT), "a name that this test cannot read"
    missing = [f"{name}::{test}" for name, test in found if not (TESTS / name).exists() or test not in defined_in(name)]
    assert not missing


def test_every_fault_has_a_test():
    rows = re.findall(r"^\| (\d+) \| .*? \| (.*) \|$", TEXT, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 43))
    assert all(named(tests) for _, tests in rows)


def test_every_test_of_these_files_is_named():
    """Those that were written for the faults; helpers of the harness aside."""
    own = {"test_the_calls_cover_every_public_op", "test_the_unchanged_call_is_right_to_refuse_nothing",
           "test_a_32_bit_offset_would_show", "test_each_tensor_of_another_dtype", "test_packed_tokens_have_one_batch_row",
           "test_base_offsets_are_64_bit_in_every_template"}
    here = {(path.name, test) for path in TESTS.glob("test_cases_*.py") if path.name != Path(__file__).name
            for test in defined_in(path.name)}
    assert {test for _, test in here - set(named(TEXT))} == own
