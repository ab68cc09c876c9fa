"""The commands of ``python -m profiling``: one file each, assembled from one list.

A command is one function: arguments in, one call to an analysis, one printed result. It returns the exit code (None is
0) and raises UserError for what the user can mend; `profiling.__main__` alone turns that into a line and a code.
"""

from collections.abc import Callable
from typing import Any

import typer

import profiling
from profiling.commands.ablate import ablate
from profiling.commands.ablation_page import ablation_page
from profiling.commands.advise import advise
from profiling.commands.bench import bench
from profiling.commands.compare import compare
from profiling.commands.demo import demo
from profiling.commands.diff_report import diff_report
from profiling.commands.doctor import doctor
from profiling.commands.export import export
from profiling.commands.heatmap import heatmap
from profiling.commands.hotspots import hotspots
from profiling.commands.launch import launch
from profiling.commands.ncu import ncu
from profiling.commands.ncu_collect import ncu_collect
from profiling.commands.overhead import overhead
from profiling.commands.race import race
from profiling.commands.record import record
from profiling.commands.report import report
from profiling.commands.schedules import schedules
from profiling.commands.show import show
from profiling.commands.sweep import sweep
from profiling.commands.waits import waits
from profiling.commands.waterfall import waterfall

COMMANDS: list[Callable[..., Any]] = [
    demo, doctor, record, overhead, show, waits, schedules, race, advise, sweep, heatmap, compare, report, export,
    bench, waterfall, ablate, ablation_page, diff_report, ncu, ncu_collect, hotspots, launch,
]  # fmt: skip

HELP = """Where does the SM time of an attention kernel over jagged lengths go?

\b
Try:   python -m profiling demo
Here:  python -m profiling doctor
Yours: python -m profiling record --workload hsp-loguniform --schedule static -o static.parquet
       python -m profiling show static.parquet
       python -m profiling heatmap static.parquet -o static.html

Exit code: 0 fine, 1 the verdict is bad (doctor found a fault), 2 the input was wrong, 130 Ctrl-C.
"""


def _version(asked: bool) -> None:
    if asked:
        print(profiling.__version__)
        raise typer.Exit()


def application() -> typer.Typer:
    """The program, with every command of `COMMANDS`."""
    app = typer.Typer(help=HELP, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def options(
        version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    ) -> None:
        pass

    for command in COMMANDS:
        app.command()(command)
    return app
