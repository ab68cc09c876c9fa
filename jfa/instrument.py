"""The recorder that runs inside kernels: each CTA notes when it ran, on which SM, and what it did.

Device functions are no-ops (and leave no instruction) when ``LEVEL`` is below theirs: a kernel compiled at level
``off`` is the kernel without a recorder. The layout of what they write is in :mod:`jfa.lanes`.

Any Triton kernel can carry it (``count`` is a thread's own: hand it on, do not branch on it); in Triton's interpreter,
which knows no inline PTX, at level ``off`` alone::

    @triton.jit
    def kernel(..., recorder, capacity, LEVEL: tl.constexpr):
        lane, count = instrument.open_lane(recorder, tl.program_id(0), capacity, LEVEL)
        ...
        instrument.begin_span(lane, count, capacity, 1, -1, LEVEL, 2)
        ...  # the work of tile t
        count = instrument.end_span(lane, count, capacity, t, LEVEL, 2)
        ...
        instrument.close_lane(lane, count, LEVEL)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from jfa import lanes

try:
    import nvtx
except ImportError:
    nvtx = None

if TYPE_CHECKING:
    import torch

_HEADER_WORDS = tl.constexpr(lanes.HEADER_WORDS)
_EVENT_WORDS = tl.constexpr(lanes.EVENT_WORDS)


_SILENT = tl.constexpr(1 << 30)
"""Where threads that write nothing start to count: above any capacity, so that one comparison finds room and leader."""


def _where_room(instruction: str) -> tl.constexpr:
    """PTX of an instruction done where operand 1, a count, is below operand 2; $0 is 0 elsewhere."""
    return tl.constexpr(
        f"""{{
        .reg .pred room;
        setp.lt.s32 room, $1, $2;
        mov.b{64 if "u64" in instruction else 32} $0, 0;
        @room {instruction}
        }}"""
    )


# Read under a condition in which threads differ: else ptxas takes the clock through uniform registers, which is slow.
_CLOCK, _LOW_CLOCK = _where_room("mov.u64 $0, %clock64;"), _where_room("mov.u32 $0, %clock;")
_TIMER = _where_room("mov.u64 $0, %globaltimer;")
_WORD, _PAIR = _where_room("st.global.b64 [$3], $4;"), _where_room("st.global.v2.b64 [$3], {$4, $5};")
_QUAD = _where_room("st.global.v4.b32 [$3], {$4, $5, $6, $7};")


def _start_of_count(mask: int) -> tl.constexpr:
    """PTX of a count's start: 0 in threads whose index has none of the mask's bits, _SILENT in the others."""
    return tl.constexpr(
        f"""{{
        .reg .pred leader;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, {mask};
        setp.eq.u32 leader, thread, 0;
        selp.b32 $0, 0, {_SILENT.value}, leader;
        }}"""
    )


_START_IN_CTA, _START_IN_ROLE = _start_of_count(0xFFFF), _start_of_count(127)


@triton.jit
def start_count(ROLES: tl.constexpr):
    """Events so far, int32: 0 in the thread that writes, the CTA's first or with ``ROLES`` this warpgroup's."""
    start: tl.constexpr = _START_IN_ROLE if ROLES else _START_IN_CTA
    return tl.inline_asm_elementwise(start, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def read_clock(count, limit):
    """%clock64 where count < limit: cycles of this SM, int64."""
    return tl.inline_asm_elementwise(_CLOCK, "=l,r,r", [count, limit], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def read_low_clock(count, limit):
    """The lower half of %clock64 where count < limit, int32."""
    return tl.inline_asm_elementwise(_LOW_CLOCK, "=r,r,r", [count, limit], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def read_wait_clock():
    """The lower half of %clock64, int32, in every thread.

    A wait's readings go out together in one store, for which ptxas wants them in registers of threads anyway; without
    a condition no selection stands between a wait and the product behind it. Level wait on the forward of
    hsp-loguniform, on an H200: +6.8 % and not +7.3 % (14 rounds in turn each).
    """
    return tl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def read_timer(count, limit):
    """%globaltimer where count < limit, ns, int64: one axis for all SMs.

    Its step is 32 ns on an H200 and 1 µs before GH100.
    """
    return tl.inline_asm_elementwise(_TIMER, "=l,r,r", [count, limit], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def read_sm():
    """%smid: the SM this CTA runs on, int32."""
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_word(address, word, count, limit):
    """One int64 to an 8-byte aligned address, by threads whose count is below limit."""
    tl.inline_asm_elementwise(
        _WORD, "=r,r,r,l,l", [count, limit, address.to(tl.int64), word], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_pair(address, first, second, count, limit):
    """Two int64 to a 16-byte aligned address in one store, by threads whose count is below limit."""
    tl.inline_asm_elementwise(
        _PAIR, "=r,r,r,l,l,l", [count, limit, address.to(tl.int64), first, second], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def store_quad(address, first, second, third, fourth, count, limit):
    """Four int32 to a 16-byte aligned address in one store, by threads whose count is below limit."""
    tl.inline_asm_elementwise(
        _QUAD, "=r,r,r,l,r,r,r,r", [count, limit, address.to(tl.int64), first, second, third, fourth], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def open_lane(recorder, lane, capacity, LEVEL: tl.constexpr, ROLES: tl.constexpr = False):
    """(address of this lane, its count of events); writes the start half of its header (level cta and above).

    ``ROLES``: each warpgroup of the CTA has a lane of its own. Only one thread of a lane counts from 0 and writes: the
    count differs from thread to thread, and is to be handed on, not branched on.
    """
    if LEVEL >= 1:
        count = start_count(ROLES)
        address = recorder + lane.to(tl.int64) * (_HEADER_WORDS + _EVENT_WORDS * capacity)
        timer = read_timer(count, _SILENT)
        clock = read_clock(count, _SILENT)
        store_pair(address, read_sm().to(tl.int64), timer, count, _SILENT)
        store_word(address + 2, clock, count, _SILENT)
        return address, count
    else:
        return 0, 0


@triton.jit
def _event(lane, count):
    """Address of the event of that number."""
    return lane + _HEADER_WORDS + count.to(tl.int64) * _EVENT_WORDS


@triton.jit
def begin_span(lane, count, capacity, KIND: tl.constexpr, stage, LEVEL: tl.constexpr, AT: tl.constexpr):
    """Note when a span begins, where ``LEVEL`` reaches ``AT``: nothing of it stays in a register until its end.

    Both clocks are read, so that every span ties its SM's cycles to the common axis. ``KIND`` is one of
    ``jfa.lanes.KINDS``; stage −1: none. A full lane writes nothing.
    """
    if LEVEL >= AT:
        timer = read_timer(count, capacity)
        word = _opened(read_clock(count, capacity), KIND, stage)
        store_pair(_event(lane, count), word, timer, count, capacity)


@triton.jit
def end_span(lane, count, capacity, tile, LEVEL: tl.constexpr, AT: tl.constexpr):
    """Note when the span ends that began last, and whose it was (tile −1: nobody's); the lane's new count of events."""
    if LEVEL >= AT:
        word = _closed(read_low_clock(count, capacity), tile)
        store_word(_event(lane, count) + 2, word, count, capacity)
        return count + 1
    else:
        return count


@triton.jit
def behind(count, LEVEL: tl.constexpr, AT: tl.constexpr):
    """The place behind a span that was begun at ``count``, for spans inside it: its end still goes to ``count``."""
    if LEVEL >= AT:
        return count + 1
    else:
        return count


@triton.jit
def begin_wait(count, capacity, LEVEL: tl.constexpr):
    """When a wait begins, in cycles, of which the lower half will do (level wait)."""
    if LEVEL >= 3:
        return read_wait_clock()
    else:
        return 0


@triton.jit
def end_wait(lane, count, capacity, began, KIND: tl.constexpr, stage, tile, LEVEL: tl.constexpr):
    """Note a wait that began at ``began`` and ends now, of a role's lane; the lane's new count of events.

    ``stage``: which of a ring's buffers, −1 for none. Waits are many and short: no global timer is read.
    """
    return note_wait(lane, count, capacity, began, wait_ended(count, capacity, LEVEL), KIND, stage, tile, LEVEL)


@triton.jit
def wait_ended(count, capacity, LEVEL: tl.constexpr):
    """When a wait ends, as :func:`begin_wait`: for a role that has something urgent to do before it notes the wait."""
    return begin_wait(count, capacity, LEVEL)


@triton.jit
def note_wait(lane, count, capacity, began, ended, KIND: tl.constexpr, stage, tile, LEVEL: tl.constexpr):
    """Note a wait from :func:`begin_wait` to :func:`wait_ended`; the lane's new count of events."""
    if LEVEL >= 3:
        zero = tl.full((), 0, tl.int32)
        what = ((zero + stage + 1) << 24) + (KIND << 16)
        store_quad(_event(lane, count), began, what, ended, zero + tile + 1, count, capacity)
        return count + 1
    else:
        return count


@triton.jit
def _opened(clock, KIND: tl.constexpr, stage):
    """The word of an event that says when it began, what it is and of which buffer."""
    zero = tl.full((), 0, tl.int64)
    return (clock & 0xFFFFFFFFFFFF) | ((zero + KIND) << 48) | ((zero + stage + 1) << 56)


@triton.jit
def _closed(low_clock, tile):
    """The word of an event that says when it ended and whose it was."""
    return (low_clock.to(tl.int64) & 0xFFFFFFFF) | ((tl.full((), 0, tl.int64) + tile + 1) << 32)


@triton.jit
def close_lane(lane, count, LEVEL: tl.constexpr):
    """Write the end half of the lane's header."""
    if LEVEL >= 1:
        timer = read_timer(count, _SILENT)
        clock = read_clock(count, _SILENT)
        store_word(lane + 3, timer, count, _SILENT)
        store_pair(lane + 4, clock, tl.full((), 0, tl.int64) + count, count, _SILENT)


@triton.jit
def _read_timer_often(out, count):
    for index in range(count):
        tl.store(out + index, read_timer(0, 1))


def timer_resolution_ns(device: Any, readings: int = 20_000) -> int:
    """The step of %globaltimer on ``device``, ns: the smallest difference that a thread reading it on and on sees."""
    import torch

    out = torch.zeros(readings, dtype=torch.int64, device=device)
    _read_timer_often[(1,)](out, readings, num_warps=1)
    steps = out.diff()
    return int(steps[steps > 0].min())


@dataclass(frozen=True)
class Recorder:
    """A recorder's buffer on the device, for one launch.

    ``buffer`` is int64 [lanes, 8 + 4·capacity], zero before the launch. Level ``off`` has no buffer.
    """

    level: str = "off"
    capacity: int = 0
    buffer: torch.Tensor | None = field(default=None, repr=False)

    @property
    def number(self) -> int:
        """The level as the kernels' ``LEVEL``."""
        return lanes.LEVELS[self.level]

    @classmethod
    def allocate(cls, level: str, lane_count: int, capacity: int, device: Any) -> Recorder:
        """Room for ``lane_count`` lanes of ``capacity`` events. ValueError: unknown level."""
        import torch

        if level not in lanes.LEVELS:
            raise ValueError(f"level: expected one of {', '.join(lanes.LEVELS)}, got {level!r}")
        if level == "off":
            return cls()
        words = lanes.HEADER_WORDS + lanes.EVENT_WORDS * capacity
        return cls(level, capacity, torch.zeros((lane_count, words), dtype=torch.int64, device=device))

    def read(self) -> lanes.Lanes:
        """Spans recorded so far (synchronises). ValueError: nothing was recorded."""
        if self.buffer is None:
            raise ValueError("recorder: level off records nothing; use cta or tile")
        return lanes.decode(self.buffer.cpu().numpy(), self.capacity)


OFF = Recorder()

_workload: ContextVar[str] = ContextVar("jfa_workload", default="")


def current_workload() -> str:
    """The name given by the innermost :func:`workload_label`; empty outside."""
    return _workload.get()


@contextmanager
def workload_label(name: str) -> Iterator[None]:
    """Name the workload in the NVTX ranges of the launches inside the block, and of the backward of what they made."""
    token = _workload.set(name)
    try:
        yield
    finally:
        _workload.reset(token)


def launch_range(kernel: str, schedule: str, **facts: Any) -> AbstractContextManager[Any]:
    """NVTX range (domain ``jfa``) around a launch: ``kernel schedule=… workload=… key=value…``.

    Without the nvtx package there is no range; ``python -m profiling doctor`` reports the package.
    """
    if nvtx is None:
        return nullcontext()
    words = [kernel, f"schedule={schedule}"]
    if current_workload():
        words.append(f"workload={current_workload()}")
    words += [f"{key}={value}" for key, value in facts.items()]
    return nvtx.annotate(message=" ".join(words), domain="jfa")
