"""``launch``: run a kernel of ours so that another profiler can look at it."""

from importlib.util import find_spec
from typing import Annotated

import typer

from profiling.commands import arguments, printing
from profiling.errors import UserError


def launch(
    workload: Annotated[str, typer.Option("--workload", help="A named workload, such as hsp-loguniform.")],
    direction: Annotated[str, typer.Option(help=" or ".join(arguments.DIRECTIONS))] = "forward",
    schedule: Annotated[str, typer.Option(help=", ".join(arguments.SCHEDULES))] = "balanced-dynamic",
    impl: Annotated[str, typer.Option(help=" or ".join(arguments.IMPLEMENTATIONS))] = "auto",
    launches: Annotated[int, typer.Option(min=1, help="How many launches, each under its NVTX range.")] = 1,
    warmup: Annotated[int, typer.Option(min=0, help="Launches before, outside any NVTX range.")] = 2,
) -> None:
    """Run a kernel on the GPU under its NVTX range, for Nsight Compute or Nsight Systems to look at.

    The plain kernel, without a recorder. Each launch lies in a range of domain jfa that starts with jfa_forward or
    jfa_backward, whatever the implementation; warm-up, the tile table and the forward that a backward needs lie
    outside, so that a profiler that selects by range sees the launches that were asked for. Without warm-up, the first
    launch is compiled inside its range. A schedule that deals on demand zeroes its counter in the range, a small kernel
    of torch's: `ncu-collect --kernel jfa` leaves it out.

    \b
    Examples:
      python -m profiling ncu-collect -o a.ncu-rep -- python -m profiling launch --workload hsp-loguniform
      nsys profile -t cuda,nvtx python -m profiling launch --workload hsp-extreme --direction backward --launches 5
    """
    arguments.choice(direction, arguments.DIRECTIONS, "direction")
    arguments.choice(schedule, arguments.SCHEDULES, "schedule")
    arguments.choice(impl, arguments.IMPLEMENTATIONS, "impl")
    work = arguments.workload(workload)
    if find_spec("torch") is None:
        raise UserError("launch runs a kernel on a GPU and needs torch, which is not installed here: make install")
    from profiling.launching import launch as run

    launcher = run(work, direction=direction, schedule=schedule, impl=impl, launches=launches, warmup=warmup)
    printing.line(
        f"{launcher.kernel} on {workload}, {launcher.schedule}: {launches} launched after {warmup} to warm up, "
        f"{launcher.ctas} CTAs each"
    )
    if find_spec("nvtx") is None:
        printing.warnings(["no launch lay in an NVTX range, for nvtx is not installed: pip install -e '.[kernels]'"])
