"""What every test shares: where Triton runs, which tests are left out, and why.

Without a CUDA device Triton runs in its interpreter, and that choice is read when `triton` is first imported, so it is
made here, before any test module is. A machine with a GPU can be told to interpret too: TRITON_INTERPRET=1 pytest.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("unhurried", parent=settings(), deadline=None)  # a busy machine is not a fault
settings.load_profile("unhurried")

SWITCHES_ON = {"1", "true", "on", "y", "yes"}


def driver_devices() -> int:
    """How many CUDA devices the driver shows (CUDA_VISIBLE_DEVICES respected): 0 without a driver. Imports nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def without_gpu() -> str:
    """Why tests marked gpu cannot run here; empty when they can."""
    if driver_devices() == 0:
        return "no CUDA device"
    if os.environ.get("TRITON_INTERPRET", "").lower() in SWITCHES_ON:
        return "TRITON_INTERPRET is set: Triton runs on the CPU"
    if importlib.util.find_spec("torch") is None:
        return "a CUDA device, but no torch"
    import torch

    return "" if torch.cuda.is_available() else f"a CUDA device, but torch {torch.__version__} does not see it"


# What is printed into a pipe is not folded; pytest-xdist hands its workers the width of the terminal.
os.environ.pop("COLUMNS", None)

WITHOUT_GPU = without_gpu()
if WITHOUT_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_report_header(config: pytest.Config) -> str:
    return f"gpu tests: {'skipped, ' + WITHOUT_GPU if WITHOUT_GPU else 'run'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if WITHOUT_GPU:
        skip = pytest.mark.skip(reason=WITHOUT_GPU)
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    if not config.getoption("--slow") and "slow" not in (config.getoption("-m") or ""):
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped, a line a reason: hundreds have the same one."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, tests in reasons.most_common():
        terminalreporter.write_line(f"skipped {tests}: {reason}")


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run: "cuda", or "cpu" through Triton's interpreter."""
    return "cpu" if WITHOUT_GPU else "cuda"


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium; a test that asks for it is skipped without one, or fails under JFA_REQUIRE_BROWSER=1."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    missing = "no Chromium on the PATH (Debian: apt-get install chromium)"
    if os.environ.get("JFA_REQUIRE_BROWSER") == "1":
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of modelled recordings of one workload: {forward,backward}-{schedule}.parquet, all but `grid`."""
    import numpy as np
    from synthetic import SCHEDULES, synthetic_recording

    folder = tmp_path_factory.mktemp("recordings")
    rng = np.random.default_rng(0)
    kv_lens = np.exp(rng.uniform(np.log(16), np.log(8192), 100)).astype(np.int64)
    for direction in ("forward", "backward"):
        for schedule in SCHEDULES[1:]:
            recording = synthetic_recording(256, kv_lens, schedule=schedule, direction=direction, name="hsp-small")
            recording.write(folder / f"{direction}-{schedule}.parquet")
    return folder


@pytest.fixture(scope="session")
def program(repository: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``python -m profiling ARGUMENTS`` as a user does, from the repository's folder."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "profiling", *map(str, arguments)],
            cwd=repository,
            env={**os.environ, "NO_COLOR": "1", **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )

    return run
