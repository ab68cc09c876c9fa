"""``ncu-collect``: run a command under Nsight Compute and keep the report."""

import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from profiling.commands import arguments, printing
from profiling.text import plain


def ncu_collect(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="What to run, after --, with its arguments.")
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where the report goes: a .ncu-rep file.")
    ] = Path("profile.ncu-rep"),
    nvtx: Annotated[
        str,
        typer.Option(
            metavar="RANGE",
            help="Which launches: those inside a push/pop range. jfa_forward: those of domain jfa that begin so; "
            "DOMAIN@RANGE, or DOMAIN@ for all of a domain; an expression of ncu's (it has regex: in it, or ends in / "
            "or ]); none: every launch, also in start/end ranges or in no range.",
        ),
    ] = "jfa@",
    section_set: Annotated[
        str, typer.Option("--set", metavar="SET", help="Which sections: basic, detailed, full, or another of ncu's.")
    ] = "full",
    kernel: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Of these launches, those of kernels whose name matches.")
    ] = None,
    launch_skip: Annotated[int | None, typer.Option(min=0, help="Of these, leave out the first so many.")] = None,
    launch_count: Annotated[int | None, typer.Option(min=1, help="Of these, at most so many.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    timeout: Annotated[float | None, typer.Option(min=1, help="Stop after so many seconds.")] = None,
) -> None:
    """Profile a command's kernels with Nsight Compute, by default ours.

    Runs `ncu`, which must be installed and may need permission (`python -m profiling doctor` looks at both). The GPU's
    clocks are left as they are. ncu's messages go to stderr as they come, a line a kernel; what the command writes goes
    to stdout and stderr as it wrote it; it gets no input. The report takes its place when it is whole.

    \b
    Examples:
      python -m profiling ncu-collect -o a.ncu-rep -- python -m profiling launch --workload hsp-loguniform
      python -m profiling ncu-collect -o b.ncu-rep --nvtx jfa_backward --launch-count 1 -- python train.py
      python -m profiling ncu-collect -o c.ncu-rep --nvtx none --kernel 'flash.*' --set basic -- python other.py
    """
    arguments.output_file(output, [".ncu-rep"])
    from profiling.ncu.collection import collect, kernels

    said: list[str] = []

    def on_line(line: str) -> None:
        said.append(line)
        if not line.startswith("==PROF== Report:"):  # it has the name that the report had while it was written
            print(plain(line, 1000), file=sys.stderr, flush=True)

    report = collect(
        command or [],
        output=output,
        nvtx=nvtx,
        set=section_set,
        extra=filters(kernel, launch_skip, launch_count),
        force=force,
        on_line=on_line,
        timeout_s=timeout,
    )
    names = Counter(kernels(said))
    total = names.total()
    listed = ", ".join(f"{name} {count}" for name, count in names.items())
    printing.line(
        f"{report}: {total} kernel{'' if total == 1 else 's'} profiled ({listed}); "
        f"look at it: python -m profiling ncu {shlex.quote(str(report))}"
    )


def filters(kernel: str | None, launch_skip: int | None, launch_count: int | None) -> list[str]:
    """ncu's options that narrow down the launches."""
    options = ["--kernel-name", f"regex:{kernel}"] if kernel is not None else []
    options += ["--launch-skip", str(launch_skip)] if launch_skip is not None else []
    return options + (["--launch-count", str(launch_count)] if launch_count is not None else [])
