"""The notebooks run from top to bottom, on the recordings in the package; what they show is kept beside a picture."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra notebooks is not installed")
pytest.importorskip("nbclient", reason="the extra notebooks is not installed")
pytest.importorskip("ipykernel", reason="the extra notebooks is not installed")

HERE = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = ["01_workload_heatmaps", "02_static_against_dynamic", "03_bottleneck_hunt", "04_bring_your_own_kernel"]
PLOTLY, PNG = "application/vnd.plotly.v1+json", "image/png"
MOST_BYTES = 700_000


def _refresh():
    spec = importlib.util.spec_from_file_location("refresh", HERE / "refresh.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outputs(notebook) -> list:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_these_are_all():
    assert sorted(path.stem for path in HERE.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_without_a_gpu_and_shows_what_is_kept(name, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = HERE / f"{name}.ipynb"
    kept, fresh = nbformat.read(path, as_version=4), _refresh().run(path)
    assert [cell.source for cell in kept.cells] == [cell.source for cell in fresh.cells]
    kinds = [[sorted(set(output.get("data", {})) - {PNG}) for output in outputs(book)] for book in (kept, fresh)]
    assert kinds[0] == kinds[1], "python notebooks/refresh.py"
    for old, new in zip(outputs(kept), outputs(fresh), strict=True):
        for data in (old.get("data", {}), new.get("data", {})):
            data.pop(PNG, None)
        if PLOTLY in old.get("data", {}):
            assert titles(old) == titles(new), "python notebooks/refresh.py"
        else:
            assert words(old) == words(new), "python notebooks/refresh.py"
    assert not [output for output in outputs(fresh) if output.output_type == "error" or output.get("name") == "stderr"]


def words(output) -> str:
    """What a printed line or a table says; empty of an object that is shown by its address."""
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return "" if " at 0x" in text else " ".join(text.split())


def titles(output) -> str:
    return json.dumps(output["data"][PLOTLY]["layout"].get("title"), sort_keys=True)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_small_and_needs_no_script(name):
    path = HERE / f"{name}.ipynb"
    text = path.read_text()
    assert len(text) < MOST_BYTES and "cdn.plot.ly" not in text and "/root" not in text and "/tmp" not in text
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert book.cells[0].cell_type == "markdown" and book.cells[0].source.startswith("# ")
    figures = [output["data"] for output in outputs(book) if PLOTLY in output.get("data", {})]
    assert figures
    for data in figures:
        assert base64.b64decode(data[PNG]).startswith(b"\x89PNG")
    assert all(cell.execution_count for cell in book.cells if cell.cell_type == "code")
