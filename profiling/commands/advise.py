"""``advise``: which schedule suits a user's own lengths."""

from pathlib import Path
from typing import Annotated

import typer

from profiling.commands import arguments, printing
from profiling.commands.printing import Column
from profiling.errors import UserError
from profiling.text import count, duration, percent, times

COLUMNS = [
    Column("schedule", "schedule", right=False),
    Column("predicted_ns", "expected", duration),
    Column("bound_ns", "no schedule below", duration),
    Column("headroom", "headroom", times),
]


def advise(
    lengths: Annotated[
        Path, typer.Option("--lengths", metavar="FILE", help="Keys of each sequence: .npy, .parquet or .csv.")
    ],
    queries: Annotated[
        int | None,
        typer.Option(
            "--queries", min=1, max=2**31 - 1, help="So many queries in each sequence. Default: as many as keys."
        ),
    ] = None,
    query_lengths: Annotated[
        Path | None, typer.Option("--query-lengths", metavar="FILE", help="Queries of each sequence, as --lengths.")
    ] = None,
    column: Annotated[str | None, typer.Option("--column", help="Which column of the tables.")] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Heads; of the keys in the backward.")] = 4,
    causal: Annotated[bool, typer.Option("--causal", help="A query sees no later key.")] = False,
    gpu: arguments.Gpu = None,
    sms: arguments.Sms = None,
    recording: arguments.Example = None,
    json: arguments.Json = False,
) -> None:
    """Say which schedule suits your lengths, and what padding them would waste.

    Expected times come from a model of what a tile costs by its length, fitted to a recording: of its GPU, kernel, head
    dimension and direction. Give one of your own with --recording.

    \b
    Examples:
      python -m profiling advise --lengths lengths.npy --queries 256 --heads 4
      python -m profiling advise --lengths batch.parquet --column seq_len --causal --gpu H100
    """
    from dataclasses import replace

    import numpy as np

    from profiling import gpus
    from profiling.advice import advise as advice_on
    from profiling.lengths import offsets_note, read_lengths
    from profiling.tiles_measured import tiles_of

    if queries is not None and query_lengths is not None:
        raise UserError("--queries and --query-lengths: both say how many queries there are; give one")
    sms = arguments.sm_count(gpu, sms)
    files = [lengths] if query_lengths is None else [lengths, query_lengths]
    tables = [path for path in files if path.suffix != ".npy"]
    if column is not None and not tables:
        raise UserError(f"--column {column}: {lengths} is an .npy file, which has no columns; leave --column out")
    read = [read_lengths(path, column if path in tables else None) for path in files]
    kv_lens, q_lens = read[0], read[-1]
    if queries is not None:
        q_lens = np.full(len(kv_lens), queries)
    if len(q_lens) != len(kv_lens):
        raise UserError(
            f"{query_lengths}: has {count(len(q_lens), 'length')}, {lengths} has {len(kv_lens):,}; expected one for "
            "each sequence"
        )
    source = arguments.example(recording)
    sms = arguments.kernels_sms(sms, gpu, source)
    tiles = tiles_of(source)
    shape = replace(tiles.shape, heads=heads, window=(-1, 0) if causal else (-1, -1))
    found = advice_on(tiles, shape, q_lens, kv_lens, sms)
    model = found.model
    doubts = [note for path, of in zip(files, read, strict=True) if (note := offsets_note(of, path))]
    warnings = [*source.warnings(), *gpus.other_gpu(gpu, sms, source.gpu_name, tiles.sms), *doubts, *found.notes]
    grade = (
        f"modelled: {duration(model.fixed_ns)} a tile + {duration(model.per_column_ns)} a column, fitted to "
        f"{source.title()} (measured; half of its {model.tiles:,} tiles lie within {percent(model.error_p50)}, 95 % "
        f"within {percent(model.error_p95)}); {sms or tiles.sms} SMs"
    )
    rows = [
        {
            "schedule": each.schedule,
            "predicted_ns": each.makespan_ns,
            "bound_ns": each.bound_ns,
            "headroom": each.headroom,
        }
        for each in found.replays
    ]
    if json:
        printing.document(
            {
                "grade": grade,
                "sequences": found.sequences,
                "empty": found.empty,
                "tokens_wasted": found.tokens_wasted,
                "pairs_wasted": found.pairs_wasted,
                "padded_ns": found.padded_ns,
                "rows": rows,
                "choice": found.choice,
                "fastest": found.fastest,
                "advice": found.words,
                "warnings": warnings,
            }
        )
        return
    printing.line(
        f"{count(found.sequences, 'sequence')}, {found.empty:,} of them empty: padded to the longest, "
        f"{percent(found.tokens_wasted)} of the keys and {percent(found.pairs_wasted)} of the (query, key) pairs would "
        f"be padding; expected {duration(found.padded_ns)} with it"
    )
    printing.table(rows, COLUMNS, title="Expected time by schedule", grade=grade)
    printing.warnings(warnings)
    printing.line(found.words)
