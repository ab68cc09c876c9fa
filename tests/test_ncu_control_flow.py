"""Loops of machine code: in code made of nested loops, and in what compilers make of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiling.ncu.control_flow import leaving, loops, opcode


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("@!P0 BRA 0x10", "BRA"),
        ("      FENCE.VIEW.ASYNC.S", "FENCE"),
        ("@UP0 UTMAREDG.2D.ADD [UR36], [UR18]", "UTMAREDG"),
        ("HGMMA.64x64x16.F32.BF16 R184, gdesc[UR36], RZ, !UPT, gsb0", "HGMMA"),
        ("", ""),
        ("// a comment", ""),
    ],
)
def test_an_instructions_name(text, name):
    assert opcode(text) == name


def code(*lines: str) -> tuple[list[int], list[str]]:
    """Addresses and texts of lines, of which "name:" marks the next and a jump's target is a name."""
    texts, marks = [], {}
    for line in lines:
        if line.endswith(":"):
            marks[line[:-1]] = len(texts)
        else:
            texts.append(line)
    addresses = [0x7F00 + 16 * place for place in range(len(texts))]
    for name, place in marks.items():
        texts = [text.replace(f" {name}", f" {addresses[place]:#x}") if "BRA" in text else text for text in texts]
    return addresses, texts


def test_jumps_that_leave_the_listing():
    addresses, texts = code("BRA end", "FADD R0", "end:", "EXIT")
    assert leaving(addresses, texts) == 0 and leaving(addresses[:2], texts[:2]) == 1


def test_many_nested_and_many_in_a_row_take_no_time():
    depth, row = 400, 5000
    texts = ["FADD R0"] * depth + ["FADD R0"] + [f"@P0 BRA {16 * i:#x}" for i in range(depth)[::-1]]
    for _ in range(row):
        texts += ["FMUL R0", f"@P1 BRA {16 * len(texts):#x}"] + ["@P2 EXIT"] * 6
    begun = time.process_time()
    found = loops([16 * place for place in range(len(texts))], texts)
    assert len(found) == depth + row and max(loop.depth for loop in found) == depth - 1
    assert time.process_time() - begun < 5


def test_a_straight_line_has_none():
    assert loops(*code("MOV R0, R1", "@P0 BRA end", "FMUL R0, R0, R0", "end:", "EXIT")) == []
    assert loops([], []) == []


def test_a_retry_at_the_end_of_the_code_belongs_to_the_loop_it_returns_to():
    lines = code(
        "MOV R0, R1", "loop:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7], R3", "@!P0 BRA retry", "back:",
        "HGMMA R0, R1, R2", "@P1 BRA loop", "EXIT",
        "retry:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7], R3", "@!P0 BRA retry", "BRA back",
    )  # fmt: skip
    (found,) = loops(*lines)
    assert (found.name, found.first, found.own, found.depth) == ("1", 1, (1, 2, 3, 4, 6, 7, 8), 0)


def test_a_retry_that_makes_its_operands_again_is_no_loop():
    lines = code(
        "loop:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7], R3", "@!P0 BRA retry", "back:", "FADD R0", "@P1 BRA loop",
        "EXIT", "retry:", "IMAD.U32 R3, RZ, RZ, UR55", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7], R3", "@!P0 BRA retry",
        "BRA back",
    )  # fmt: skip
    assert [loop.own for loop in loops(*lines)] == [(0, 1, 2, 3, 5, 6, 7, 8)]


def test_the_trap_behind_the_end_is_no_loop():
    assert loops(*code("EXIT", "end:", "BRA end", "NOP")) == []


@pytest.mark.parametrize("condition", ["@P0 BRA", "BRA.U !UP0,", "BRA P1,", "BRA.DIV UR4,", "@!UP0 BRA.U"])
def test_a_condition_may_stand_before_or_behind(condition):
    """Blackwell's loops end in jumps whose predicate is an operand: what follows them is reached all the same."""
    lines = code(
        "outer:", "FADD R0", "inner:", "FMUL R0", f"{condition} inner", "FADD R1", f"{condition} outer", "EXIT"
    )
    assert [(loop.name, loop.own) for loop in loops(*lines)] == [("1", (0, 3, 4)), ("1.1", (1, 2))]


def test_a_loop_is_named_after_the_one_around_it_wherever_it_stands():
    """Rotated: the outer loop begins behind the inner one, and is entered there."""
    lines = code(
        "other:", "FADD R9", "@P2 BRA other", "BRA outer", "inner:", "FMUL R0", "@P0 BRA inner", "outer:", "FADD R0",
        "@P1 BRA inner", "EXIT",
    )  # fmt: skip
    names = {loop.name: loop.own for loop in loops(*lines)}
    assert names == {"1": (0, 1), "2": (5, 6), "2.1": (3, 4)}


def test_a_loop_that_only_retries_is_none_where_it_stands():
    assert loops(*code("wait:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7], R3", "@!P0 BRA wait", "EXIT")) == []


def test_roles_behind_a_jump_that_cannot_be_read_have_their_loops():
    lines = code(
        "BRX R2, -0x2210", "first:", "HGMMA R0", "FADD R0", "@P0 BRA first", "EXIT",
        "second:", "FMUL R0", "inner:", "FADD R1", "@P0 BRA inner", "@P1 BRA second", "EXIT",
    )  # fmt: skip
    found = loops(*lines)
    assert [(loop.first, loop.own, loop.depth) for loop in found] == [
        (1, (1, 2, 3), 0),
        (5, (5, 8), 0),
        (6, (6, 7), 1),
    ]


def test_a_jump_into_the_middle_makes_no_loop():
    """Two ways into what goes round: neither end is behind the other."""
    assert loops(*code("@P0 BRA middle", "top:", "FADD R0", "middle:", "FMUL R0", "@P1 BRA top", "EXIT")) == []


@dataclass
class Written:
    """Code as it is written out, and the loops written, as (first, own, depth)."""

    texts: list[str] = field(default_factory=list)
    found: list[tuple[int, tuple[int, ...], int]] = field(default_factory=list)

    def add(self, items, depth=0) -> list[int]:
        """Write items; the places that are not in a loop of their own."""
        own = []
        for item in items:
            if item == "op":
                own.append(self.place("FADD R0, R0, R1"))
            elif item[0] == "if":
                jump = self.place("")
                own += [jump, *self.add(item[1], depth), self.place("NOP")]
                self.texts[jump] = f"@P0 BRA {16 * (len(self.texts) - 1):#x}"
            else:
                first, index = len(self.texts), len(self.found)
                self.found.append((first, (), depth))
                inside = [self.place("FMUL R0, R0, R1"), *self.add(item[1], depth + 1)]
                inside.append(self.place(f"@P1 BRA {16 * first:#x}"))
                self.found[index] = (first, tuple(inside), depth)
        return own

    def place(self, text: str) -> int:
        self.texts.append(text)
        return len(self.texts) - 1


ITEMS = st.recursive(
    st.just("op"), lambda inner: st.tuples(st.sampled_from(["if", "loop"]), st.lists(inner, max_size=4)), max_leaves=25
)


@given(st.lists(ITEMS, max_size=6))
def test_nested_loops_and_branches_are_found_as_they_were_written(items):
    written = Written()
    written.add(items)
    written.place("EXIT")
    addresses = [16 * place for place in range(len(written.texts))]
    found = [(loop.first, loop.own, loop.depth) for loop in loops(addresses, written.texts)]
    assert sorted(found) == sorted(written.found)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 40)), min_size=1, max_size=40))
def test_of_any_jumps_no_instruction_is_in_two_loops(jumps):
    texts = [f"{'@P0 ' * predicated}BRA {16 * to:#x}" if jump else "FADD R0" for jump, predicated, to in jumps]
    found = loops([16 * place for place in range(len(texts))], texts)
    own = [place for loop in found for place in loop.own]
    assert len(own) == len(set(own))
    assert all(loop.first in loop.own and loop.name.count(".") == loop.depth for loop in found)
    names = [loop.name for loop in found]
    assert len(set(names)) == len(names)
    assert all(name.rpartition(".")[0] in ["", *names[:at]] for at, name in enumerate(names))
