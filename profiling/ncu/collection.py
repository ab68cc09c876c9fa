"""Run Nsight Compute's ``ncu`` on a command and bring back its report, or one line that says why there is none.

What it is asked (`Request`), what it said (`kernels`, `explain`) and which of its process's bytes are its own words
(`Listener`) are told without running it; `collect` runs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiling.errors import UserError
from profiling.text import plain

SUFFIX = ".ncu-rep"
ALL_OF_OURS = "jfa@"
EXAMPLE = "python -m profiling ncu-collect -o a.ncu-rep -- python -m profiling launch --workload hsp-loguniform"

PLACES = "PATH, /usr/local/cuda*/bin, /opt/nvidia/nsight-compute/*, CUDA_HOME/bin"
MESSAGE = re.compile(rb"==(?:PROF|WARNING|ERROR)== ")
BEGINNINGS = tuple(b"==%s== " % word for word in (b"PROF", b"WARNING", b"ERROR"))
KERNEL = re.compile(r'==PROF== Profiling "(.*)"(?: - (\d+))?(?: \(\d+/\d+\))?: (.*)')
NO_SUCH_SET = "No metrics to collect found in sections"
NOT_PLAIN = "/,[]"  # ncu's operators on ranges
POLL_S, GRACE_S = 0.2, 5.0
ROOM_BYTES = 2**20

# What ncu says, and what to do about it; in this order, for an earlier one brings the later ones about.
REMEDIES = (
    (
        r"ERR_NVGPUCTRPERM",
        "no permission to read the GPU's counters: run as root or with CAP_SYS_ADMIN (in a container: "
        "--cap-add=SYS_ADMIN), or open them to all: echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' > "
        "/etc/modprobe.d/nvidia-profiling.conf, and reboot",
    ),
    (
        r"driver resource was unavailable",
        "another profiler holds the GPU's counters: end it, or pause DCGM: dcgmi profile --pause (and --resume after)",
    ),
    (
        r"LibraryNotLoaded|Failed to initialize the profiler",
        "no way to the GPU's counters from here: a sandbox (gVisor has none), or a driver older than this ncu; run on "
        "the machine itself or in a container with --cap-add=SYS_ADMIN, or use an ncu of the driver's CUDA version "
        "(nvidia-smi says which)",
    ),
    (
        r"(?i)driver is not compatible|Failed to load Nsight Compute CUDA modules",
        "the driver is older than this ncu: update it, or use an ncu of its CUDA version (nvidia-smi says which)",
    ),
    (
        r"(?i)Profiling is not supported on device|device (is )?not supported",
        "this ncu cannot profile this GPU: `ncu --list-chips` has those it can; install another version",
    ),
    (
        r"nsight-compute-lock",
        "ncu's lock file belongs to another user: remove it, or set TMPDIR to a folder of your own",
    ),
)


@dataclass(frozen=True)
class Request:
    """What ncu is asked. ``nvtx`` is an expression of ncu's, or None for kernels in any range or none."""

    command: tuple[str, ...]
    nvtx: str | None = None
    set: str = "full"
    clock_control: str = "none"
    extra: tuple[str, ...] = ()

    def words(self, ncu: str, report: Path) -> list[str]:
        """ncu's command line. In the name of a report % begins a macro of ncu's: %% is one %."""
        words = [ncu, "--set", self.set, "--clock-control", self.clock_control, "--import-source", "no"]
        if self.nvtx is not None:
            words += ["--nvtx", "--nvtx-include", self.nvtx]
        return [*words, *self.extra, "-f", "-o", str(report).replace("%", "%%"), *self.command]


class Listener:
    """Tells ncu's own messages from the target's output in one stream of bytes that both write to.

    ``hear`` gets each message of ncu's, a line; ``forward`` the rest, as it comes and byte for byte. A message that
    follows an unfinished line of the target's is found too.
    """

    def __init__(self, hear: Callable[[str], Any], forward: Callable[[bytes], Any]) -> None:
        self._hear, self._forward, self._held = hear, forward, b""

    def feed(self, data: bytes) -> None:
        *lines, last = (self._held + data).split(b"\n")
        for line in lines:
            self._line(line, b"\n")
        found = MESSAGE.search(last)
        keep = found.start() if found else _possible_beginning(last)
        self._pass(last[:keep])
        self._held = last[keep:]

    def close(self) -> None:
        """The stream has ended: what was held back, for it could have become a message, goes out."""
        self._line(self._held, b"")
        self._held = b""

    def _line(self, line: bytes, end: bytes) -> None:
        found = MESSAGE.search(line)
        if found is None:
            self._pass(line + end)
        else:
            self._pass(line[: found.start()])
            self._hear(line[found.start() :].decode(errors="replace").strip())

    def _pass(self, data: bytes) -> None:
        if data:
            self._forward(data)


def collect(
    command: Sequence[str],
    *,
    output: Path,
    nvtx: str | None = ALL_OF_OURS,
    set: str = "full",
    clock_control: str = "none",
    extra: Sequence[str] = (),
    force: bool = False,
    ncu: str | None = None,
    on_line: Callable[[str], Any] | None = None,
    on_output: Callable[[bytes], Any] | None = None,
    timeout_s: float | None = None,
) -> Path:
    """Run ``command`` under ncu and return ``output``, the report; it takes its place when it is whole.

    ``nvtx`` says which launches, as `nvtx_filter` reads it; ``extra`` are further options of ncu's. The GPU's clocks
    are left as they are: ncu's own default, base, makes kernels slower than they run in production. ``on_line`` gets
    each message of ncu's; what the command writes goes to ``on_output``, as it comes, or through to this process's
    stdout and stderr where that is None; it gets no input. `python` that is not on the PATH is the Python that runs
    this.

    Raises:
        UserError: no ncu, a file in the way without ``force``, no kernel profiled, a failure of the command or of ncu,
            or more than ``timeout_s`` seconds. A report that ncu finished all the same is kept, and the line says so.
    """
    output = Path(output)
    request = Request(_found(command), nvtx_filter(nvtx), set, clock_control, tuple(extra))
    _check_output(output, force)
    program = find_ncu(ncu)
    part = output.with_name(f".{output.name.removesuffix(SUFFIX)}.part{SUFFIX}")
    part.unlink(missing_ok=True)  # left by a process that was killed
    try:
        code, said = _run(request.words(program, part), on_line, on_output, timeout_s)
        written = part.is_file() and part.stat().st_size > 0
        useless = any(NO_SUCH_SET in line for line in said)  # ncu goes on, and measures nothing
        if code == 0 and written and not useless:
            part.replace(output)
            return output
        why = explain(request, code, said, known_sets=lambda: set_names(_listing(program)), full=_full(output.parent))
        if written and not useless and any("==PROF== Report:" in line for line in said):
            part.replace(output)
            why += f"; what was profiled until then (kernels: {len(kernels(said))}) is in {output}"
        raise UserError(why)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def nvtx_filter(name: str | None) -> str | None:
    """ncu's expression for push/pop ranges: of ``domain@range``, ``domain@`` (all of it), or ``range`` (domain jfa).

    A name stands for all ranges that begin with it. What contains ``regex:``, or ends with ``/`` or ``]``, is such an
    expression already. None and ``none``: no filter. UserError: a name that is neither.
    """
    if name is None or name == "none":
        return None
    if "regex:" in name or name.endswith(("/", "]")):
        return name
    domain, at, start = name.rpartition("@")
    if (at and not domain) or "@" in domain or not name or any(c in name for c in NOT_PLAIN):
        raise UserError(
            f"--nvtx {name}: expected a range such as jfa_forward, domain@range, none, or an expression of ncu's such "
            "as 'regex:jfa@jfa_forward.*/', or 'step/' for a range without a domain"
        )
    return f"regex:{_literal(domain or 'jfa')}@{_literal(start)}.*/"


def find_ncu(given: str | None = None) -> str:
    """Path of ncu: ``given``, or the one on the PATH, in a CUDA toolkit or in its own folder. UserError: none there."""
    from profiling.doctor import find_ncu as installed

    if given is not None:
        if found := shutil.which(given):
            return found
        raise UserError(f"ncu {given}: is no program that can be run; expected the path of Nsight Compute's ncu")
    home = os.environ.get("CUDA_HOME")
    found = installed() or (shutil.which(f"{home}/bin/ncu") if home else None)
    if found is None:
        raise UserError(
            f"ncu was not found; sought in {PLACES}. Install Nsight Compute (apt-get install nsight-compute, from "
            "NVIDIA's CUDA repository, or https://developer.nvidia.com/nsight-compute) or put its folder on the PATH"
        )
    return found


def kernels(said: Sequence[str]) -> list[str]:
    """Names of the kernels profiled, as ncu shortens them, in its order; a kernel replayed again counts once.

    With --kernel-name ncu numbers no kernel: then each line is one, unless it tells of another pass over the program.
    """
    found: dict[object, str] = {}
    for place, line in enumerate(said):
        if match := KERNEL.match(line):
            again = match[1] if "replay pass" in match[3] else place
            found[match[2] or again] = match[1]
    return list(found.values())


def set_names(listing: str) -> list[str]:
    """The section sets in what ``ncu --list-sets`` prints: the first column of its table."""
    _, _, rows = listing.partition("\n----------")
    return [line.split()[0] for line in rows.splitlines()[1:] if line[:1].isalnum()]


def explain(
    request: Request,
    code: int,
    said: Sequence[str],
    *,
    known_sets: Callable[[], Sequence[str]] = tuple,
    full: Sequence[Path] = (),
) -> str:
    """Why there is no good report, and what to do, in one line. ``full``: folders of ncu's without room left."""
    words = "\n".join(said)
    for pattern, remedy in REMEDIES:
        if re.search(pattern, words):
            return f"ncu: {remedy}"
    target = shlex.join(request.command)
    if "does not exist or is not an executable" in words:
        return f"ncu: {request.command[0]} is no program that can be run; check its spelling, or give its whole path"
    if NO_SUCH_SET in words:
        known = ", ".join(known_sets()) or "see ncu --list-sets"
        return f"ncu: there is no section set named {request.set!r}; known: {known}"
    if full or "No space left on device" in words:
        where = " and ".join(map(str, full)) or "the disk"
        return f"ncu: no room left for its files in {where}; make room, or give -o (or TMPDIR) another folder"
    if match := re.search(r"The application returned an error code \((-?\d+)\)", words):
        return f"the command failed with code {match[1]}, what it said is above; try it without ncu: {target}"
    if "No kernels were profiled" in words:
        return f"ncu: no kernel was profiled: {_why_no_kernel(request, words)}"
    errors = [line.removeprefix("==ERROR== ") for line in said if line.startswith("==ERROR== ")]
    if code < 0:
        return f"ncu was killed by {signal.Signals(-code).name} (out of memory?); its last word: {plain(said[-1:])}"
    return f"ncu ended with code {code} and left no report: {plain(' '.join(errors) or 'it gave no reason', 600)}"


def of_the_machine(why: str) -> bool:
    """Whether a line of `explain` tells what keeps ncu from every kernel here: permission, driver, another profiler."""
    return any(why == f"ncu: {remedy}" for _, remedy in REMEDIES)


def _why_no_kernel(request: Request, words: str) -> str:
    if "Connected to process" not in words:
        return f"the command ran nothing on a GPU (no CUDA call was seen): {shlex.join(request.command)}"
    narrowed = f", with {shlex.join(request.extra)}" if request.extra else ""
    if request.nvtx is None:
        return f"the command launched no kernel that was asked for{narrowed}"
    return (
        f"none was launched in an NVTX range that matches {request.nvtx}{narrowed}; the command itself must push the "
        "range (our kernels do, in domain jfa, where the package nvtx is installed), and start/end ranges do not "
        "count: give another --nvtx, or --nvtx none for every kernel"
    )


def _run(
    words: Sequence[str],
    on_line: Callable[[str], Any] | None,
    on_output: Callable[[bytes], Any] | None,
    timeout_s: float | None,
) -> tuple[int, list[str]]:
    """ncu's exit code and its messages."""
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        if on_line is not None:
            on_line(line)

    with process_group(words) as process:
        listeners = {
            process.stdout: Listener(hear, on_output or (lambda data: _forward(sys.stdout, data))),
            process.stderr: Listener(hear, on_output or (lambda data: _forward(sys.stderr, data))),
        }
        try:
            _listen(process, listeners, timeout_s)
        except subprocess.TimeoutExpired:
            last = plain(said[-1]) if said else "it had said nothing"
            raise UserError(
                f"ncu did not end within {timeout_s:g} s and was stopped; its last word: {last}; give it longer, or "
                "ask for less (--set basic, --launch-count 1)"
            ) from None
        return process.returncode, said


def _listen(process: subprocess.Popen[bytes], listeners: dict[Any, Listener], timeout_s: float | None) -> None:
    """Hand each stream's bytes to its listener until ncu has ended. TimeoutExpired after ``timeout_s``."""
    end = time.monotonic() + timeout_s if timeout_s is not None else None
    with selectors.DefaultSelector() as ready:
        for stream in listeners:
            ready.register(stream, selectors.EVENT_READ)
        while ready.get_map():
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(process.args, timeout_s or 0)
            events = ready.select(POLL_S)
            for key, _ in events:
                if data := os.read(key.fd, 65536):
                    listeners[key.fileobj].feed(data)
                else:
                    ready.unregister(key.fileobj)
            if not events and process.poll() is not None:
                break  # what the command left running holds the streams open, and may for ever
    for listener in listeners.values():
        listener.close()
    process.wait(None if end is None else max(0.0, end - time.monotonic()))


@contextmanager
def process_group(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """ncu and what it starts, in a process group of their own that ends when the block is left by an exception.

    Ctrl-C so reaches this process alone. No input: a group in the background that reads a terminal is stopped.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, process_group=0)
    except OSError as error:
        raise UserError(f"ncu {words[0]}: could not be started: {error.strerror}; reinstall Nsight Compute") from None
    try:
        yield process
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _forward(stream: Any, data: bytes) -> None:
    """Bytes into a text stream; those of a notebook take text only."""
    raw = getattr(stream, "buffer", None)
    if raw is None:
        stream.write(data.decode(errors="replace"))
    else:
        stream.flush()
        raw.write(data)
    stream.flush()


def _possible_beginning(line: bytes) -> int:
    """Where the end of an unfinished line could be the beginning of a message; its length if nowhere."""
    longest = max(map(len, BEGINNINGS))
    for start in range(max(0, len(line) - longest), len(line)):
        if any(beginning.startswith(line[start:]) for beginning in BEGINNINGS):
            return start
    return len(line)


def _literal(name: str) -> str:
    """A name in ncu's regular expressions; re.escape escapes more, which they may not know."""
    return re.sub(r"([.^$*+?(){}|\\])", r"\\\1", name)


def _found(command: Sequence[str]) -> tuple[str, ...]:
    """The command with its program's path, where the PATH has it."""
    if not command:
        raise UserError(f"ncu-collect: there is no command to profile; give one after --, such as: {EXAMPLE}")
    program, *arguments = command
    path = shutil.which(program)
    if path is None and program in ("python", "python3"):
        path = sys.executable
    return (path or program, *arguments)


def _check_output(output: Path, force: bool) -> None:
    if not output.name.endswith(SUFFIX) or output.name == SUFFIX:
        raise UserError(f"-o {output}: expected a name that ends in {SUFFIX}")
    if not output.parent.is_dir():
        raise UserError(f"-o {output}: there is no folder {output.parent}; make it first: mkdir -p {output.parent}")
    if output.exists() and not force:
        raise UserError(f"-o {output}: exists already; give another name, or --force to replace it")


def _full(folder: Path) -> list[Path]:
    """Of the report's folder and ncu's temporary one, those without room."""
    return [place for place in (folder, Path(tempfile.gettempdir())) if shutil.disk_usage(place).free < ROOM_BYTES]


def _listing(ncu: str) -> str:
    """What ``ncu --list-sets`` prints; nothing where it fails."""
    try:
        return subprocess.run([ncu, "--list-sets"], capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
