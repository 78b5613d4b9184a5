"""The table in README.md: every field case is there, and every test that it names exists and carries the case's id."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
GROUPS = {"R": 9, "G": 10, "S": 10, "P": 5, "C": 8, "T": 3, "N": 5, "H": 4, "V": 2, "X": 7}
CASES = [f"{group}{number}" for group, count in GROUPS.items() for number in range(1, count + 1)]
_ROW = re.compile(r"^\| ([A-Z]\d+) \| ([^|]+) \| ([^|]+) \|$")
_NAMED = re.compile(r"`([^`:]+\.py)::(test_\w+)`")


def table() -> dict[str, list[tuple[str, str]]]:
    """Case -> (file, test) pairs."""
    rows = [match for line in (TESTS / "README.md").read_text().splitlines() if (match := _ROW.match(line))]
    found = {row[1]: _NAMED.findall(row[3]) for row in rows}
    assert len(found) == len(rows), "a case has two rows"
    return found


@cache
def known_tests(file: str) -> frozenset[str]:
    """Names of a file's test functions and methods."""
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_every_case_has_a_row_in_order() -> None:
    assert list(table()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_tests_that_exist(case: str) -> None:
    named = table()[case]
    assert named, f"no test for {case}"
    for file, test in named:
        assert (TESTS / file).is_file(), f"{file} is gone"
        assert test in known_tests(file), f"{file} has no {test}: correct the row {case} of tests/README.md"
        assert case.lower() in test.split("_"), f"{test} does not carry the id {case}"


def test_a_test_that_is_gone_is_noticed() -> None:
    assert "test_every_case_has_a_row_in_order" in known_tests("test_field_case_table.py")
    assert "test_that_nobody_wrote" not in known_tests("test_field_case_table.py")
