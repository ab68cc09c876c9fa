"""Run the notebooks beside this file and keep what they show.

    python notebooks/refresh.py [NOTEBOOK.ipynb…] [--check]

Every interactive figure also gets a picture of itself, for where no script runs (Chromium draws it). --check runs them
and writes nothing. Cells that need a GPU say so where there is none.
"""

import argparse
import base64
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
PLOTLY, PNG = "application/vnd.plotly.v1+json", "image/png"
PICTURE_WIDTH, PICTURE_SCALE = 1000, 1.0
SECONDS = 300


def run(path: Path) -> Any:
    """The notebook with the outputs of a fresh run, from its own folder. CellExecutionError: a cell failed."""
    # Figures as data: the default would put all of plotly.js into the file.
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"
    # A checkout need not be installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}
    )
    client.execute()
    return notebook


def keep(notebook: Any, path: Path) -> None:
    """Write it, with a picture beside every figure and without what differs from run to run."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if PLOTLY in output.get("data", {}):
                output["data"][PNG] = picture(output["data"][PLOTLY])
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


def picture(figure: dict[str, Any]) -> str:
    """The figure as PNG, in base64."""
    import plotly.graph_objects as go

    from profiling.photograph import write_png

    drawn = go.Figure({"data": figure["data"], "layout": figure["layout"]}, skip_invalid=True)
    with tempfile.TemporaryDirectory() as folder:
        written = write_png(drawn, Path(folder) / "figure.png", width=PICTURE_WIDTH, scale=PICTURE_SCALE)
        return base64.b64encode(written.read_bytes()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="all, if none is named")
    parser.add_argument("--check", action="store_true", help="run them and write nothing")
    args = parser.parse_args()
    for path in args.notebooks or sorted(HERE.glob("*.ipynb")):
        try:
            done = run(path)
        except CellExecutionError as error:
            sys.exit(f"{path}: {error}")
        if not args.check:
            keep(done, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes" + (" (unchanged)" if args.check else ""))


if __name__ == "__main__":
    main()
