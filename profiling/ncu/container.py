"""The outside of a .ncu-rep file: whether it is whole, how many results it holds, and who wrote it.

NVIDIA's reader takes what it finds in a file that was cut short and says nothing. A report is the four bytes "NVR\\0",
a small header, then blocks, each a length-prefixed protobuf header that names the size of the payload behind it (read
off reports of Nsight Compute 2022.3 to 2025.3; the payloads stay the native reader's business).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from profiling.errors import UserError

MAGIC = b"NVR\0"
_RESULTS, _PAYLOAD = 2, 5  # numbers of the fields of a block's header
_VERSION = re.compile(rb"(\d{4}\.\d+\.\d+\.\d+) \(build \d+\)")
_COMMAND = re.compile(rb"/ncu(?:\.exe)? [\x20-\x7e]{2,4096}")
_LONGEST_FOLDER = 512
_TAIL = 1 << 20
"""The session's details mostly lie near the end; sources that are embedded before it may hold words like them."""


@dataclass(frozen=True)
class Container:
    """What the outside says: results in all blocks, the writer's version and command line ("" where unknown)."""

    results: int
    writer: str
    command: str


def inspect(content: bytes, name: str) -> Container:
    """Walk the blocks of a report.

    Raises:
        UserError: not a report, or cut short, or the block structure does not hold.
    """
    if not content.startswith(MAGIC):
        raise UserError(f"{name}: is no Nsight Compute report (it starts with {content[:8]!r}, not with 'NVR')")
    results, at = 0, _sized(content, len(MAGIC), name)
    while at < len(content):
        end = _sized(content, at, name)
        fields = _varints(content[at + 4 : end], name)
        results += fields.get(_RESULTS, 0)
        at = end + fields.get(_PAYLOAD, 0)
        if at > len(content):
            raise _cut(name, at - len(content))
    versions = _VERSION.findall(content[-_TAIL:]) or _VERSION.findall(content)
    return Container(
        results, versions[-1].decode("ascii") if versions else "", _command(content[-_TAIL:]) or _command(content)
    )


def _command(content: bytes) -> str:
    """The last thing that reads like ncu's command line; "" where nothing does."""
    found = list(_COMMAND.finditer(content))
    if not found:
        return ""
    last = found[-1]
    start = last.start()
    while start > max(0, last.start() - _LONGEST_FOLDER) and 0x20 <= content[start - 1] <= 0x7E:
        start -= 1
    return content[start : last.end()].decode("ascii").rstrip(' "')


def _sized(content: bytes, at: int, name: str) -> int:
    """Where the length-prefixed message at ``at`` ends."""
    end = at + 4 + int.from_bytes(content[at : at + 4], "little")
    if at + 4 > len(content) or end > len(content):
        raise _cut(name, max(end, at + 4) - len(content))
    return end


def _cut(name: str, missing: int) -> UserError:
    return UserError(
        f"{name}: the report is cut short or damaged ({missing:,} bytes are missing by its own count); copy it again, "
        "or profile again"
    )


def _varints(message: bytes, name: str) -> dict[int, int]:
    """The integer fields of a protobuf message by number; what has a length is passed over."""
    found: dict[int, int] = {}
    at = 0
    try:
        while at < len(message):
            key, at = _varint(message, at)
            kind = key & 7
            if kind == 0:
                found[key >> 3], at = _varint(message, at)
            elif kind == 2:
                size, at = _varint(message, at)
                at += size
            elif kind in (1, 5):
                at += 8 if kind == 1 else 4
            else:
                raise IndexError
        if at > len(message):
            raise IndexError
    except IndexError:
        raise UserError(f"{name}: the report is damaged (a block header cannot be read); copy it again") from None
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise IndexError
