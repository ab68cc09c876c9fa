"""``compare``: recordings side by side."""

from pathlib import Path
from typing import Annotated

import typer

from profiling.commands import arguments, printing, views
from profiling.commands.printing import Column
from profiling.errors import UserError
from profiling.text import short_names

Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the heatmaps, one above the other: .html.")
]


def compare(files: arguments.RecordingFiles, output: Output = None, json: arguments.Json = False) -> None:
    """Set recordings side by side; speedups are against the first.

    What differs besides the schedule comes first. A speedup is given only between recordings of the same workload,
    direction, GPU and grade, and a difference within the spread of the timings reads as "same".

    \b
    Examples:
      python -m profiling compare static.parquet balanced-dynamic.parquet
      python -m profiling compare static.parquet balanced-dynamic.parquet -o heatmaps.html
    """
    from profiling.compare import compare as run

    if len(files) < 2:
        raise UserError(f"compare: expected two recordings or more, got {len(files)}")
    if output:
        arguments.output_file(output, [".html"])
    recordings = arguments.read_all(files)
    comparison = run(recordings)
    rows = printing.records(comparison.table)
    if json:
        printing.document(
            {
                "obstacles": comparison.obstacles,
                "differences": comparison.differences,
                "speedup_of": comparison.speedup_of,
                "rows": rows,
                "warnings": {recording.source: recording.warnings() for recording in recordings},
            }
        )
    else:
        for words in comparison.obstacles:
            printing.line(f"not comparable: {words}; no speedup is given")
        for words in comparison.differences:
            printing.line(f"note: {words}")
        first = [Column(name, name, right=False) for name in ("recording", "schedule")]
        columns = views.split_columns(first, compared=True)
        grade = f"{views.grade_words(recordings)} ({comparison.speedup_of}, against the first)"
        names = short_names([row["recording"] for row in rows])
        rows = [{**row, "recording": name} for row, name in zip(rows, names, strict=True)]
        printing.table(views.split_rows(rows), columns, title=f"{len(rows)} recordings", grade=grade)
        printing.warnings_of(recordings, lambda recording: recording.source)
    if output:
        from profiling.commands.heatmap import write_heatmaps

        write_heatmaps(recordings, output, comparable=not comparison.obstacles)
        if not json:
            printing.line(f"heatmaps in {output}")
