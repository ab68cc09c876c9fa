"""The ptxas that Triton is pointed at: the packaged one, the newest, made executable only where it is not."""

from __future__ import annotations

import os
import stat
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from jfa import toolchain


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the installed namespace package ``nvidia``, and no choice made by the user."""
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(toolchain, "find_spec", lambda name: spec if name == "nvidia" else None)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "undone after the test")
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    return tmp_path


def ptxas(home: Path, folder: str, mode: int = 0o755) -> Path:
    path = home / folder / "bin" / "ptxas"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return path


def test_the_newest_cuda_is_taken_and_never_cuda_12s(nvidia: Path) -> None:
    ptxas(nvidia, "cuda_nvcc")
    assert toolchain.packaged_ptxas() is None
    ptxas(nvidia, "cu9")
    newest = ptxas(nvidia, "cu13")
    assert toolchain.packaged_ptxas() == newest


def test_it_is_made_executable_only_where_it_is_not(nvidia: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ptxas(nvidia, "cu13", mode=0o644)
    toolchain.prefer_packaged_ptxas()
    assert path.stat().st_mode & stat.S_IXUSR
    assert os.environ["TRITON_PTXAS_PATH"] == str(path)
    monkeypatch.delenv("TRITON_PTXAS_PATH")

    def refuse(self: Path, mode: int) -> None:
        raise PermissionError("another user's file")

    monkeypatch.setattr(Path, "chmod", refuse)
    toolchain.prefer_packaged_ptxas()
    assert os.environ["TRITON_PTXAS_PATH"] == str(path)


def test_a_choice_made_by_the_user_stays(nvidia: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ptxas(nvidia, "cu13")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/mine")
    toolchain.prefer_packaged_ptxas()
    assert os.environ["TRITON_PTXAS_PATH"] == "/mine"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make TRITON_PTXAS_PATH name a ptxas that gives an answer."""
    toolchain.ptxas_version.cache_clear()
    toolchain.require_safe_ptxas.cache_clear()

    def make(answer: str) -> Path:
        path = tmp_path / "ptxas"
        path.write_text(f"#!/bin/sh\necho '{answer}'\n")
        path.chmod(0o755)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
        return path

    yield make
    toolchain.ptxas_version.cache_clear()
    toolchain.require_safe_ptxas.cache_clear()


def test_an_old_ptxas_is_refused_where_it_assembles_wrongly(asked) -> None:
    path = asked("Cuda compilation tools, release 12.9, V12.9.86")
    with pytest.raises(RuntimeError, match="impl='hopper': ptxas 12.9.86 .* silently wrong; pip install") as caught:
        toolchain.require_safe_ptxas("impl='hopper'")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_current_ptxas_is_taken(asked) -> None:
    asked("Cuda compilation tools, release 13.3, V13.3.33")
    toolchain.require_safe_ptxas("impl='hopper'")


def test_a_ptxas_that_does_not_say_is_refused(asked) -> None:
    asked("no tool of ours")
    with pytest.raises(RuntimeError, match="does not say its version"):
        toolchain.require_safe_ptxas("impl='hopper'")
