"""``report``: one offline HTML page about recordings."""

from pathlib import Path
from typing import Annotated

import typer

from profiling.commands import arguments, printing
from profiling.text import count

Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="A folder; made if it is not there.")]


def report(files: arguments.RecordingFiles, output: Output) -> None:
    """Write an HTML report of recordings, which opens offline.

    Heatmaps, SM time, tails and lengths of one or more recordings, with how each number was obtained.

    \b
    Examples:
      python -m profiling report static.parquet balanced-dynamic.parquet -o report
    """
    from profiling.report import write_report

    arguments.output_folder(output)
    recordings = arguments.read_all(files)
    with printing.progress() as bar:
        bar.add_task("drawing", total=None)
        page = write_report(recordings, output)
    printing.line(f"report of {count(len(recordings), 'recording')}: {page}")
    printing.warnings_of(recordings, lambda recording: recording.source)
