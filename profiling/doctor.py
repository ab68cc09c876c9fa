"""What works on this machine and how to mend what does not: :func:`examine` returns one :class:`Check` a row.

``fail`` is what gives wrong results or stops what the machine could do; ``warn`` is what is merely not there: a base
install without torch, Triton or a GPU has warnings and no failure.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jfa import toolchain

BASE_PACKAGES = ("numpy", "pandas", "pyarrow", "plotly", "rich", "typer", "jinja2")
OPTIONAL_PACKAGES = {
    "nvtx": ("kernels", "kernel launches carry no NVTX range"),
    "ncu-report": ("ncu", "Nsight Compute reports cannot be read"),
    "nbclient": ("notebooks", "notebooks cannot be run"),
}
OLDEST_PYTHON, STANDARD_LIBRARY_CLASH = (3, 11), (3, 15)
# In the order of trust: what one of these holds tells fbtriton and triton apart. libtriton.so is large: size only.
TRITON_WITNESSES = ("triton/__init__.py", "triton/knobs.py", "triton/_C/libtriton.so")
HASHED_UP_TO_BYTES = 1_000_000
DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
CAP_SYS_ADMIN, CAP_PERFMON = 21, 38


@dataclass(frozen=True)
class Check:
    """One row: what was looked at, the verdict, what was found, and what to do about it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Driver:
    """What the CUDA driver says, without torch: version such as "13.0", and each device's name and capability."""

    version: str
    devices: tuple[tuple[str, tuple[int, int]], ...]


def examine(progress: Callable[[str], None] = lambda name: None) -> list[Check]:
    """Run every check, telling ``progress`` its name before. No check raises: one that cannot run is a row too."""
    driver = read_driver()
    checks: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("python", check_python),
        ("import profiling", check_import),
        ("packages", check_packages),
        ("torch", lambda: check_torch(driver)),
        ("triton", check_triton),
        ("ptxas", lambda: check_ptxas(has_gpu=bool(driver and driver.devices))),
        ("gpu", lambda: check_gpu(driver)),
        ("ncu", check_ncu),
        ("gpu counters", lambda: check_counters(DRIVER_PARAMETERS, may_profile())),
        ("chromium", check_chromium),
    ]
    rows: list[Check] = []
    for name, check in checks:
        progress(name)
        try:
            rows.extend(check())
        except Exception as error:  # a doctor that dies of what it finds helps nobody
            rows.append(Check(name, "fail", f"the check itself failed: {type(error).__name__}: {error}"))
    return rows


def check_python(version: tuple[int, int] | None = None) -> Iterator[Check]:
    """The interpreter; 3.15 has a ``profiling`` of its own (PEP 799) that hides an installed one."""
    major, minor = version or sys.version_info[:2]
    found = f"{major}.{minor}" if version else f"{platform.python_version()} at {sys.executable}"
    fix = "make a .venv with Python 3.11 to 3.14: make clean demo PYTHON=python3.13"
    if (major, minor) >= STANDARD_LIBRARY_CLASH:
        found += ": its standard library has a `profiling` of its own (PEP 799), found before an installed one"
        yield Check("python", "fail", found, fix)
    elif (major, minor) < OLDEST_PYTHON:
        yield Check("python", "fail", f"{found}: older than 3.11", fix)
    else:
        yield Check("python", "ok", found)


def check_import() -> Iterator[Check]:
    """Whether ``import profiling`` finds this package from any folder, not only from its own."""
    code = "import importlib.util as u; s = u.find_spec('profiling'); print(s.origin if s else '')"
    found = _python(code).stdout.strip()
    ours = Path(__file__).resolve().parent
    if not found:
        yield Check("import profiling", "warn", f"works in {ours.parent} only: not installed", "pip install -e .")
    elif Path(found).resolve().parent == ours:
        yield Check("import profiling", "ok", str(ours))
    elif (Path(found).parent / "doctor.py").is_file():
        words = f"elsewhere it is another copy of this package: {Path(found).parent}"
        yield Check("import profiling", "warn", words, f"pip install -e {ours.parent}")
    else:
        fix = f"remove or rename {found}, or install into a fresh .venv"
        yield Check("import profiling", "fail", f"another `profiling` is found first: {found}", fix)


def check_packages() -> Iterator[Check]:
    """The base packages (all needed) and the small optional ones."""
    versions = {name: version_of(name) for name in BASE_PACKAGES}
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        yield Check("base packages", "fail", f"missing: {', '.join(missing)}", "pip install -e .")
    else:
        yield Check("base packages", "ok", found)
    for name, (extra, consequence) in OPTIONAL_PACKAGES.items():
        version = version_of(name)
        if version:
            yield Check(name, "ok", version)
        else:
            yield Check(name, "warn", f"not installed: {consequence}", f"pip install -e '.[{extra}]'")


def check_torch(driver: Driver | None) -> Iterator[Check]:
    """torch, and whether it sees the GPU that the driver shows."""
    if version_of("torch") is None:
        found = "not installed: recordings can be read, kernels cannot be run"
        yield Check("torch", "warn", found, "pip install -c constraints.txt -e '.[kernels]', or make install")
        return
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    answer = _python(code)
    if answer.returncode != 0:
        yield Check("torch", "fail", f"does not import: {_last_line(answer.stderr)}", "reinstall torch")
        return
    version, cuda, available = answer.stdout.split()[-3:]
    found = f"{version}, CUDA {cuda}" if cuda != "None" else f"{version}, a CPU build"
    if driver and driver.devices and available != "True":
        yield Check("torch", "fail", f"{found}: does not see the GPU", "install a CUDA build of torch for this driver")
    else:
        yield Check("torch", "ok", found)


def check_triton() -> Iterator[Check]:
    """That TLX imports: fbtriton and PyPI's triton own the same folder, and the last one installed wins."""
    fbtriton, upstream = version_of("fbtriton"), version_of("triton")
    x86 = sys.platform == "linux" and platform.machine() == "x86_64"
    if fbtriton is None and upstream is None:
        yield Check("triton", "warn", "not installed: kernels cannot be run", "pip install -e '.[kernels]'")
    elif fbtriton is None:
        found = f"triton {upstream}, without TLX: the baseline kernels only"
        yield Check("triton", "warn", found, "pip uninstall triton; pip install fbtriton==3.7.4" if x86 else "")
    else:
        fix = f"pip uninstall -y triton; pip install --force-reinstall --no-deps fbtriton=={fbtriton}"
        strays = stray_files("triton", "fbtriton")
        overwritten = overwritten_files(importlib.metadata.distribution("fbtriton"), TRITON_WITNESSES)
        if overwritten:
            by = f" by triton {upstream}" if upstream else ""
            yield Check("triton", "fail", f"fbtriton {fbtriton} was overwritten{by}: {', '.join(overwritten)}", fix)
            return
        if strays:
            found = f"{len(strays)} files of triton {upstream} lie among fbtriton {fbtriton}'s, such as {strays[0]}"
            yield Check("triton", "fail", found, fix)
            return
        # Every launch of a kernel imports Gluon, which the files of another Triton break first.
        code = "import triton, triton.language.extra.tlx, triton.experimental.gluon; print(triton.__version__)"
        answer = _python(code)
        if answer.returncode != 0:
            yield Check("triton", "fail", f"TLX does not import: {_last_line(answer.stderr)}", fix)
        else:
            yield Check("triton", "ok", f"fbtriton {fbtriton} (Triton {answer.stdout.strip()}), TLX imports")


def check_ptxas(has_gpu: bool) -> Iterator[Check]:
    """The ptxas that the kernels are assembled with; before 13.3 some wgmma kernels come out silently wrong."""
    used, why = toolchain.ptxas_in_use()
    if used is None:
        if version_of("fbtriton") or version_of("triton"):
            yield Check("ptxas", "fail", "none found", "pip install 'nvidia-cuda-nvcc>=13.3'")
        else:
            yield Check("ptxas", "warn", "none: no Triton, no nvidia-cuda-nvcc", "pip install -e '.[kernels]'")
        return
    wanted = ".".join(map(str, toolchain.SAFE_PTXAS))
    try:
        version = toolchain.ptxas_version(str(used))
    except (OSError, ValueError) as error:
        yield Check("ptxas", "fail", f"{used} ({why}) does not run: {error}", "pip install 'nvidia-cuda-nvcc>=13.3'")
        return
    found = f"{'.'.join(map(str, version))} at {used} ({why})"
    if version >= toolchain.SAFE_PTXAS:
        yield Check("ptxas", "ok", found)
        return
    fix = f"pip install 'nvidia-cuda-nvcc>={wanted}'"
    if why == "TRITON_PTXAS_PATH":
        fix = f"unset TRITON_PTXAS_PATH, and {fix}"
    found += f": before {wanted}, attention on sm_90 can be silently wrong"
    yield Check("ptxas", "fail" if has_gpu else "warn", found, fix)


def check_gpu(driver: Driver | None) -> Iterator[Check]:
    """The driver and its devices."""
    if driver is None:
        found = "no CUDA driver: recordings can be read, kernels run in Triton's interpreter only"
        yield Check("gpu", "warn", found, "record and bench need a machine with an NVIDIA GPU")
    elif not driver.devices:
        yield Check("gpu", "warn", f"driver for CUDA {driver.version}, no device", "check CUDA_VISIBLE_DEVICES")
    else:
        names = ", ".join(f"{name} (sm_{major}{minor})" for name, (major, minor) in driver.devices)
        yield Check("gpu", "ok", f"{names}; driver for CUDA {driver.version}")


def check_ncu() -> Iterator[Check]:
    """Nsight Compute's command line, wherever NVIDIA's installers put it."""
    found = find_ncu()
    if found is None:
        yield Check("ncu", "warn", "not found: no new reports from here", "install NVIDIA's nsight-compute")
        return
    answer = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=60)
    match = re.search(r"Version (\S+)", answer.stdout)
    if match:
        yield Check("ncu", "ok", f"{match[1]} at {found}")
    else:
        yield Check("ncu", "fail", f"{found} does not say its version: {_last_line(answer.stderr)}", "reinstall it")


def check_counters(parameters: Path, allowed: bool) -> Iterator[Check]:
    """Whether the driver lets this user read the GPU's counters, which ncu needs (its error: ERR_NVGPUCTRPERM)."""
    if not parameters.exists():
        yield Check("gpu counters", "warn", "not known: no NVIDIA driver here")
        return
    match = re.search(r"^RmProfilingAdminOnly:\s*(\d)", parameters.read_text(), re.MULTILINE)
    if match is None:
        yield Check("gpu counters", "warn", f"not known: {parameters} has no RmProfilingAdminOnly")
    elif match[1] == "0":
        yield Check("gpu counters", "ok", "open to every user")
    elif allowed:
        yield Check("gpu counters", "ok", "for administrators, and this process is one")
    else:
        fix = (
            "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' > /etc/modprobe.d/nvidia-profiling.conf, "
            "reboot; or run ncu with CAP_SYS_ADMIN"
        )
        yield Check("gpu counters", "warn", "for administrators only: ncu will answer ERR_NVGPUCTRPERM", fix)


def check_chromium() -> Iterator[Check]:
    """The browser that the report's tests use."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            yield Check("chromium", "ok", path)
            return
    found = "not found: browser tests are skipped; reports open in any browser"
    yield Check("chromium", "warn", found, "apt-get install chromium")


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def overwritten_files(distribution: importlib.metadata.Distribution, names: tuple[str, ...]) -> list[str]:
    """Those of ``names`` that are not what the distribution installed, by its RECORD (size; sha256 if small)."""
    changed = []
    for file in distribution.files or []:
        if str(file) not in names:
            continue
        path = Path(str(file.locate()))
        if not path.exists() or (file.size is not None and path.stat().st_size != file.size):
            changed.append(str(file))
        elif file.hash and file.hash.mode == "sha256" and path.stat().st_size <= HASHED_UP_TO_BYTES:
            digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            if digest != file.hash.value:
                changed.append(str(file))
    return changed


def stray_files(other: str, ours: str, path: list[str] | None = None) -> list[str]:
    """Files that the distribution ``other`` brought into a folder of ``ours``, which has none of that name; sorted.

    ``path``: where to look for both; the interpreter's by default.
    """
    found = {}
    for name in (other, ours):
        distributions = importlib.metadata.distributions(name=name, path=sys.path if path is None else path)
        distribution = next(iter(distributions), None)
        found[name] = {str(file): file for file in distribution.files or []} if distribution else {}
    folders = {file.partition("/")[0] for file in found[ours] if not file.partition("/")[0].endswith(".dist-info")}
    mine = {file: located for file, located in found[other].items() if file.partition("/")[0] in folders}
    return sorted(
        file
        for file, located in mine.items()
        if file not in found[ours] and "__pycache__" not in file and Path(str(located.locate())).exists()
    )


def read_driver() -> Driver | None:
    """Ask the CUDA driver itself (CUDA_VISIBLE_DEVICES respected); None where there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number, devices = ctypes.c_int(0), []
    version = cuda.cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value or 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
        for ordinal in range(count.value):
            device, name = ctypes.c_int(0), ctypes.create_string_buffer(128)
            major, minor = ctypes.c_int(0), ctypes.c_int(0)
            cuda.cuDeviceGet(ctypes.byref(device), ordinal)
            cuda.cuDeviceGetName(name, len(name), device)
            cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
            cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # COMPUTE_CAPABILITY_MINOR
            devices.append((name.value.decode(errors="replace"), (major.value, minor.value)))
    return Driver(f"{version // 1000}.{version % 1000 // 10}", tuple(devices))


def find_ncu() -> str | None:
    """Path of ``ncu``: on the PATH, in a CUDA toolkit, or in Nsight Compute's own folder (the newest)."""
    if path := shutil.which("ncu"):
        return path
    patterns = ("usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")
    found = [path for pattern in patterns for path in sorted(Path("/").glob(pattern), reverse=True)]
    return str(found[0]) if found else None


def may_profile() -> bool:
    """Whether this process has CAP_SYS_ADMIN or CAP_PERFMON, which open the counters where they are restricted."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    capabilities = int(match[1], 16) if match else 0
    return bool(capabilities >> CAP_SYS_ADMIN & 1 or capabilities >> CAP_PERFMON & 1)


def _python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter in a neutral folder: what a broken package does there stays there."""
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=120)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
