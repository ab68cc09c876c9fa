"""What `doctor` sees: verdicts on made-up machines part by part, and the real program on this one."""

import base64
import hashlib
import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest

from jfa import toolchain
from profiling import doctor


def only(rows):
    (row,) = rows
    return row


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 14), "ok"), ((3, 15), "fail"), ((3, 16), "fail")]
)
def test_supported_pythons(version, status):
    row = only(doctor.check_python(version))
    assert row.status == status
    assert ("PEP 799" in row.found) == (version >= (3, 15))
    assert bool(row.fix) == (status == "fail")


def distribution(folder: Path, installed: bytes) -> importlib.metadata.Distribution:
    """An installed package `fbtriton` of one file, by its RECORD."""
    info = folder / "fbtriton-3.7.4.dist-info"
    info.mkdir(parents=True)
    (folder / "triton").mkdir()
    digest = base64.urlsafe_b64encode(hashlib.sha256(installed).digest()).rstrip(b"=").decode()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fbtriton\nVersion: 3.7.4\n")
    (info / "RECORD").write_text(f"triton/__init__.py,sha256={digest},{len(installed)}\n")
    return importlib.metadata.Distribution.at(info)


@pytest.mark.parametrize(
    ("there", "overwritten"),
    [(b"version = 1\n", False), (b"version = 2\n", True), (b"longer than before\n", True), (None, True)],
)
def test_a_package_unpacked_over_fbtriton_is_seen(tmp_path, there, overwritten):
    package = distribution(tmp_path, b"version = 1\n")
    if there is not None:
        (tmp_path / "triton" / "__init__.py").write_bytes(there)
    expected = ["triton/__init__.py"] if overwritten else []
    assert doctor.overwritten_files(package, doctor.TRITON_WITNESSES) == expected


def installed(folder: Path, name: str, files: list[str]) -> None:
    """A package of empty files, as pip leaves it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files) + f"{info.name}/RECORD,,\n")
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


def test_files_of_another_triton_among_fbtritons_are_seen(tmp_path):
    installed(tmp_path, "fbtriton", ["triton/__init__.py", "triton/gluon/cdna5.py"])
    assert doctor.stray_files("triton", "fbtriton", [str(tmp_path)]) == []
    more = ["triton/gluon/cdna5/__init__.py", "triton/__pycache__/x.pyc", "elsewhere/a.py"]
    installed(tmp_path, "triton", ["triton/__init__.py", *more])
    assert doctor.stray_files("triton", "fbtriton", [str(tmp_path)]) == ["triton/gluon/cdna5/__init__.py"]
    (tmp_path / more[0]).unlink()
    assert doctor.stray_files("triton", "fbtriton", [str(tmp_path)]) == []


def test_fbtriton_here_is_whole():
    try:
        package = importlib.metadata.distribution("fbtriton")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fbtriton is for x86-64 Linux only")
    named = {str(file) for file in package.files or []}
    assert set(doctor.TRITON_WITNESSES) <= named
    assert doctor.overwritten_files(package, doctor.TRITON_WITNESSES) == []
    assert only(doctor.check_triton()).status == "ok"


def ptxas(path: Path, version: str) -> Path:
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("version", "has_gpu", "status"),
    [
        ("12.9.86", True, "fail"),
        ("12.9.86", False, "warn"),
        ("13.2.10", True, "fail"),
        ("13.3.1", True, "ok"),
        ("14.0.1", True, "ok"),
    ],
)
def test_an_old_ptxas_fails_where_there_is_a_gpu(tmp_path, monkeypatch, version, has_gpu, status):
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas(tmp_path / "ptxas", version)))
    row = only(doctor.check_ptxas(has_gpu))
    assert row.status == status
    assert version in row.found and "TRITON_PTXAS_PATH" in row.found
    assert ("unset TRITON_PTXAS_PATH" in row.fix) == (status != "ok")


def test_a_ptxas_that_does_not_run_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "none"))
    row = only(doctor.check_ptxas(False))
    assert row.status == "fail" and "does not run" in row.found


def test_the_ptxas_of_the_package_is_preferred_to_tritons_own(monkeypatch):
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    used, why = toolchain.ptxas_in_use()
    assert why == "nvidia-cuda-nvcc" and used is not None and used.name == "ptxas"
    assert only(doctor.check_ptxas(True)).status == "ok"


@pytest.mark.parametrize(
    ("text", "allowed", "status"),
    [
        ("RmProfilingAdminOnly: 0\n", False, "ok"),
        ("ResmanDebugLevel: 1\nRmProfilingAdminOnly: 1\n", True, "ok"),
        ("ResmanDebugLevel: 1\nRmProfilingAdminOnly: 1\n", False, "warn"),
        ("ResmanDebugLevel: 1\n", False, "warn"),
        (None, True, "warn"),
    ],
)
def test_counters(tmp_path, text, allowed, status):
    path = tmp_path / "params"
    if text is not None:
        path.write_text(text)
    row = only(doctor.check_counters(path, allowed))
    assert row.status == status
    restricted = text is not None and "AdminOnly: 1" in text and not allowed
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in row.fix) == restricted


def test_a_check_that_breaks_is_a_row_and_not_a_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "DRIVER_PARAMETERS", tmp_path)  # a folder: reading it raises
    rows = {row.name: row for row in doctor.examine()}
    assert rows["gpu counters"].status == "fail" and "IsADirectoryError" in rows["gpu counters"].found
    assert {"python", "base packages", "torch", "triton", "ptxas", "gpu", "ncu", "chromium"} <= set(rows)


def test_another_profiling_that_is_found_first_fails(program, tmp_path):
    (tmp_path / "profiling").mkdir()
    (tmp_path / "profiling" / "__init__.py").write_text("")
    result = program("doctor", "--json", PYTHONPATH=str(tmp_path))
    found = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.returncode == 1
    assert found["import profiling"]["status"] == "fail" and str(tmp_path) in found["import profiling"]["found"]


def test_another_copy_of_this_package_is_no_fault(program, tmp_path, repository):
    copied = tmp_path / "copy"
    shutil.copytree(
        repository / "profiling", copied / "profiling", ignore=shutil.ignore_patterns("data", "__pycache__")
    )
    result = program("doctor", "--json", PYTHONPATH=str(copied))
    found = {check["name"]: check for check in json.loads(result.stdout)["checks"]}["import profiling"]
    assert found["status"] == "warn" and str(copied) in found["found"] and found["fix"].startswith("pip install -e")


def test_doctor_here(program):
    result = program("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.returncode == (1 if report["failed"] else 0)
    assert report["failed"] == [check["name"] for check in report["checks"] if check["status"] == "fail"]
    for check in report["checks"]:
        assert check["found"], check
        assert check["status"] == "ok" or check["fix"] or "not known" in check["found"], check
