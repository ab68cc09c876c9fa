"""What installing promises: a base without torch, Triton or (where nothing is drawn) Plotly; whole packages."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

import profiling
from profiling.recording import Recording

# Runs the program with some packages made impossible to import, as if they were not installed.
WITHOUT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Blocker())
from profiling.__main__ import main
sys.exit(main({arguments!r}))
"""


def run_without(blocked, repository, *arguments):
    code = WITHOUT.format(blocked=set(blocked), arguments=[str(word) for word in arguments])
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False, timeout=180)


@pytest.mark.parametrize("command", ["demo", "show", "compare", "heatmap", "report", "export"])
def test_the_base_install_needs_neither_torch_nor_triton(repository, recordings, tmp_path, command):
    one, two = recordings / "forward-static.parquet", recordings / "forward-balanced.parquet"
    arguments = {
        "demo": ["--data", recordings, "--out", tmp_path / "demo"],
        "show": [one],
        "compare": [one, two, "-o", tmp_path / "x.html"],
        "heatmap": [one, "-o", tmp_path / "x.html"],
        "report": [one, two, "-o", tmp_path / "report"],
        "export": [one, "-o", tmp_path / "x.json"],
    }[command]
    result = run_without(["torch", "triton", "nvtx"], repository, command, *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout


@pytest.mark.parametrize("command", ["record", "bench"])
def test_what_needs_torch_says_so_in_one_line(repository, tmp_path, command):
    arguments = ["--workload", "tiny", "-o", tmp_path / "x.parquet"] if command == "record" else []
    code = "import importlib.util; real = importlib.util.find_spec\n"
    code += "importlib.util.find_spec = lambda name, *a: None if name == 'torch' else real(name, *a)\n"
    result = subprocess.run(
        [sys.executable, "-c", code + WITHOUT.format(blocked={"torch"}, arguments=[command, *map(str, arguments)])],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "needs torch" in result.stderr and "make install" in result.stderr


@pytest.mark.parametrize("command", ["show", "compare", "export", "bench"])
def test_what_draws_nothing_needs_no_plotly(repository, recordings, tmp_path, command):
    one = recordings / "forward-static.parquet"
    arguments = {
        "show": [one],
        "compare": [one, one],
        "export": [one, "-o", tmp_path / "x.json"],
        "bench": ["--help"],
    }[command]
    result = run_without(["plotly"], repository, command, *arguments)
    assert (result.returncode, result.stderr) == (0, "")


def test_importing_the_packages_loads_nothing_heavy(repository):
    code = "import sys, profiling, jfa; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert not {"torch", "triton", "plotly", "nvtx"} & set(loaded.stdout.split())


def test_the_kernels_never_import_the_profiler(repository):
    for path in sorted((repository / "jfa").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.partition(".")[0] == "profiling"], path


def test_versions_and_pins_agree(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert project["version"] == profiling.__version__
    assert project["requires-python"] == ">=3.11,<3.15"
    pins = dict(line.split("==") for line in (repository / "constraints.txt").read_text().split() if "==" in line)
    (fbtriton,) = (word for word in project["optional-dependencies"]["kernels"] if word.startswith("fbtriton"))
    assert fbtriton.startswith(f"fbtriton=={pins['fbtriton']};")
    assert not re.search(r"\b(torch|triton)\b", " ".join(project["dependencies"]))


def test_the_wheel_holds_both_packages_whole(repository, tmp_path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, "."]
    subprocess.run(command, cwd=repository, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for package in ("jfa", "profiling"):
        tracked = (path.relative_to(repository) for path in (repository / package).rglob("*") if path.is_file())
        expected = {str(path) for path in tracked if "__pycache__" not in path.parts}
        assert expected <= held
        assert f"{package}/py.typed" in held
    assert {name.split("/")[0].split("-")[0] for name in held} == {"jfa", "profiling", "jfa_profiling"}


def test_the_shipped_recordings_are_measured_whole_and_small(repository):
    paths = sorted((repository / "profiling" / "data").glob("*.parquet"))
    assert len(paths) >= 16
    assert sum(path.stat().st_size for path in paths) <= 2.5e6
    seen = set()
    for path in paths:
        recording = Recording.read(path)
        assert (recording.grade, recording.lost, recording.level) == ("measured", 0, "tile"), path
        assert recording.get("kernel.config_hash") == recording.get("kernel.plain_config_hash"), path
        seen.add((recording.workload_name, recording.direction, recording.schedule))
    for name in ("hsp-loguniform", "hsp-half-empty", "hsp-extreme"):
        forward = {(name, "forward", schedule) for schedule in ("static", "balanced", "dynamic", "balanced-dynamic")}
        backward = {(name, "backward", schedule) for schedule in ("static", "balanced-dynamic")}
        assert forward | backward <= seen


def test_the_demo_of_the_shipped_recordings(repository, tmp_path):
    result = run_without(["torch", "triton", "nvtx"], repository, "demo", "--out", tmp_path / "demo")
    assert (result.returncode, result.stderr) == (0, "")
    assert "times: measured on NVIDIA H200" in result.stdout
    assert (tmp_path / "demo" / "index.html").exists()
