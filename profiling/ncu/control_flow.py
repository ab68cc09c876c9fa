"""Loops of a kernel's machine code, from its instructions' addresses and texts as Nsight Compute lists them.

A loop is a natural one: a jump back to an instruction without which its own cannot be reached, with everything that
leads there. A compiler puts the retry of an mbarrier at the end of the code, from where it jumps back into the middle:
such a jump makes no loop, and the retry belongs to the loop that it returns to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_INSTRUCTION = re.compile(
    r"(?P<predicate>@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9]*)(?P<modifiers>\S*)\s*(?P<operands>.*)"
)
_TARGET = re.compile(r"(0x[0-9a-fA-F]+)\s*$")
_PREDICATE = re.compile(r"!?U?P\d")
_JUMPS, _ENDS = ("BRA", "JMP"), ("EXIT", "RET", "RTT", "BRX", "BRXU", "JMX", "JMXU", "KILL")
_RETRY = {
    "SYNCS", "BRA", "NANOSLEEP", "PLOP3", "NOP", "YIELD", "MOV", "UMOV", "IMAD", "UIMAD", "R2UR", "SHF", "USHF", "LEA",
    "ULEA", "IADD3", "UIADD3", "VIADD", "LOP3", "ULOP3",
}  # fmt: skip
"""All that a loop consists of which only tries an mbarrier again: the try, and what its operands are made of."""


@dataclass(frozen=True)
class Loop:
    """One loop.

    Attributes:
        name: "2", the second that lies in no other; "2.1", the first in that.
        first: the place of the instruction at which each round begins.
        own: places of its instructions without those of loops in it, in order.
        depth: of how many loops it is a part.
    """

    name: str
    first: int
    own: tuple[int, ...]
    depth: int


@dataclass(frozen=True)
class _Jump:
    """How an instruction leads on: to ``target`` (a place, −1 for none in the code), and whether to the next too."""

    leaves: bool = False
    target: int = -1
    goes_on: bool = True


def opcode(text: str) -> str:
    """An instruction's name without predicate and modifiers: "@!P0 BRA 0x10" → "BRA"; "" for what is none."""
    found = _INSTRUCTION.match(text.strip())
    return found["opcode"] if found else ""


def leaving(addresses: Sequence[int], texts: Sequence[str]) -> int:
    """Jumps to addresses that are not in the code: more than none says that the listing was cut."""
    known = set(addresses)
    targets = [_TARGET.search(text) for text in texts if opcode(text) in _JUMPS]
    return sum(int(found[1], 16) not in known for found in targets if found)


def loops(addresses: Sequence[int], texts: Sequence[str]) -> list[Loop]:
    """The loops, each before those in it; [] of a straight line. Retries of mbarriers are part of what is around."""
    jumps = _jumps(addresses, texts)
    blocks = _blocks(jumps)
    after = _successors(blocks, jumps)
    before = _before(after)
    dominance = _Dominance(after, before)
    bodies: dict[int, set[int]] = {}
    for block, to in enumerate(after):
        for head in to:
            if dominance.holds(head, block):
                bodies.setdefault(head, {head}).update(_leading_to(head, block, before))
    return _nested({head: body for head, body in bodies.items() if not _retries(body, blocks, texts)}, blocks)


def _nested(bodies: dict[int, set[int]], blocks: Sequence[range]) -> list[Loop]:
    """Loops that lie in each other or apart, each named after the one around it."""
    parent: dict[int, int] = {}
    innermost: dict[int, int] = {}
    for head in sorted(bodies, key=lambda head: -len(bodies[head])):
        parent[head] = innermost.get(head, -1)
        innermost |= dict.fromkeys(bodies[head], head)
    own: dict[int, list[int]] = {head: [] for head in bodies}
    for block, head in innermost.items():
        own[head] += blocks[block]
    found: list[Loop] = []
    waiting = _children(parent, -1, "", 0)
    while waiting:
        name, head, depth = waiting.pop()
        found.append(Loop(name, blocks[head][0], tuple(sorted(own[head])), depth))
        waiting += _children(parent, head, f"{name}.", depth + 1)
    return found


def _children(parent: dict[int, int], of: int, prefix: str, depth: int) -> list[tuple[str, int, int]]:
    """(name, head, depth) of the loops right in one, the last in the code first."""
    heads = sorted(head for head, around in parent.items() if around == of)
    return [(f"{prefix}{number}", head, depth) for number, head in enumerate(heads, 1)][::-1]


def _retries(body: set[int], blocks: Sequence[range], texts: Sequence[str]) -> bool:
    """Whether a loop only tries an mbarrier again, or is the trap behind a kernel's end."""
    own = [texts[place] for block in body for place in blocks[block]]
    names = {opcode(text) for text in own}
    return names == {"BRA"} or (names <= _RETRY and any("TRYWAIT" in text for text in own))


def _jumps(addresses: Sequence[int], texts: Sequence[str]) -> list[_Jump]:
    place_of = {address: place for place, address in enumerate(addresses)}
    found = []
    for text in texts:
        parts = _INSTRUCTION.match(text.strip())
        name = parts["opcode"] if parts else ""
        if parts is None or name not in _JUMPS + _ENDS:
            found.append(_Jump())
            continue
        # Blackwell writes the condition as an operand, "BRA.U !UP0, 0x10"; .DIV and .CONV have theirs in the warp.
        conditional = parts["predicate"] or _PREDICATE.match(parts["operands"])
        conditional = conditional or parts["modifiers"].startswith((".DIV", ".CONV"))
        target = _TARGET.search(text) if name in _JUMPS else None
        found.append(_Jump(True, place_of.get(int(target[1], 16), -1) if target else -1, bool(conditional)))
    return found


def _blocks(jumps: Sequence[_Jump]) -> list[range]:
    """Runs of instructions that are entered at their first and left at their last."""
    starts = {0} | {jump.target for jump in jumps if jump.target >= 0}
    starts |= {place + 1 for place, jump in enumerate(jumps) if jump.leaves}
    bounds = [*sorted(starts - {len(jumps)}), len(jumps)]
    return [range(first, end) for first, end in zip(bounds[:-1], bounds[1:], strict=True)]


def _successors(blocks: Sequence[range], jumps: Sequence[_Jump]) -> list[list[int]]:
    block_at = {block[0]: index for index, block in enumerate(blocks) if block}
    after = []
    for index, block in enumerate(blocks):
        jump = jumps[block[-1]] if block else _Jump()
        to = [block_at[jump.target]] if jump.target >= 0 else []
        if jump.goes_on and index + 1 < len(blocks):
            to.append(index + 1)
        after.append(to)
    return after


def _before(after: Sequence[Sequence[int]]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in after]
    for block, to in enumerate(after):
        for target in to:
            before[target].append(block)
    return before


class _Dominance:
    """Which blocks every way to a block goes through.

    The iteration of Cooper, Harvey and Kennedy, A Simple, Fast Dominance Algorithm (2001), from a root above all
    beginnings: the first block, and the first of each part of the code to which no jump that can be read leads.
    """

    def __init__(self, after: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> None:
        root = len(after)
        beginnings, order = _postorder(after)
        number = {block: at for at, block in enumerate(order)} | {root: root}
        dominator = [root if block in beginnings else -1 for block in range(root)] + [root]

        def common(one: int, other: int) -> int:
            while one != other:
                while number[one] < number[other]:
                    one = dominator[one]
                while number[other] < number[one]:
                    other = dominator[other]
            return one

        changed = True
        while changed:
            changed = False
            for block in reversed(order):
                if block in beginnings:
                    continue
                known = [one for one in before[block] if dominator[one] >= 0]
                now = known[0]
                for one in known[1:]:
                    now = common(now, one)
                changed |= now != dominator[block]
                dominator[block] = now
        below: list[list[int]] = [[] for _ in dominator]
        for block in range(root):
            below[dominator[block]].append(block)
        _, order = _postorder(below, root)
        self._end = {block: at for at, block in enumerate(order)}
        size = [1] * (root + 1)
        for block in order[:-1]:
            size[dominator[block]] += size[block]
        self._size = size

    def holds(self, block: int, other: int) -> bool:
        """Whether every way to ``other`` goes through ``block``."""
        return self._end[block] - self._size[block] < self._end[other] <= self._end[block]


def _postorder(after: Sequence[Sequence[int]], start: int = 0) -> tuple[set[int], list[int]]:
    """The beginnings, and all blocks, each behind those that it leads to and that did not lead to it."""
    beginnings: set[int] = set()
    seen: set[int] = set()
    order = []
    for first in range(start, len(after)):
        if first in seen:
            continue
        beginnings.add(first)
        seen.add(first)
        stack = [(first, iter(after[first]))]
        while stack:
            block, rest = stack[-1]
            following = next((to for to in rest if to not in seen), None)
            if following is None:
                order.append(block)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(after[following])))
    return beginnings, order


def _leading_to(head: int, block: int, before: Sequence[Sequence[int]]) -> set[int]:
    """The blocks from which ``block`` is reached without going through ``head``, and itself."""
    found, waiting = {head}, [block]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += before[one]
    return found
