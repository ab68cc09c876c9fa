"""The recorder that runs inside kernels: each CTA notes when it ran, on which SM, and what it did.

Device functions are no-ops (and leave no instruction) when ``LEVEL`` is below theirs: a kernel compiled at level
``off`` is the kernel without a recorder. The layout of what they write is in :mod:`jfa.lanes`.

Any Triton kernel can carry it::

    @triton.jit
    def kernel(..., recorder, capacity, LEVEL: tl.constexpr):
        lane = instrument.open_lane(recorder, tl.program_id(0), capacity, LEVEL)
        count = 0
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


@triton.jit
def read_clock():
    """%clock64: cycles of this SM, int64."""
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def read_timer():
    """%globaltimer: ns on one axis for all SMs, int64; its step is 32 ns on an H200 and 1 µs before GH100."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def read_sm():
    """%smid: the SM this CTA runs on, int32."""
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def _by_leader(store: str, threads: str) -> tl.constexpr:
    """PTX of a store that one thread does: the one of which ``threads`` leaves 0 in the register of that name."""
    return tl.constexpr(
        f"""{{
        .reg .pred leader;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        {threads}
        setp.eq.u32 leader, thread, 0;
        @leader {store}
        mov.u32 $0, 0;
        }}"""
    )


_WORD, _PAIR = "st.global.b64 [$1], $2;", "st.global.v2.b64 [$1], {$2, $3};"
_OF_WARPGROUP = "and.b32 thread, thread, 127;"
_STORE_WORD, _STORE_WORD_OF_ROLE = _by_leader(_WORD, ""), _by_leader(_WORD, _OF_WARPGROUP)
_STORE_PAIR, _STORE_PAIR_OF_ROLE = _by_leader(_PAIR, ""), _by_leader(_PAIR, _OF_WARPGROUP)


@triton.jit
def store_word(address, word, ROLES: tl.constexpr):
    """One int64 to an 8-byte aligned address, by one thread: the CTA's first, with ``ROLES`` this warpgroup's."""
    store: tl.constexpr = _STORE_WORD_OF_ROLE if ROLES else _STORE_WORD
    tl.inline_asm_elementwise(store, "=r,l,l", [address.to(tl.int64), word], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_pair(address, first, second, ROLES: tl.constexpr):
    """Two int64 to a 16-byte aligned address in one store, by one thread, as :func:`store_word`."""
    store: tl.constexpr = _STORE_PAIR_OF_ROLE if ROLES else _STORE_PAIR
    tl.inline_asm_elementwise(
        store, "=r,l,l,l", [address.to(tl.int64), first, second], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def open_lane(recorder, lane, capacity, LEVEL: tl.constexpr, ROLES: tl.constexpr = False):
    """Address of this lane, int64; writes the start half of its header (level cta and above).

    ``ROLES``: each warpgroup of the CTA has a lane of its own; it goes with every call on such a lane.
    """
    if LEVEL >= 1:
        address = recorder + lane.to(tl.int64) * (_HEADER_WORDS + _EVENT_WORDS * capacity)
        timer = read_timer()
        clock = read_clock()
        store_pair(address, read_sm().to(tl.int64), timer, ROLES)
        store_word(address + 2, clock, ROLES)
        return address
    else:
        return 0


@triton.jit
def begin_span(
    lane,
    count,
    capacity,
    KIND: tl.constexpr,
    stage,
    LEVEL: tl.constexpr,
    AT: tl.constexpr,
    ROLES: tl.constexpr = False,
):
    """Note when a span begins, where ``LEVEL`` reaches ``AT``: nothing of it stays in a register until its end.

    Both clocks are read, so that every span ties its SM's cycles to the common axis. ``KIND`` is one of
    ``jfa.lanes.KINDS``; stage −1: none. A full lane writes nothing.
    """
    if LEVEL >= AT:
        timer = read_timer()
        began = read_clock()
        zero = tl.full((), 0, tl.int64)
        word = (began & 0xFFFFFFFFFFFF) | ((zero + KIND) << 48) | ((zero + stage + 1) << 56)
        if count < capacity:
            store_pair(lane + _HEADER_WORDS + _EVENT_WORDS * count, word, timer, ROLES)


@triton.jit
def end_span(lane, count, capacity, tile, LEVEL: tl.constexpr, AT: tl.constexpr, ROLES: tl.constexpr = False):
    """Note when the span ends that began last, and whose it was (tile −1: nobody's); the lane's new count of events."""
    if LEVEL >= AT:
        ended = read_clock()
        word = (ended & 0xFFFFFFFF) | ((tl.full((), 0, tl.int64) + tile + 1) << 32)
        if count < capacity:
            store_word(lane + _HEADER_WORDS + _EVENT_WORDS * count + 2, word, ROLES)
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
def begin_wait(LEVEL: tl.constexpr):
    """When a wait begins, in cycles (level wait)."""
    if LEVEL >= 3:
        return read_clock()
    else:
        return 0


@triton.jit
def end_wait(lane, count, capacity, began, KIND: tl.constexpr, stage, tile, LEVEL: tl.constexpr):
    """Note a wait that began at ``began`` and ends now, of a role's lane; the lane's new count of events.

    ``stage``: which of a ring's buffers, −1 for none. Waits are many and short: no global timer is read.
    """
    if LEVEL >= 3:
        ended = read_clock()
        zero = tl.full((), 0, tl.int64)
        if count < capacity:
            place = lane + _HEADER_WORDS + _EVENT_WORDS * count
            opened = (began & 0xFFFFFFFFFFFF) | ((zero + KIND) << 48) | ((zero + stage + 1) << 56)
            store_pair(place, opened, (ended & 0xFFFFFFFF) | ((zero + tile + 1) << 32), True)
        return count + 1
    else:
        return count


@triton.jit
def close_lane(lane, count, LEVEL: tl.constexpr, ROLES: tl.constexpr = False):
    """Write the end half of the lane's header."""
    if LEVEL >= 1:
        timer = read_timer()
        clock = read_clock()
        store_word(lane + 3, timer, ROLES)
        store_pair(lane + 4, clock, tl.full((), 0, tl.int64) + count, ROLES)


@triton.jit
def _read_timer_often(out, count):
    for index in range(count):
        tl.store(out + index, read_timer())


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
