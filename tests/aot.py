"""What the compiler makes of our kernels, printed as JSON by a process that compiles: pytest's interprets."""

from __future__ import annotations

import re
import sys

import triton

from jfa.config import HopperBackwardConfig, HopperResidentConfig
from profiling.cross_compile import (
    compile_backward,
    compile_dq,
    compile_forward,
    compile_hopper_backward,
    compile_hopper_forward,
    compile_resident_backward,
)


def _empty_recorder() -> None:
    """Replace the recorder's device functions by ones without a body, before any kernel is compiled."""
    from jfa import instrument

    @triton.jit
    def open_lane(recorder, lane, capacity, LEVEL, ROLES=False):
        return 0, 0

    @triton.jit
    def begin_span(lane, count, capacity, KIND, stage, LEVEL, AT):
        pass

    @triton.jit
    def end_span(lane, count, capacity, tile, LEVEL, AT):
        return count

    @triton.jit
    def behind(count, LEVEL, AT):
        return count

    @triton.jit
    def begin_wait(count, capacity, LEVEL):
        return 0

    @triton.jit
    def end_wait(lane, count, capacity, began, KIND, stage, tile, LEVEL):
        return count

    @triton.jit
    def wait_ended(count, capacity, LEVEL):
        return 0

    @triton.jit
    def note_wait(lane, count, capacity, began, ended, KIND, stage, tile, LEVEL):
        return count

    @triton.jit
    def close_lane(lane, count, LEVEL):
        pass

    emptied_all = (open_lane, begin_span, end_span, behind, begin_wait, end_wait, wait_ended, note_wait, close_lane)
    for emptied in emptied_all:
        setattr(instrument, emptied.__name__, emptied)


def main(arguments: list[str]) -> None:
    """Compile pinned configurations and print what came of it as JSON, a line a kernel.

    Arguments: levels as digits, "emptied" to empty the recorder first, architectures as sm_NN, head dimensions as dNN.
    """
    import hashlib
    import json

    from jfa.config import backward_config, dq_config, forward_config, hopper_forward_config

    if "emptied" in arguments:
        _empty_recorder()
    for arch in [int(word[3:]) for word in arguments if word.startswith("sm_")]:
        for dim in [int(word[1:]) for word in arguments if re.fullmatch(r"d\d+", word)]:
            for level in [int(word) for word in arguments if word.isdigit()]:
                for name, compile_one, choose in (
                    ("forward", compile_forward, forward_config),
                    ("backward", compile_backward, backward_config),
                    ("dq", compile_dq, dq_config),
                    (
                        "hopper-forward",
                        compile_hopper_forward,
                        lambda capability, dim, size: hopper_forward_config(dim),
                    ),
                    ("hopper-backward", compile_hopper_backward, lambda *kind: HopperBackwardConfig()),
                    ("hopper-resident", compile_resident_backward, lambda *kind: HopperResidentConfig()),
                ):
                    if name.startswith("hopper") and arch != 90:
                        continue
                    made = compile_one(choose((arch // 10, arch % 10), dim, 2), arch, dim=dim, level=level)  # type: ignore[operator]
                    code = hashlib.sha256(made.sass.encode()).hexdigest()
                    facts = {"arch": arch, "dim": dim, "level": level, "direction": name, "sass": code}
                    facts |= {"registers": made.registers, "stack": made.stack, "shared": made.shared}
                    facts |= {"tensor_memory": made.tensor_memory, "traps": made.ptx.count("trap;")}
                    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
