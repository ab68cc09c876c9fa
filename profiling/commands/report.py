"""``report``: one offline HTML page about recordings."""

from pathlib import Path
from typing import Annotated

import typer

from profiling.commands import arguments, printing

Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="A folder; made if it is not there.")]


def report(files: arguments.RecordingFiles, output: Output) -> None:
    """Write a report of one or more recordings: heatmaps, SM time, tails, lengths. It opens without a network.

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
    printing.line(f"report of {len(recordings)} recordings: {page}")
    for recording in recordings:
        printing.warnings(recording.warnings(), of=recording.source)
