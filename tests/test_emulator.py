"""The emulator of TLX kernels: right kernels come out right in any order, and each kind of fault is caught.

Faults are made by changing the source that the emulator reads, of kernels in `toy_kernels` and of the real ones.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import test_hopper_emulated as real  # noqa: E402
import toy_kernels as toy  # noqa: E402
from emulator_faults import FAULTS  # noqa: E402
from shapes import Case  # noqa: E402

from jfa.impl.hopper import backward, dq, forward, primitives, resident  # noqa: E402
from profiling.emulator import EmulationError  # noqa: E402
from profiling.emulator.launch import EmulatedKernel  # noqa: E402

one_thread = real.one_thread
SEEDS = range(20)

JAGGED = Case(q_lens=(200, 40, 130), kv_lens=(300, 129, 200), heads=1, heads_kv=1)
# A step a tile, so that the next tile is stored soon.
SHORT = Case(q_lens=(129,) * 3, kv_lens=(30,) * 3)
SHORT_BACKWARD = Case(q_lens=(40,) * 4, kv_lens=(129,) * 4)
FEW_ROWS = Case(q_len=100, kv_lens=(130, 64, 5), heads=3, heads_kv=3)
MORE_ROWS = Case(q_len=200, kv_lens=(130, 70, 64, 5))

RUNS = {
    "product": toy.run_product,
    "exchange": toy.run_exchange,
    "turns": toy.run_turns,
    "forward": partial(real.forward, JAGGED, sms=1),
    "forward-short": partial(real.forward, SHORT, sms=1),
    "forward-pingpong": partial(real.forward, JAGGED, sms=1, pingpong=True),
    "forward-pair": partial(real.forward, MORE_ROWS, sms=2),
    "shared": partial(real.shared, JAGGED, sms=1),
    "shared-beside": partial(real.shared_beside, JAGGED, sms=2),
    "shared-buffers": partial(real.shared, SHORT_BACKWARD, sms=1, dq_slices=2, dq_buffers=2),
    "resident": partial(real.resident, FEW_ROWS, sms=1),
    "pair": partial(real.resident, MORE_ROWS, sms=2),
}
OF_FORWARD = (forward.jfa_forward_hopper, primitives.store_tile, primitives.ragged)
OF_RESIDENT = (resident.jfa_backward_resident, resident._store)
FUNCTIONS = {
    "product": (toy.product,),
    "exchange": (toy.exchange,),
    "turns": (toy.taking_turns,),
    "forward": OF_FORWARD,
    "forward-short": OF_FORWARD,
    "forward-pingpong": OF_FORWARD,
    "forward-pair": (*OF_FORWARD, forward._agree, primitives.release, primitives.load_for_both),
    "shared": (backward.jfa_backward_hopper, dq.add),
    "shared-beside": (backward.jfa_backward_hopper, backward.announce),
    "shared-buffers": (backward.jfa_backward_hopper,),
    "resident": OF_RESIDENT,
    "pair": OF_RESIDENT,
}
"""Where a run's faults are."""


@pytest.mark.parametrize("name", RUNS)
def test_right_kernels_come_out_right_in_any_order(name):
    for seed in SEEDS[:6]:
        RUNS[name](seed)


@contextmanager
def faulty(functions: tuple[Any, ...], diff: str):
    """Inside, the emulator reads one of the functions as the diff changes it; it must have read it."""
    read, original = [], inspect.getsource
    found = {of.fn: changed for of in functions if (changed := patched(original(of.fn), diff))}
    assert len(found) == 1, f"the lines are in {len(found)} functions: {diff}"

    def getsource(of: Any) -> str:
        if of not in found:
            return original(of)
        read.append(of)
        return found[of]

    with patch("profiling.emulator.launch.inspect.getsource", getsource):
        yield
    assert read, "the emulator did not read the changed source"


def patched(source: str, diff: str) -> str | None:
    """The source as the diff changes it, None where its lines do not stand there once. ``...`` is between two places.

    Lines are compared without their indentation.
    """
    lines = source.splitlines()
    for place in diff.split("..."):
        marked = textwrap.dedent(place).strip("\n").splitlines()
        marked = [line or " " for line in marked]
        wanted = [line[1:].strip() for line in marked if line[0] != "+"]
        found = [at for at in range(len(lines)) if [line.strip() for line in lines[at : at + len(wanted)]] == wanted]
        if len(found) != 1:
            return None
        lines[found[0] : found[0] + len(wanted)] = replaced(lines[found[0] :], marked)
    return "\n".join(lines)


def replaced(lines: list[str], marked: list[str]) -> list[str]:
    """What a diff's lines make of those that begin with its first; what it adds is indented as they are."""
    shift = indentation(lines[0]) - indentation(marked[0][1:])
    rest = iter(lines)
    made = []
    for line in marked:
        if line[0] == "+":
            made.append(" " * (shift + indentation(line[1:])) + line[1:].strip())
        else:
            kept = next(rest)
            made += [kept] if line[0] == " " else []
    return made


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def outcome(name: str, seed: int) -> str:
    try:
        RUNS[name](seed)
    except EmulationError as error:
        return f"{type(error).__name__}: {error}"
    except AssertionError as error:
        return "wrong result: " + str(error).partition("\n")[0]
    return "right"


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in FAULTS for fault in FAULTS[name]])
def test_a_fault_is_caught(name, fault):
    comes, diff = FAULTS[name][fault]
    found = []
    with faulty(FUNCTIONS[name], diff):
        for seed in SEEDS:
            found.append(outcome(name, seed))
            if found[-1] != "right":
                break
    assert re.match(comes, found[-1]), found


def test_a_seed_repeats_an_order():
    """What one seed shows, it shows again; another may not."""
    _, diff = FAULTS["product"]["staging-overwritten"]
    with faulty(FUNCTIONS["product"], diff):
        found, again = ([outcome("product", seed) == "right" for seed in SEEDS] for _ in range(2))
    assert found == again and len(set(found)) > 1


@pytest.mark.parametrize(
    ("run", "changes"), [(real.forward, {"stages": 3}), (real.shared, {"dq_buffers": 3})], ids=["forward", "shared"]
)
def test_a_configuration_that_does_not_fit_is_refused(run, changes):
    with pytest.raises(EmulationError, match="bytes of shared memory; a CTA has 232,448"):
        run(replace(JAGGED, head_dim=128), **changes)


def test_lines_that_are_gone_are_not_taken_for_a_fault_that_was_caught():
    with pytest.raises(AssertionError, match="in 0 functions"), faulty((toy.product,), "-tlx.fence()"):
        pass
    with pytest.raises(AssertionError, match="did not read"), faulty((toy.product,), '-tlx.fence("async_shared")'):
        pass


def test_ctas_that_make_no_whole_cluster_are_refused():
    with pytest.raises(ValueError, match="3 CTAs are no whole number of clusters of 2"):
        EmulatedKernel(forward.jfa_forward_hopper)[(3,)](ctas_per_cga=(2, 1, 1))
