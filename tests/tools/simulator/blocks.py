"""Number the lines of a function along the program, so that code in a branch comes before the code behind it.

LLVM prints blocks in any order. Here they are numbered in reverse postorder: but for the way back of a loop, a block
comes after all that lead to it. Where a loop may be left, its inside comes first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

LABEL = re.compile(r'^([\w.$-]+|"[^"]+"):')
TARGET = re.compile(r'\blabel %([\w.$-]+|"[^"]+")')


def numbers(lines: Sequence[str]) -> list[int]:
    """A number for each line of a function's body, growing along the program; unreachable lines get the largest.

    Args:
        lines: the body without the line that opens it; labels begin at the first column.
    """
    # The first block may lack a label; where it has one, an empty block before it leads there.
    labels = [""]
    block_of_line = []
    first = LABEL.match(lines[0]) if lines else None
    successors: dict[str, list[str]] = {"": [first[1]] if first else []}
    for line in lines:
        if label := LABEL.match(line):
            labels.append(label[1])
            successors[label[1]] = []
        block_of_line.append(labels[-1])
        successors[labels[-1]] += TARGET.findall(line)
    rank = {label: place for place, label in enumerate(_reverse_postorder(labels, successors))}
    order = sorted(range(len(lines)), key=lambda i: (rank.get(block_of_line[i], len(rank)), i))
    found = [0] * len(lines)
    for number, line_number in enumerate(order):
        found[line_number] = number
    return found


def _reverse_postorder(labels: Sequence[str], successors: Mapping[str, Sequence[str]]) -> list[str]:
    place = {label: i for i, label in enumerate(labels)}
    reachable = {label: _reachable(label, successors) for label in labels}
    seen = {""}
    done: list[str] = []
    # What is visited first ends up last: so first what does not come back, then what is printed last.
    todo = [("", iter(_first_last("", successors, reachable, place)))]
    while todo:
        label, rest = todo[-1]
        following = next((s for s in rest if s not in seen), None)
        if following is None:
            done.append(label)
            todo.pop()
        else:
            seen.add(following)
            todo.append((following, iter(_first_last(following, successors, reachable, place))))
    return done[::-1]


def _first_last(
    label: str, successors: Mapping[str, Sequence[str]], reachable: Mapping[str, set[str]], place: Mapping[str, int]
) -> list[str]:
    return sorted(successors[label], key=lambda s: (label in reachable[s], -place[s]))


def _reachable(label: str, successors: Mapping[str, Sequence[str]]) -> set[str]:
    found: set[str] = set()
    todo = [label]
    while todo:
        for successor in successors[todo.pop()]:
            if successor not in found:
                found.add(successor)
                todo.append(successor)
    return found
