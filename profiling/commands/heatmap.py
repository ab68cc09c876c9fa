"""``heatmap``: SM x time, how much of each moment the SM worked."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profiling.commands import arguments, printing

if TYPE_CHECKING:
    from profiling.recording import Recording

Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="An .html file; it opens offline.")]


def heatmap(
    file: arguments.RecordingFile,
    output: Output,
    bins: Annotated[int, typer.Option(min=10, max=4000, help="How many bins the makespan is cut into.")] = 400,
    launch: Annotated[int | None, typer.Option(min=0, help="By number. Default: the median makespan's.")] = None,
) -> None:
    """Draw which SMs worked when: one row an SM, from the launch's first start to its last end.

    \b
    Examples:
      python -m profiling heatmap static.parquet -o static.html
      python -m profiling heatmap static.parquet --bins 1000 -o static.html
    """
    from profiling.recording import Recording

    arguments.output_file(output, [".html"])
    recording = Recording.read(file)
    write_heatmaps([recording], output, bins=bins, launch=launch)
    printing.line(f"{recording.title()} ({recording.grade}): heatmap in {output}")
    printing.warnings(recording.warnings())


def write_heatmaps(
    recordings: Sequence["Recording"],
    output: Path,
    *,
    bins: int = 400,
    launch: int | None = None,
    comparable: bool = True,
) -> None:
    """One heatmap, or several above one another on one time axis, in an HTML file that needs no network.

    ``launch`` None: of each recording, the launch with the median makespan. ``comparable`` False: no makespan is set in
    proportion to another.
    """
    from profiling import figures
    from profiling.compare import median_launch
    from profiling.page import write_figures
    from profiling.sm_time import occupancy, summary

    found = []
    for recording in recordings:
        number = int(median_launch(summary(recording))["launch"]) if launch is None else launch
        found.append(occupancy(recording, bins=bins, launch=number))
    if len(found) == 1:
        figure = figures.occupancy_heatmap(found[0])
    else:
        figure = figures.occupancy_comparison(found, comparable=comparable)
    write_figures(figure, output, title=found[0].title)
