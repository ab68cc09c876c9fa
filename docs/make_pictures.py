"""Make a picture of the README: recordings of one workload on one time axis.

    python docs/make_pictures.py STATIC.parquet BALANCED-DYNAMIC.parquet [-o docs/occupancy.png]

docs/schedules.png is of hsp-extreme's forward under static, balanced and dynamic, with --bins 400. It needs Chromium
(Debian: apt-get install chromium), which draws the figure's own page; no network is used.
"""

import argparse
import sys
from pathlib import Path

from profiling.compare import median_launch
from profiling.errors import UserError
from profiling.figures import occupancy_comparison
from profiling.photograph import write_png
from profiling.recording import Recording
from profiling.sm_time import occupancy, summary

BINS = 500
MOST_BYTES = 300_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path, help="from top to bottom")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_name("occupancy.png"))
    parser.add_argument("--bins", type=int, default=BINS, help="time bins of a heatmap")
    args = parser.parse_args()
    try:
        make(args.recordings, args.output, args.bins)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{args.output}: {args.output.stat().st_size:,} bytes")


def make(paths: list[Path], output: Path, bins: int = BINS) -> None:
    """Draw the comparison of recordings into a PNG of 1600 pixels' width.

    Raises
    ------
    UserError : a recording cannot be read, Chromium is missing or draws nothing, or the picture is too large.
    """
    found = []
    for path in paths:
        recording = Recording.read(path)
        launch = int(median_launch(summary(recording))["launch"])
        found.append(occupancy(recording, bins=bins, launch=launch))
    write_png(occupancy_comparison(found), output)
    if output.stat().st_size > MOST_BYTES:
        raise UserError(f"{output}: {output.stat().st_size:,} bytes, more than {MOST_BYTES:,}; draw fewer --bins")


if __name__ == "__main__":
    main()
