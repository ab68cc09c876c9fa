"""A .ncu-rep without NVIDIA's package: through the ncu that is installed, by a stand-in that prints a real raw page."""

from __future__ import annotations

import sys

import pytest
from ncu_reports import unpack

from profiling.errors import UserError
from profiling.ncu import exported, reading
from profiling.ncu.reading import read

NAME = "h200_fwd_static"


@pytest.fixture
def without_the_package(monkeypatch, tmp_path):
    """Makes an ncu of what a script does, and hides the package; the report that it is asked for."""

    def make(script: str):
        program = tmp_path / "ncu"
        program.write_text(f"#!{sys.executable}\nimport sys, time\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(reading, "find_spec", lambda name: None)
        monkeypatch.setattr(reading, "find_ncu", lambda: str(program))
        return unpack(f"{NAME}.ncu-rep", tmp_path)

    return make


def test_it_is_the_raw_page_under_the_reports_name(without_the_package, tmp_path):
    page = unpack(f"{NAME}.raw.csv", tmp_path)
    told = "assert sys.argv[1] == '--import' and sys.argv[3:] == ['--csv', '--page', 'raw'], sys.argv"
    path = without_the_package(f"{told}\nsys.stdout.write(open({str(page)!r}).read())")
    found, expected = read(path), read(page)
    assert found.metrics == expected.metrics and found.launches == expected.launches
    assert found.path == str(path) and found.writer.startswith("2025.3") and found.notes[0] == exported.NOTE


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "print('==ERROR== File is of a newer version.'); sys.exit(1)",
            "failed (==ERROR== File is of a newer version.)",
        ),
        ("print('==PROF== nothing here')", "what ncu --import prints of it"),
        ("pass", "what ncu --import prints of it"),
    ],
)
def test_what_ncu_cannot_read_is_one_line(script, expected, without_the_package):
    path = without_the_package(script)
    with pytest.raises(UserError) as error:
        read(path)
    assert expected in str(error.value) and "\n" not in str(error.value) and str(path) in str(error.value)


def test_an_ncu_that_hangs_is_given_up(without_the_package, monkeypatch):
    path = without_the_package("time.sleep(60)")
    with pytest.raises(UserError, match="did not come back within 0.5 s"):
        exported.read_exported(path, reading.find_ncu(), timeout_s=0.5)


def test_instances_need_the_package(without_the_package, monkeypatch):
    path = without_the_package("sys.exit('not to be run')")
    monkeypatch.setattr("profiling.ncu.binary.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install ncu-report"):
        read(path, instances=True)
