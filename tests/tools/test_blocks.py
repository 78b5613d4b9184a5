"""Lines are numbered along the program whatever the order of the blocks."""

import pytest

pytest.importorskip("triton")
from tests.tools.simulator.blocks import numbers

IF_PRINTED_LAST = ["  br i1 %c, label %then, label %join", "join:", "  ret void", "then:", "  br label %join"]
LOOP_EXIT_PRINTED_FIRST = [
    "  br label %head",
    "exit:",
    "  ret void",
    "head:",
    "  br i1 %c, label %exit, label %body",
    "body:",
    "  br label %head",
]
IF_IN_LOOP_PRINTED_LAST = [
    "  br label %head",
    "head:",
    "  br i1 %c, label %then, label %join",
    "join:",
    "  br i1 %d, label %head, label %exit",
    "exit:",
    "  ret void",
    "then:",
    "  br label %join",
]
SWITCH = ["  switch i32 %x, label %a [", "    i32 1, label %b", "  ]", "b:", "  br label %a", "a:", "  ret void", "x:"]


@pytest.mark.parametrize(
    ("lines", "order"),
    [
        (IF_PRINTED_LAST, [0, 3, 4, 1, 2]),
        (["entry:", *IF_PRINTED_LAST], [0, 1, 4, 5, 2, 3]),
        (LOOP_EXIT_PRINTED_FIRST, [0, 3, 4, 5, 6, 1, 2]),
        (IF_IN_LOOP_PRINTED_LAST, [0, 1, 2, 7, 8, 3, 4, 5, 6]),
        (SWITCH, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_order(lines, order):
    found = numbers(lines)
    assert sorted(range(len(lines)), key=found.__getitem__) == order
