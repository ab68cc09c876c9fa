"""A table of words, which every format prints: terminal, Markdown, HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from profiling.text import plain


class Table(NamedTuple):
    """A table of words: title, headings, rows, which columns stand to the right, and its grade."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: tuple[int, ...] = ()
    grade: str = ""


def markdown(table: Table, level: int) -> str:
    """GitHub's Markdown, under a heading of that level."""
    marks = ["---:" if i in table.right else "---" for i in range(len(table.headings))]
    lines = [f"{'#' * level} {escaped(table.title)}", "", _row(table.headings), _row(marks)]
    lines += [_row([escaped(cell) for cell in row]) for row in table.rows]
    return "\n".join(lines) + "\n" + (f"\n*{escaped(table.grade)}*\n" if table.grade else "")


def escaped(words: str) -> str:
    """A stranger's words as one line of Markdown text: no markup, no HTML, no cell border."""
    line = plain(words, 900)
    for character in "\\`*_[]<>|#":
        line = line.replace(character, "\\" + character)
    return line


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
