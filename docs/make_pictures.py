"""Make a picture of the README: recordings of one workload on one time axis.

    python docs/make_pictures.py STATIC.parquet BALANCED-DYNAMIC.parquet [-o docs/occupancy.png]

docs/schedules.png is of hsp-extreme's forward under static, balanced and dynamic, with --bins 400.

It needs Chromium (Debian: apt-get install chromium), which draws the figure's own page; no network is used.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from profiling.compare import median_launch
from profiling.errors import UserError
from profiling.figures import occupancy_comparison
from profiling.page import write_figures
from profiling.recording import Recording
from profiling.sm_time import occupancy, summary

WIDTH = 1000  # CSS pixels: about what GitHub shows, so that the letters keep their size
SCALE = 1.6  # → 1600 pixels, sharp on dense screens
BINS = 500
FEWEST_BYTES, MOST_BYTES = 30_000, 300_000  # fewer: a page photographed before it was drawn, on a busy machine
TRIES = 3
HIDDEN = "body { padding: 0; } .modebar { display: none !important; } .scroll { margin: 0; }"


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
    figure = occupancy_comparison(found)
    with tempfile.TemporaryDirectory() as folder:
        page = write_figures(figure, Path(folder) / "page.html")
        source = page.read_text(encoding="utf-8").replace("</style>", f"{HIDDEN}</style>", 1)
        page.write_text(source, encoding="utf-8")
        for _ in range(TRIES):
            photograph(page, output.resolve(), int(figure.layout.height))
            if output.stat().st_size >= FEWEST_BYTES:
                break
        else:
            raise UserError(f"{output}: Chromium drew nothing in {TRIES} tries; run it again on a quieter machine")
    if output.stat().st_size > MOST_BYTES:
        raise UserError(f"{output}: {output.stat().st_size:,} bytes, more than {MOST_BYTES:,}; draw fewer --bins")


def photograph(page: Path, output: Path, height: int) -> None:
    """Write what Chromium shows of a page, WIDTH × height CSS pixels, as a PNG."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        raise UserError("no Chromium on the PATH; install it (Debian: apt-get install chromium)")
    output.unlink(missing_ok=True)
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={page.parent / 'profile'}",
        f"--window-size={WIDTH},{height}",
        f"--force-device-scale-factor={SCALE}",
        "--virtual-time-budget=10000",
        f"--screenshot={output}",
        page.as_uri(),
    ]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=False)
    if not output.exists():
        raise UserError(f"{browser} wrote no {output}; run it by hand to see why")


if __name__ == "__main__":
    main()
