"""``export``: a recording as a trace for another viewer."""

from pathlib import Path
from typing import Annotated

import typer

from profiling.commands import arguments, printing

Output = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE", help="A .json file, or .json.gz to have it compressed.")
]


def export(file: arguments.RecordingFile, output: Output) -> None:
    """Write a recording as a Chrome trace, for Perfetto too.

    Both ui.perfetto.dev and chrome://tracing open it.

    \b
    Examples:
      python -m profiling export static.parquet -o static.json.gz
      python -m profiling export static.parquet -o static.json
    """
    from profiling.export import write_trace
    from profiling.recording import Recording

    arguments.output_file(output, [".json", ".json.gz"])
    with printing.progress() as bar:
        task = bar.add_task("reading", total=None)
        recording = Recording.read(file)
        bar.update(task, description="writing")
        trace = write_trace(recording, output)
    printing.line(f"{recording.title()} ({recording.grade}): {trace.written:,} spans in {output}")
    printing.warnings([*recording.warnings(), *filter(None, [trace.notice])])
