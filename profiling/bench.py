"""Time our attention and its peers on one GPU, in one process, taking turns.

Every implementation runs once in each round, in an order that changes from round to round, so that a clock that drifts,
a neighbour that wakes up or what ran just before is shared by all. Before each run a buffer larger than the L2 cache is
overwritten: the inputs are cold, as they are in a model where other layers ran in between; and the GPU is kept busy for
a millisecond or more, so that the host runs ahead and its launches leave no gaps. Times are CUDA events' (GPU time
between two points of the stream, the building of the tile table included); the grade is `measured`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import pandas as pd

from profiling.errors import UserError
from profiling.versions import peer_versions, versions

if TYPE_CHECKING:
    import torch

    from jfa.workloads import Inputs, Workload

DIRECTIONS = ("forward", "backward")
WARMUP_RUNS = 3
FEWEST_ROUNDS, MOST_ROUNDS = 20, 200
SECONDS_A_GROUP = 1.5
# More than any GPU's L2 (H200 50 MB, B200 126 MB), with room for the larger ones to come.
FLUSH_BYTES = 256 * 2**20
HEAD_START_CYCLES, MOST_HEAD_START_CYCLES = 2_000_000, 16_000_000

WITHOUT_SUM = " without dQ sum"
PEER_NOTE = (
    "peers get broadcast Q expanded to (B·L_q, H, D), outside the timing; their backward then sums dQ over the batch, "
    f"which those{WITHOUT_SUM} leave out: no gradient of the shared Q, so that nothing is compared with them"
)


@dataclass(frozen=True)
class Row:
    """One implementation on one workload and direction; ``error`` says why there is no time."""

    workload: str
    direction: str
    implementation: str
    schedule: str
    median_ms: float | None = None
    iqr_ms: float | None = None
    tflops: float | None = None
    rounds: int = 0
    error: str = ""
    grade: str = "measured"
    samples_ms: tuple[float, ...] = ()


@dataclass(frozen=True)
class Contestant:
    """An implementation bound to its inputs: ``forward()`` gives the output that ``leaves`` (q, k, v) produced."""

    implementation: str
    schedule: str
    forward: Callable[[], torch.Tensor]
    leaves: tuple[torch.Tensor, ...]


@dataclass
class Turn:
    """What a contestant does in each round, and what came of it (milliseconds)."""

    contestant: Contestant
    run: Callable[[], Any]
    samples: list[float] = field(default_factory=list)
    error: str = ""


class GpuClock:
    """Times a run on the current CUDA device, ms: cold L2, the host ahead of the GPU.

    A run whose launches were not all there when the GPU came to the first is taken again, with a longer head start, up
    to MOST_HEAD_START_CYCLES; `behind` counts those that were kept all the same.
    """

    device = "cuda"

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        self._head_start = HEAD_START_CYCLES
        self.behind = 0

    def settle(self) -> None:
        """Wait until what was launched is done; raises what it raised."""
        self._cuda.synchronize()

    def time(self, run: Callable[[], Any]) -> float:
        """GPU time of one run, ms."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda._sleep(self._head_start)
        self._flush.zero_()
        start.record()
        run()
        end.record()
        behind = start.query()
        end.synchronize()
        if behind and self._head_start < MOST_HEAD_START_CYCLES:
            self._head_start *= 2
            return self.time(run)
        self.behind += behind
        return float(start.elapsed_time(end))


def bench(
    workloads: Sequence[Workload],
    *,
    directions: Sequence[str] = DIRECTIONS,
    schedules: Sequence[str] = ("static", "balanced-dynamic"),
    peers: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> pd.DataFrame:
    """A row an implementation, workload and direction: median and interquartile range in ms, TFLOP/s by 4·H·D·pairs.

    ``attrs``: ``gpu``, ``versions``, ``created``, ``left_out`` (peers that did not import, and why), ``behind`` (runs
    for which the host was not ahead of the GPU), ``interrupted`` (Ctrl-C: the rows hold what was measured until then).
    What an implementation raises is its row's ``error``. Raises UserError without a GPU.
    """
    torch = _torch_with_gpu()
    attends, left_out = find_peers() if peers else ({}, {})
    clock = GpuClock()
    rows: list[Row] = []
    interrupted = False
    groups = list(itertools.product(workloads, directions))
    try:
        for done, (workload, direction) in enumerate(groups):
            progress(f"{workload.name} {direction}", done, len(groups))
            measured, interrupted = measure(workload, direction, schedules, attends, clock)
            rows += measured
            if interrupted:
                break
            torch.cuda.empty_cache()
        progress("done", len(groups), len(groups))
    except KeyboardInterrupt:
        interrupted = True
    table = pd.DataFrame([asdict(row) for row in rows], columns=list(Row.__dataclass_fields__))
    table.attrs.update(
        gpu=torch.cuda.get_device_name(),
        versions=versions() | (peer_versions() if peers else {}),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        left_out=left_out,
        behind=clock.behind,
        interrupted=interrupted,
    )
    return table


def find_peers() -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """Peers that import, each called (q, k, v, cu_q, cu_k, max_q, max_k, causal=…, window=…), and why others do not."""
    found, left_out = {}, {}
    for name, load in (("fa4", _fa4), ("fa3", _fa3), ("torch-varlen", _torch_varlen)):
        try:
            found[name] = load()
        except Exception as error:  # a half-installed peer raises more than ImportError
            left_out[name] = one_line(error)
    return found, left_out


def _fa4() -> Callable[..., Any]:
    from flash_attn.cute.interface import flash_attn_varlen_func

    def attend(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, causal: bool, window: Any) -> Any:
        left, right = (None if side < 0 else side for side in window)
        more = {} if (left, right) == (None, None) else {"window_size": (left, right)}
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, causal=causal, **more
        )

    return attend


def _fa3() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_varlen_func

    def attend(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, causal: bool, window: Any) -> Any:
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=causal, window_size=window)

    return attend


def _torch_varlen() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    def attend(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, causal: bool, window: Any) -> Any:
        left, right = window[0], 0 if causal else window[1]
        more: dict[str, Any] = {} if (left, right) == (-1, -1) else {"window_size": (left, right)}
        return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **more)

    return attend


def summarise(samples: Sequence[float], flop: float) -> tuple[float, float, float]:
    """Median (ms), interquartile range (ms; 0 for one sample) and TFLOP/s at the median of times in ms."""
    median = statistics.median(samples)
    if len(samples) > 1:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    else:
        low = high = median
    return median, high - low, flop / median / 1e9


def against_best_peer(table: pd.DataFrame) -> pd.Series:
    """For each row of ours, the fastest peer's time / its time; 1.0 within the larger of the two spreads, else NaN."""
    ours = table["implementation"].str.startswith("jfa")
    ratios = pd.Series(float("nan"), index=table.index)
    for _, group in table.groupby(["workload", "direction"], sort=False):
        whole = ~group["implementation"].str.endswith(WITHOUT_SUM)
        peers = group[~ours[group.index] & whole & group["median_ms"].notna()]
        if peers.empty:
            continue
        best = peers.sort_values("median_ms").iloc[0]
        mine = group[ours[group.index] & group["median_ms"].notna()]
        spread = mine["iqr_ms"].clip(lower=best["iqr_ms"])
        ratio = best["median_ms"] / mine["median_ms"]
        ratios[mine.index] = ratio.where((mine["median_ms"] - best["median_ms"]).abs() > spread, 1.0)
    return ratios


def one_line(error: BaseException) -> str:
    """An exception as one line of at most 200 characters."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= 200 else words[:199] + "…"


def round_count(round_ms: float) -> int:
    """How many rounds fit the time for a group: the same number for every contestant."""
    return max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(SECONDS_A_GROUP * 1e3 / max(round_ms, 1e-3))))


def orders(count: int, rounds: int) -> Iterator[list[int]]:
    """The order of each round: every contestant once, each coming first, and after each other one, as often.

    (Exactly so over ``count`` rounds, twice as many where ``count`` is odd, and their multiples.) What ran before
    leaves its mark on caches and clocks. The orders of a Williams design: 0, 1, n − 1, 2, n − 2, … with all shifts; for
    an odd count also backwards (Williams 1949, Experimental designs balanced for the estimation of residual effects of
    treatments).
    """
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    for number in range(rounds):
        shifted = [(number + step) % count for step in zigzag]
        yield shifted[::-1] if count % 2 and number // count % 2 else shifted


def _torch_with_gpu() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UserError("bench times kernels on a GPU and needs torch, which is not installed: make install") from error
    if not torch.cuda.is_available():
        raise UserError("bench times kernels on a GPU, and torch sees none here; `python -m profiling doctor` says why")
    return torch


def measure(
    workload: Workload,
    direction: str,
    schedules: Sequence[str],
    attends: dict[str, Callable[..., Any]],
    clock: GpuClock,
) -> tuple[list[Row], bool]:
    """The rows of one workload and direction, and whether Ctrl-C cut them short."""
    turns: list[Turn] = []
    failed: list[Row] = []
    interrupted = False
    try:
        inputs = workload.inputs(clock.device, requires_grad=True)
        for contestant in (*_ours(workload, inputs, schedules), *_theirs(workload, inputs, attends, direction)):
            turns.append(_prepare(contestant, inputs, direction, clock))
        _take_turns(turns, clock)
    except KeyboardInterrupt:
        interrupted = True
    except Exception as error:  # inputs that do not fit the GPU: the other workloads still run
        failed.append(Row(workload.name, direction, "inputs", "", error=one_line(error)))
    return [*(_row(turn, workload, direction) for turn in turns), *failed], interrupted


def _ours(workload: Workload, inputs: Inputs, schedules: Sequence[str]) -> Iterator[Contestant]:
    """Each kernel of ours under each schedule."""
    from jfa import jagged_attention
    from jfa.impl import choice
    from jfa.impl.triton import launch

    best = choice.resolve("auto", launch.capability(inputs.q.device), inputs.q.dtype)
    for impl, schedule in itertools.product(dict.fromkeys((best, "triton")), schedules):

        def forward(impl: str = impl, schedule: str = schedule) -> torch.Tensor:
            out = jagged_attention(
                inputs.q,
                inputs.k,
                inputs.v,
                inputs.kv_offsets,
                inputs.q_offsets,
                max_q_len=workload.max_q_len,
                max_kv_len=workload.max_kv_len,
                causal=workload.causal,
                window=workload.window,
                impl=impl,
                schedule=schedule,
            )
            return cast("torch.Tensor", out)

        yield Contestant(f"jfa-{impl}", schedule, forward, (inputs.q, inputs.k, inputs.v))


def _theirs(
    workload: Workload, inputs: Inputs, attends: dict[str, Callable[..., Any]], direction: str
) -> Iterator[Contestant]:
    """Each peer; in the backward of a shared Q twice, with and without the sum of its dQ over the batch."""
    if not attends:
        return
    expanded, cu_q = _expanded(workload, inputs)
    summed = inputs.q_offsets is None and direction == "backward"
    for (name, attend), total in itertools.product(attends.items(), (True, False) if summed else (False,)):

        def forward(attend: Callable[..., Any] = attend, total: bool = total) -> torch.Tensor:
            q = inputs.q.repeat(workload.batch, 1, 1) if total else expanded
            out = attend(
                q,
                inputs.k,
                inputs.v,
                cu_q,
                inputs.kv_offsets,
                workload.max_q_len,
                workload.max_kv_len,
                causal=workload.causal,
                window=workload.window or (-1, -1),
            )
            tensor: torch.Tensor = out[0] if isinstance(out, tuple) else out
            return tensor

        leaf, word = (inputs.q, "") if total else (expanded, WITHOUT_SUM if summed else "")
        yield Contestant(name + word, "", forward, (leaf, inputs.k, inputs.v))


def _expanded(workload: Workload, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """q as the peers take it, (total_q, H, D), and its int32 offsets (B + 1)."""
    import torch

    if inputs.q_offsets is not None:
        return inputs.q, inputs.q_offsets
    q = inputs.q.detach().repeat(workload.batch, 1, 1).requires_grad_(True)
    step = workload.max_q_len
    return q, torch.arange(workload.batch + 1, dtype=torch.int32, device=q.device) * step


def _prepare(contestant: Contestant, inputs: Inputs, direction: str, clock: GpuClock) -> Turn:
    """Bind what is timed, and run it until it is compiled and warm; what it raises is kept, not passed on."""
    import torch

    try:
        run: Callable[[], Any] = contestant.forward
        if direction == "backward":
            out = contestant.forward()
            grad = inputs.grad_out.reshape(out.shape)

            def run() -> Any:  # type: ignore[misc]
                return torch.autograd.grad(out, contestant.leaves, grad, retain_graph=True)

        for _ in range(WARMUP_RUNS):
            run()
        clock.settle()
    except Exception as error:  # a peer may raise anything; the others still run
        return Turn(contestant, contestant.forward, error=one_line(error))
    return Turn(contestant, run)


def _take_turns(turns: Sequence[Turn], clock: GpuClock) -> None:
    """Fill each turn's samples; Ctrl-C leaves those so far. Who raises has an error and runs no more."""
    first = sum(_sample(turn, clock) for turn in turns)
    for turn in turns:
        turn.samples.clear()  # the first round only says how many fit the time
    for order in orders(len(turns), round_count(first)):
        for place in order:
            _sample(turns[place], clock)


def _sample(turn: Turn, clock: GpuClock) -> float:
    """Time one run (ms) and keep it; 0 for a turn that has failed."""
    if not turn.error:
        try:
            turn.samples.append(clock.time(turn.run))
            return turn.samples[-1]
        except Exception as error:
            turn.error = one_line(error)
    return 0.0


def _row(turn: Turn, workload: Workload, direction: str) -> Row:
    who = (workload.name, direction, turn.contestant.implementation, turn.contestant.schedule)
    if turn.error or not turn.samples:
        return Row(*who, error=turn.error or "interrupted before its first round")
    median, iqr, tflops = summarise(turn.samples, workload.flop(direction))
    samples = tuple(round(sample, 5) for sample in turn.samples)
    return Row(*who, median, iqr, tflops, len(turn.samples), samples_ms=samples)
