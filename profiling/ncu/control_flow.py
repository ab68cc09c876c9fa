"""Loops of a kernel's machine code, from its instructions' addresses and texts as Nsight Compute lists them.

A loop is a natural one: a jump back to an instruction without which its own cannot be reached, with everything that
leads there. A compiler puts the retry of an mbarrier at the end of the code, from where it jumps back into the middle:
such a jump makes no loop, and the retry belongs to the loop that it returns to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z][A-Z0-9]*)(?P<modifiers>\S*)")
_TARGET = re.compile(r"(0x[0-9a-fA-F]+)\s*$")
_JUMPS, _ENDS = ("BRA", "JMP"), ("EXIT", "RET", "BRX", "JMX", "KILL")
_RETRY = {"SYNCS", "BRA", "NANOSLEEP", "PLOP3", "NOP", "YIELD"}
"""All that a loop consists of which only tries an mbarrier again."""


@dataclass(frozen=True)
class Loop:
    """One loop: ``own``, its instructions' places without those of loops in it, in order; how deep it lies, from 0."""

    first: int
    own: tuple[int, ...]
    depth: int


def opcode(text: str) -> str:
    """An instruction's name without predicate and modifiers: "@!P0 BRA 0x10" → "BRA"; "" for what is none."""
    found = _INSTRUCTION.match(text.strip())
    return found["opcode"] if found else ""


def loops(addresses: Sequence[int], texts: Sequence[str]) -> list[Loop]:
    """The loops, in the order of their first instructions; [] of a straight line. Spins are part of what is around."""
    blocks = _blocks(addresses, texts)
    after = _successors(blocks, addresses, texts)
    before = _before(after)
    dominator = _dominators(after, before)
    bodies: dict[int, set[int]] = {}
    for block, to in enumerate(after):
        for head in to:
            if _dominates(head, block, dominator):
                bodies.setdefault(head, {head}).update(_leading_to(head, block, before))
    bodies = {head: body for head, body in bodies.items() if not _spins(body, blocks, texts)}
    found = []
    for head, body in sorted(bodies.items()):
        inside = set().union(*(other for inner, other in bodies.items() if inner != head and other < body))
        own = sorted(place for block in body - inside for place in blocks[block])
        depth = sum(body < other for other in bodies.values())
        found.append(Loop(blocks[head][0], tuple(own), depth))
    return found


def _spins(body: set[int], blocks: Sequence[range], texts: Sequence[str]) -> bool:
    own = [texts[place] for block in body for place in blocks[block]]
    return any("TRYWAIT" in text for text in own) and all(opcode(text) in _RETRY for text in own)


def _blocks(addresses: Sequence[int], texts: Sequence[str]) -> list[range]:
    """Runs of instructions that are entered at their first and left at their last."""
    place_of = {address: place for place, address in enumerate(addresses)}
    starts = {0}
    for place, text in enumerate(texts):
        if opcode(text) in _JUMPS + _ENDS:
            starts.add(place + 1)
            if (target := _target(text, place_of)) is not None:
                starts.add(target)
    bounds = [*sorted(starts - {len(texts)}), len(texts)]
    return [range(first, end) for first, end in zip(bounds[:-1], bounds[1:], strict=True)]


def _successors(blocks: Sequence[range], addresses: Sequence[int], texts: Sequence[str]) -> list[list[int]]:
    place_of = {address: place for place, address in enumerate(addresses)}
    block_at = {block[0]: index for index, block in enumerate(blocks)}
    after = []
    for index, block in enumerate(blocks):
        text = texts[block[-1]]
        found = _INSTRUCTION.match(text.strip())
        always = found is None or found["predicate"] is None
        jumps = opcode(text) in _JUMPS
        to = []
        target = _target(text, place_of) if jumps else None
        if target is not None:
            to.append(block_at[target])
        if index + 1 < len(blocks) and not (always and (jumps or opcode(text) in _ENDS)):
            to.append(index + 1)
        after.append(to)
    return after


def _target(text: str, place_of: dict[int, int]) -> int | None:
    found = _TARGET.search(text)
    return place_of.get(int(found[1], 16)) if found else None


def _dominators(after: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> list[int]:
    """Of each block the nearest other that every way to it goes through, -1 for none.

    The iteration of Cooper, Harvey and Kennedy, A Simple, Fast Dominance Algorithm (2001), from a root above all
    beginnings: the first block, and the first of each part of the code to which no jump that can be read leads.
    """
    root = len(after)
    beginnings, order = _postorder(after)
    number = {block: at for at, block in enumerate(order)} | {root: len(order)}
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
    return [-1 if of == root else of for of in dominator[:root]]


def _dominates(block: int, other: int, dominator: Sequence[int]) -> bool:
    while other not in (block, -1):
        other = dominator[other]
    return other == block


def _postorder(after: Sequence[Sequence[int]]) -> tuple[set[int], list[int]]:
    """The beginnings, and all blocks, each behind those that it leads to and that did not lead to it."""
    beginnings: set[int] = set()
    seen: set[int] = set()
    order = []
    for first in range(len(after)):
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


def _before(after: Sequence[Sequence[int]]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in after]
    for block, to in enumerate(after):
        for target in to:
            before[target].append(block)
    return before


def _leading_to(head: int, block: int, before: Sequence[Sequence[int]]) -> set[int]:
    """The blocks from which ``block`` is reached without going through ``head``, and itself."""
    found, waiting = {head}, [block]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += before[one]
    return found
