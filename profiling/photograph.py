"""Figures as PNG, photographed by a headless Chromium: for where no script runs, such as a README or a web page."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from profiling.errors import UserError

if TYPE_CHECKING:
    import plotly.graph_objects as go

WIDTH, SCALE = 1000, 1.6
"""CSS pixels, about what GitHub shows, so that letters keep their size; and pixels in one, sharp on dense screens."""
FEWEST_BYTES = 8_000
"""Fewer: a page photographed before it was drawn, on a busy machine."""
COLOURS = 128
"""Of a kept picture: no eye tells it from one of all colours, and it has a third of the bytes."""
TRIES = 3
NAMES = ("chromium", "chromium-browser", "google-chrome")
HIDDEN = "body { padding: 0; } .modebar { display: none !important; } .scroll { margin: 0; }"


def browser() -> str | None:
    """The Chromium on the PATH, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def write_png(figure: go.Figure, output: Path, *, width: int = WIDTH, scale: float = SCALE) -> Path:
    """Draw a figure into a PNG of ``width`` CSS pixels.

    Raises:
        UserError: Chromium or Pillow is missing, or the one draws nothing.
    """
    from profiling.page import write_figures

    if find_spec("PIL") is None:
        raise UserError("a picture needs Pillow, which is not installed: make install, or pip install pillow")
    program = browser()
    if program is None:
        raise UserError("no Chromium on the PATH; install it (Debian: apt-get install chromium)")
    height = int(figure.layout.height or 450)
    with tempfile.TemporaryDirectory() as folder:
        page = write_figures(figure, Path(folder) / "page.html")
        source = page.read_text(encoding="utf-8").replace("</style>", f"{HIDDEN}</style>", 1)
        page.write_text(source, encoding="utf-8")
        for _ in range(TRIES):
            _photograph(program, page, output.resolve(), width, height, scale)
            if output.exists() and output.stat().st_size >= FEWEST_BYTES:
                return _with_fewer_colours(output)
    raise UserError(f"{output}: Chromium drew nothing in {TRIES} tries; run it again on a quieter machine")


def _with_fewer_colours(picture: Path) -> Path:
    from PIL import Image

    with Image.open(picture) as photograph:
        fewer = photograph.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    fewer.save(picture, optimize=True)
    return picture


def _photograph(program: str, page: Path, output: Path, width: int, height: int, scale: float) -> None:
    output.unlink(missing_ok=True)
    command = [
        program,
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
        f"--window-size={width},{height}",
        f"--force-device-scale-factor={scale}",
        "--virtual-time-budget=10000",
        f"--screenshot={output}",
        page.as_uri(),
    ]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=False)
