"""Collecting Nsight Compute reports: ncu's command line, what its output means, and how its process is handled.

ncu runs with a GPU alone. Elsewhere a stand-in replays what ncu 2025.3.1 printed, recorded on an H200 (paths replaced),
around the command, which really runs. What it printed where counters are forbidden or missing is from NVIDIA's
documentation and public reports.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiling import doctor
from profiling.__main__ import main
from profiling.commands.ncu_collect import filters
from profiling.errors import UserError
from profiling.ncu.collection import Listener, Request, collect, explain, find_ncu, kernels, nvtx_filter, set_names

UNLOCKED = (
    "==WARNING== Note: Running with unmodified GPU clocks. If not controlled otherwise, profiling results may be "
    "inconsistent.\n"
)
CONNECTED = "==PROF== Connected to process 757 (/usr/bin/python3)\n"
DISCONNECTED = "==PROF== Disconnected from process 757\n"
ONE_KERNEL = '==PROF== Profiling "jfa_backward" - 0 (1/1): 0%....50%....100% - 38 passes\n'
THREE_KERNELS = """\
==PROF== Profiling "jfa_delta" - 0: 0%....50%....100% - 10 passes
==PROF== Profiling "jfa_backward" - 1: 0%....50%....100% - 10 passes
==PROF== Profiling "cudnn_generated_fort_native_s..." - 2: 0%....50%....100% - 10 passes
"""
UNREADABLE = (
    "==WARNING== Unable to access the following 2 metrics: ctc__rx_bytes_data_user.sum, ctc__tx_bytes_data_user.sum."
    "\n\n\n"
)
NOT_A_PROGRAM = (
    "==ERROR== '/nonexistent' does not exist or is not an executable. Please make sure to specify the absolute path to "
    "'/nonexistent' if the executable is not in the local directory.\n"
)
NO_METRICS = "==WARNING== No metrics to collect found in sections.\n==WARNING== No kernels were profiled.\n"
NO_METRICS_YET_KERNELS = (
    "==WARNING== No metrics to collect found in sections.\n"
    + CONNECTED
    + '==PROF== Profiling "jfa_forward" - 1: 0%....50%....100% - 1 pass\n'
    + DISCONNECTED
)
ONE_KERNEL_BY_NAME = '==PROF== Profiling "jfa_backward": 0%....50%....100% - 38 passes\n'
COMMAND_FAILED = "==ERROR== The application returned an error code (3).\n"
NOTHING_MATCHED = (
    CONNECTED
    + DISCONNECTED
    + """\
==WARNING== No kernels were profiled.
==WARNING== Note that specified NVTX include expressions match only push/pop ranges.
==WARNING== Refer https://docs.nvidia.com/nsight-compute/NsightComputeCli/index.html#nvtx-filtering for NVTX Filtering \
usage.
"""
)
FORBIDDEN = (
    CONNECTED
    + """\
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target \
device 0. For instructions on enabling permissions and to get more information see \
https://developer.nvidia.com/ERR_NVGPUCTRPERM
"""
    + DISCONNECTED
    + "==WARNING== No kernels were profiled.\n"
)
SANDBOXED = (
    CONNECTED
    + """\
==ERROR== An error was reported by the counter measurement library:
==ERROR== Failed to initialize the profiler: LibraryNotLoaded. Check that a compatible driver library is loaded.
==PROF== Trying to shutdown target application
==ERROR== The application returned an error code (9).
"""
)
TAKEN = (
    CONNECTED
    + """\
==ERROR== An error was reported by the driver:
==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool (like DCGM) is \
concurrently collecting profiling data. See https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html#faq for \
more details.
==ERROR== Failed to profile "jfa_forward" in process 757
==PROF== Trying to shutdown target application
==ERROR== The application returned an error code (9).
"""
)
OLD_GPU = (
    CONNECTED
    + "==ERROR== Profiling is not supported on device 0. To find out supported GPUs refer --list-chips option.\n"
    + DISCONNECTED
    + "==WARNING== No kernels were profiled.\n"
)
OLD_DRIVER = """\
==ERROR== Cuda driver is not compatible with Nsight Compute.
==WARNING== Failed to load Nsight Compute CUDA modules.
"""
SETS = """\
---------- --------------------------------------------------------------------------- ------- -----------------
Identifier Sections                                                                    Enabled Estimated Metrics
---------- --------------------------------------------------------------------------- ------- -----------------
basic      LaunchStats, Occupancy, SpeedOfLight, WorkloadDistribution                  yes     213              
detailed   ComputeWorkloadAnalysis, LaunchStats, MemoryWorkloadAnalysis, MemoryWorkloa no      906              
           dAnalysis_Chart, Occupancy, SourceCounters, SpeedOfLight, SpeedOfLight_Roof                          
           lineChart, WorkloadDistribution                                                                      
full       ComputeWorkloadAnalysis, InstructionStats, LaunchStats, MemoryWorkloadAnaly no      7794             
            SourceCounters, SpeedOfLight, SpeedOfLight_HierarchicalDoubleRooflineChart                          
nvlink     Nvlink, Nvlink_Tables, Nvlink_Topology                                      no      122              
"""  # noqa: W291
REQUEST = Request(("/bin/train", "--lr", "a b"), nvtx="regex:jfa@.*/", set="fulll")
FINE = UNLOCKED + CONNECTED + UNREADABLE + ONE_KERNEL + DISCONNECTED

STAND_IN = """\
#!{python}
# Replays recorded output of ncu around the command, which runs.
import os, subprocess, sys, time
words = sys.argv[1:]
if words == ["--list-sets"]:
    print({sets!r}, end="")
    sys.exit()
at = words.index("-o") + 1
report, command = words[at].replace("%%", "%"), words[at + 1:]
with open({asked!r}, "w") as file:
    print(*words, sep="\\n", file=file)
code = subprocess.run(command).returncode if {runs} else 0
print({said!r}, end="", flush=True)
if {writes}:
    open(report, "wb").write(b"NVR\\0 a report")
    print(f"==PROF== Report: {{report}}", flush=True)
if code:
    print(f"==ERROR== The application returned an error code ({{code}}).", flush=True)
if {hangs}:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    with open({asked!r} + ".pids", "w") as file:
        print(os.getpid(), child.pid, file=file)
    time.sleep(100)
sys.exit({code} or code)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Put an `ncu` on the PATH that replays ``said``; returns the file where it notes what it was asked."""

    def make(said: str, *, code: int = 0, writes: bool = False, runs: bool = True, hangs: bool = False) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        asked = folder / "asked"
        fields = {"python": sys.executable, "sets": SETS, "asked": str(asked), "said": said, "code": code}
        program = folder / "ncu"
        program.write_text(STAND_IN.format(**fields, writes=writes, runs=runs, hangs=hangs))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return asked

    return make


def lines(said: str) -> list[str]:
    return [line for line in said.splitlines() if line]


def heard(chunks) -> tuple[list[str], bytes]:
    messages: list[str] = []
    rest: list[bytes] = []
    listener = Listener(messages.append, rest.append)
    for chunk in chunks:
        listener.feed(chunk)
    listener.close()
    return messages, b"".join(rest)


def started(pids: Path) -> None:
    """Wait until the stand-in that hangs has noted its processes."""
    deadline = time.monotonic() + 30
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert time.monotonic() < deadline, "the stand-in did not start"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ended(pids_file: Path) -> None:
    pids = [int(word) for word in pids_file.read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


# What ncu is asked.


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("jfa_forward", "regex:jfa@jfa_forward.*/"),
        ("jfa@", "regex:jfa@.*/"),
        ("jfa@jfa_backward", "regex:jfa@jfa_backward.*/"),
        ("train@step 1.5 (warm)", r"regex:train@step 1\.5 \(warm\).*/"),
        ("regex:other@x.*/", "regex:other@x.*/"),
        ("step/", "step/"),
        ("a/*/b]", "a/*/b]"),
        ("none", None),
        (None, None),
    ],
)
def test_names_of_ranges_become_expressions_of_ncus(name, expression):
    assert nvtx_filter(name) == expression


@pytest.mark.parametrize("name", ["", "@x", "a@b@c", "a/b", "a,b"])
def test_what_is_no_range_is_refused(name):
    with pytest.raises(UserError, match="expected a range such as jfa_forward"):
        nvtx_filter(name)


def test_the_command_line(tmp_path):
    request = Request(("python", "-m", "x", "-o", "y"), "regex:jfa@.*/", "basic", "none", ("--launch-count", "2"))
    assert (
        request.words("/opt/ncu", Path("50%i.ncu-rep"))
        == (
            "/opt/ncu --set basic --clock-control none --import-source no --nvtx --nvtx-include regex:jfa@.*/ "
            "--launch-count 2 -f -o 50%%i.ncu-rep python -m x -o y"
        ).split()
    )
    assert "--nvtx" not in Request(("x",)).words("ncu", tmp_path)


def test_options_that_narrow_down():
    assert filters(None, None, None) == []
    assert filters("jfa.*", 0, 3) == ["--kernel-name", "regex:jfa.*", "--launch-skip", "0", "--launch-count", "3"]


# What it said.


def test_kernels_are_counted_by_ncus_lines():
    assert kernels(lines(FINE)) == ["jfa_backward"]
    assert kernels(lines(THREE_KERNELS)) == ["jfa_delta", "jfa_backward", "cudnn_generated_fort_native_s..."]
    assert kernels(lines(NOTHING_MATCHED)) == []
    replayed = ['==PROF== Profiling "a" - 0: Application replay pass 1', '==PROF== Profiling "a" - 0: pass 2']
    assert kernels(replayed) == ["a"]
    assert kernels(lines(ONE_KERNEL_BY_NAME)) == ["jfa_backward"]
    assert kernels(lines(ONE_KERNEL_BY_NAME) * 2) == ["jfa_backward"] * 2


def test_sets_are_the_first_column():
    assert set_names(SETS) == ["basic", "detailed", "full", "nvlink"]
    assert set_names("") == []


@pytest.mark.parametrize(
    ("said", "code", "expected"),
    [
        (FORBIDDEN, 1, r"no permission .*CAP_SYS_ADMIN .*--cap-add=SYS_ADMIN.*NVreg_RestrictProfilingToAdminUsers=0"),
        (SANDBOXED, 9, r"no way to the GPU's counters .*gVisor.*driver older"),
        (TAKEN, 9, r"another profiler holds .*dcgmi profile --pause"),
        (OLD_GPU, 0, r"cannot profile this GPU: `ncu --list-chips`"),
        (OLD_DRIVER, 1, r"driver is older than this ncu: update it"),
        (NOT_A_PROGRAM, 1, r"/bin/train is no program"),
        (NO_METRICS, 0, r"no section set named 'fulll'; known: basic, detailed, full, nvlink"),
        (COMMAND_FAILED, 3, r"the command failed with code 3, .*without ncu: /bin/train --lr 'a b'$"),
        (NOTHING_MATCHED, 0, r"NVTX range that matches regex:jfa@\.\*/; .*nvtx is installed.*--nvtx none"),
        ("==WARNING== No kernels were profiled.\n", 0, r"ran nothing on a GPU"),
        ("==ERROR== unrecognised option '--x'. Use --help for further details.\n", 1, r"code 1 .*unrecognised option"),
        (CONNECTED + "==ERROR== Could not write: No space left on device\n", 1, r"no room left"),
        (CONNECTED, -9, r"killed by SIGKILL .*Connected to process 757"),
        ("", 5, r"code 5 and left no report: it gave no reason"),
    ],
)
def test_each_failure_says_its_remedy_in_one_line(said, code, expected):
    why = explain(REQUEST, code, lines(said), known_sets=lambda: set_names(SETS))
    assert re.search(expected, why) and "\n" not in why


def test_without_a_range_or_with_filters_it_says_so():
    said = lines(NOTHING_MATCHED)
    assert "range" not in explain(Request(("x",)), 0, said)
    assert "with --launch-skip 9" in explain(Request(("x",), extra=("--launch-skip", "9")), 0, said)


def test_a_full_disk_is_named(tmp_path):
    why = explain(REQUEST, 1, lines(FINE), full=[tmp_path])
    assert "no room left" in why and str(tmp_path) in why


# Which bytes are its own words.


@given(st.lists(st.integers(0, 200), max_size=20))
def test_however_the_bytes_come_each_goes_where_it_belongs(cuts):
    target = b"loss 0.3\r50 ==\n== PROF ==\n=\xff="
    stream = b"loss 0.3\r" + ONE_KERNEL.encode() + b"50 ==\n== PROF ==\n" + COMMAND_FAILED.encode() + b"=\xff="
    edges = [0, *sorted(cuts), len(stream)]
    chunks = [stream[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert heard(chunks) == ([ONE_KERNEL.strip(), COMMAND_FAILED.strip()], target)


@given(st.lists(st.binary(max_size=30)))
def test_output_without_messages_goes_through_untouched(chunks):
    messages, rest = heard(chunks)
    if not messages:
        assert rest == b"".join(chunks)


def test_unfinished_lines_do_not_wait_for_their_end():
    passed: list[bytes] = []
    listener = Listener(pytest.fail, passed.append)
    listener.feed(b"epoch 1 = ")
    assert b"".join(passed) == b"epoch 1 = "
    listener.feed(b"==PRO")
    assert b"".join(passed) == b"epoch 1 = "
    listener.feed(b"OF")
    assert b"".join(passed) == b"epoch 1 = ==PROOF"


# Its process, with the stand-in.


def test_a_report_is_collected(stand_in, tmp_path, capfd):
    asked = stand_in(FINE, writes=True)
    report = tmp_path / "50% off.ncu-rep"
    script = "import sys; print('of the target'); print('its error', file=sys.stderr)"
    arguments = ["--set", "basic", "--launch-count", "1", "--nvtx", "jfa_backward"]
    assert main(["ncu-collect", "-o", str(report), *arguments, "--", sys.executable, "-c", script, "--force"]) == 0
    said = capfd.readouterr()
    assert report.read_bytes().startswith(b"NVR")
    assert sorted(path.name for path in tmp_path.iterdir()) == [report.name, "bin"]
    *above, last = said.out.strip().splitlines()
    assert above[0] == "of the target" and not any("==" in line for line in above)
    expected = f"{report}: 1 kernel profiled (jfa_backward 1); look at it: python -m profiling ncu '{report}'"
    assert last == expected
    assert "its error" in said.err and "Report:" not in said.err
    assert ONE_KERNEL in said.err
    words = asked.read_text().splitlines()
    assert words[words.index("--nvtx-include") + 1] == "regex:jfa@jfa_backward.*/"
    assert words[words.index("--clock-control") + 1] == "none"
    assert words[-4:] == [sys.executable, "-c", script, "--force"]


class Seen(Exception):
    """What this test waits for has come."""


def test_messages_come_while_ncu_runs(stand_in, tmp_path):
    """ncu hangs after its last kernel, and is ended by what leaves the listener."""
    asked = stand_in(THREE_KERNELS, hangs=True)
    pids = asked.with_name("asked.pids")
    seen = []

    def on_line(line):
        seen.append(line)
        if len(kernels(seen)) == 3:
            started(pids)
            raise Seen

    with pytest.raises(Seen):
        collect(["true"], output=tmp_path / "a.ncu-rep", on_line=on_line)
    assert kernels(seen) == kernels(lines(THREE_KERNELS))
    assert_ended(pids)


def test_output_comes_while_the_command_runs(stand_in, tmp_path, repository):
    """The command ends only when this test has read its first words."""
    stand_in(FINE, writes=True)
    go = tmp_path / "go"
    script = (
        f"import os, time\nprint('begun', end='', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(.01)"
    )
    command = [sys.executable, "-m", "profiling", "ncu-collect", "-o", tmp_path / "a.ncu-rep"]
    with subprocess.Popen([*command, "--", sys.executable, "-c", script], cwd=repository, stdout=-1, stderr=-1) as run:
        assert run.stdout is not None
        assert os.read(run.stdout.fileno(), 5) == b"begun"
        go.touch()
        out, _ = run.communicate(timeout=60)
    assert run.returncode == 0 and b"1 kernel profiled" in out


def test_python_need_not_be_on_the_path(stand_in, tmp_path, monkeypatch):
    asked = stand_in(FINE, writes=True)
    monkeypatch.setenv("PATH", str(asked.parent))
    collect(["python", "-c", ""], output=tmp_path / "a.ncu-rep")
    assert sys.executable in asked.read_text().splitlines()


def test_a_report_in_the_way_stays_without_force(stand_in, tmp_path, capsys):
    asked = stand_in(FINE, writes=True)
    report = tmp_path / "a.ncu-rep"
    report.write_text("old")
    assert main(["ncu-collect", "-o", str(report), "--", "true"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert report.read_text() == "old" and not asked.exists()
    assert main(["ncu-collect", "-o", str(report), "--force", "--", "true"]) == 0
    assert report.read_bytes().startswith(b"NVR")


def test_a_failure_leaves_the_old_report_and_no_other(stand_in, tmp_path, capsys):
    stand_in(FORBIDDEN, code=1)
    report = tmp_path / "a.ncu-rep"
    report.write_text("old")
    (tmp_path / ".a.part.ncu-rep").write_text("of a run that was killed")
    assert main(["ncu-collect", "-o", str(report), "--force", "--", "true"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ncu: no permission")
    assert report.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ncu-rep", "bin"]


@pytest.mark.parametrize(
    ("said", "code", "expected"),
    [
        (NOTHING_MATCHED, 0, "--nvtx none for every kernel"),
        (NO_METRICS, 0, "no section set named 'fulll'; known: basic, detailed, full, nvlink"),
        (TAKEN, 9, "another profiler holds"),
    ],
)
def test_failures_are_one_line_and_code_2(said, code, expected, stand_in, tmp_path, capsys):
    stand_in(said, code=code)
    assert main(["ncu-collect", "-o", str(tmp_path / "a.ncu-rep"), "--set", "fulll", "--", "true"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ncu: ") and expected in last
    assert not list(tmp_path.glob("*.ncu-rep"))


def test_kernels_profiled_without_a_metric_are_no_report(stand_in, tmp_path, capsys):
    stand_in(NO_METRICS_YET_KERNELS, writes=True)
    assert main(["ncu-collect", "-o", str(tmp_path / "a.ncu-rep"), "--set", "fulll", "--", "true"]) == 2
    assert "no section set named 'fulll'" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.ncu-rep"))


def test_a_command_that_fails_after_its_kernels_keeps_their_report(stand_in, tmp_path, capsys):
    stand_in(FINE, writes=True)
    report = tmp_path / "a.ncu-rep"
    assert main(["ncu-collect", "-o", str(report), "--", sys.executable, "-c", "raise SystemExit(3)"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "failed with code 3" in last and f"profiled until then (kernels: 1) is in {report}" in last
    assert report.exists()


def test_ctrl_c_ends_ncu_and_what_it_started(stand_in, tmp_path, repository):
    asked = stand_in(FINE, writes=True, hangs=True)
    pids = asked.with_name("asked.pids")
    command = [sys.executable, "-m", "profiling", "ncu-collect", "-o", tmp_path / "a.ncu-rep", "--", "true"]
    with subprocess.Popen(command, cwd=repository, stdout=-1, stderr=-1, start_new_session=True) as run:
        started(pids)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=30)
    assert run.returncode == 130 and b"Traceback" not in err
    assert_ended(pids)
    assert not list(tmp_path.glob("*.ncu-rep")) and not list(tmp_path.glob(".*"))


def test_an_ncu_that_hangs_is_ended(stand_in, tmp_path):
    asked = stand_in(CONNECTED, hangs=True)
    with pytest.raises(UserError, match=r"did not end within 1 s .*Connected to process"):
        collect(["true"], output=tmp_path / "a.ncu-rep", timeout_s=1)
    assert_ended(asked.with_name("asked.pids"))


def test_what_the_command_leaves_running_is_not_waited_for(stand_in, tmp_path):
    stand_in(FINE, writes=True)
    began = time.monotonic()
    collect(["sh", "-c", "sleep 20 & echo $! > " + shlex.quote(str(tmp_path / "pid"))], output=tmp_path / "a.ncu-rep")
    assert time.monotonic() - began < 15
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


# What is refused before ncu runs.


def test_no_command(tmp_path, capsys):
    assert main(["ncu-collect", "-o", str(tmp_path / "a.ncu-rep")]) == 2
    said = capsys.readouterr().err
    assert "no command to profile" in said and "-- python -m profiling launch" in said


@pytest.mark.parametrize(
    ("name", "expected"), [("a.txt", "ends in .ncu-rep"), ("nowhere/a.ncu-rep", "there is no folder")]
)
def test_bad_outputs(name, expected, stand_in, tmp_path, capsys):
    asked = stand_in(FINE, writes=True)
    assert main(["ncu-collect", "-o", str(tmp_path / name), "--", "true"]) == 2
    assert expected in capsys.readouterr().err
    with pytest.raises(UserError, match=expected):
        collect(["true"], output=tmp_path / name)
    assert not asked.exists()


def test_ncu_is_sought_and_its_absence_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "find_ncu", lambda: None)  # this machine may have one
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(UserError, match=r"sought in PATH, /usr/local/cuda.*CUDA_HOME.*Install Nsight Compute"):
        find_ncu()
    program = tmp_path / "bin" / "ncu"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_ncu() == str(program)
    assert find_ncu(str(program)) == str(program)
    with pytest.raises(UserError, match="is no program"):
        find_ncu(str(tmp_path))


# The real one.


@pytest.mark.gpu
def test_the_real_ncu_profiles_our_kernel(tmp_path, program, repository):
    if not shutil.which("ncu") and doctor.find_ncu() is None:
        pytest.skip("no ncu")
    report = tmp_path / "tiny.ncu-rep"
    command = [sys.executable, "-m", "profiling", "launch", "--workload", "tiny"]
    result = program("ncu-collect", "--set", "basic", "--kernel", "jfa", "-o", report, "--timeout", 150, "--", *command)
    if "counters" in result.stderr and result.returncode == 2:
        pytest.skip(textwrap.shorten(result.stderr.splitlines()[-1], 200))
    assert result.returncode == 0, result.stderr
    assert re.search(r"1 kernel profiled \(jfa_forward(_hopper)? 1\)", result.stdout)
    assert report.read_bytes().startswith(b"NVR")
