"""``sweep``: from which density and skew on each schedule wins."""

from pathlib import Path
from typing import Annotated

import typer

from profiling.commands import arguments, printing
from profiling.commands.printing import Column
from profiling.text import count, percent, times

NUMBERS = "Numbers between commas."


def sweep(
    recording: arguments.Example = None,
    densities: Annotated[
        str | None, typer.Option("--densities", help=f"Shares of sequences that are not empty. {NUMBERS}")
    ] = None,
    skews: Annotated[
        str | None, typer.Option("--skews", help=f"Standard deviations of the lengths' logarithm. {NUMBERS}")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1024,
    queries: Annotated[int, typer.Option(min=1, help="Queries of each sequence.")] = 256,
    median: Annotated[int, typer.Option(min=1, help="Median length of the sequences that are not empty.")] = 1024,
    longest: Annotated[int, typer.Option(min=1, help="Lengths drawn over this many keys are cut to it.")] = 32768,
    gpu: arguments.Gpu = None,
    sms: arguments.Sms = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="A figure: .html.")] = None,
    json: arguments.Json = False,
) -> None:
    """Say from which density and skew on each schedule wins.

    Lengths are drawn for each point of a grid: log-normal, some sequences empty. A recording says what a tile costs by
    its length, and each schedule deals the tiles out by its rule.

    \b
    Examples:
      python -m profiling sweep
      python -m profiling sweep --gpu B200 --batch 4096 -o sweep.html
    """
    from profiling import gpus
    from profiling.schedules import REPLAY_ERROR
    from profiling.sweep import DENSITIES, SHORT, SKEWS, Population
    from profiling.sweep import sweep as run
    from profiling.tiles_measured import tiles_of

    grid = (arguments.numbers(densities, "--densities"), arguments.numbers(skews, "--skews"))
    sms = arguments.sm_count(gpu, sms)
    if output:
        arguments.output_file(output, [".html"])
    source = arguments.example(recording)
    sms = arguments.kernels_sms(sms, gpu, source)
    tiles, population = tiles_of(source), Population(batch, queries, median, longest)
    with printing.progress() as bar:
        task = bar.add_task("points", total=None)
        table = run(
            tiles,
            population,
            grid[0] or DENSITIES,
            grid[1] or SKEWS,
            sms=sms,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    about = (
        f"{count(batch, 'sequence')} · {count(queries, 'query', 'queries')} · "
        f"median {count(median, 'key')}, at most {longest:,} · {table.attrs['sms']} SMs"
    )
    other = gpus.other_gpu(gpu, sms, source.gpu_name, tiles.sms)
    warnings = [*source.warnings(), *other, *table.attrs["notes"]]
    grade = f"modelled on tile costs measured on {source.gpu_name}"
    rule = f"the plainest within the replay's error ({percent(REPLAY_ERROR)}) of the quickest is to be chosen"
    if json:
        printing.document({"grade": grade, "about": about, "rows": printing.records(table), "warnings": warnings})
    else:
        best = table.loc[table.groupby(["density", "skew"])["gain"].idxmax()]
        lines: dict[float, dict[str, str]] = {}
        for point in printing.records(best):
            row = lines.setdefault(point["density"], {"density": percent(point["density"])})
            row[f"{point['skew']:g}"] = f"{SHORT[point['best']]} {times(point['gain'])}"
        skewed = [key for key in next(iter(lines.values())) if key != "density"]
        columns = [Column("density", "not empty")] + [Column(key, f"skew {key}") for key in skewed]
        title = f"The schedule to choose, and the quickest against static: {about}"
        printing.table(lines.values(), columns, title=title, grade=f"{grade}; {rule}; bal.: balanced, dyn.: dynamic")
        printing.warnings(warnings)
    if output:
        from profiling.page import write_figures
        from profiling.schedule_figures import sweep_map

        write_figures([sweep_map(table, about, [rule, *warnings])], output, "Which schedule wins from where on")
        if not json:
            printing.line(f"figure in {output}")
