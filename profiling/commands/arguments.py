"""What several commands take: argument types, and checks that answer in one line before any work is done."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profiling.errors import UserError

if TYPE_CHECKING:
    from jfa.workloads import Workload
    from profiling.recording import Recording

# In the order in which they are shown; jfa.schedule has the same names and needs torch to say so.
SCHEDULES = ("grid", "static", "balanced", "dynamic", "balanced-dynamic")
DIRECTIONS = ("forward", "backward")
LEVELS = ("cta", "tile", "wait")
IMPLEMENTATIONS = ("auto", "triton", "hopper")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
RecordingFile = Annotated[Path, typer.Argument(metavar="FILE", help="A recording, as `record` writes it.")]
Gpu = Annotated[str | None, typer.Option("--gpu", help="On this GPU's number of SMs, such as B200.")]
Sms = Annotated[int | None, typer.Option("--sms", min=1, help="On so many SMs. Default: the recording's.")]
Example = Annotated[
    Path | None,
    typer.Option("--recording", metavar="FILE", help="Whose tile costs to go by. Default: the package's, of an H200."),
]
RecordingFiles = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Recordings, as `record` writes them.")]


def choice(value: str, known: Sequence[str], what: str) -> str:
    """``value`` of the option --``what`` if it is one of ``known``. UserError: the nearest names, or all."""
    if value in known:
        return value
    near = difflib.get_close_matches(value, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise UserError(f"--{what}: there is none named {value!r}; {hint}")


def workload(name: str) -> "Workload":
    """The named workload. UserError: the nearest names, or all."""
    from jfa import workloads

    try:
        return workloads.get(name)
    except ValueError as error:
        raise UserError(str(error)) from error


def sm_count(gpu: str | None, sms: int | None) -> int | None:
    """Of --gpu and --sms; None where neither is given. UserError: both, or a GPU that is not in the table."""
    from profiling import gpus

    if gpu is not None and sms is not None:
        raise UserError("--gpu and --sms: both say how many SMs there are; give one")
    return sms if gpu is None else gpus.sm_count(gpu)


def kernels_sms(sms: int | None, gpu: str | None, recording: "Recording") -> int | None:
    """`sm_count`'s; of a GPU that is named, those that the recorded kernel does not leave to another."""
    return sms if sms is None or gpu is None else max(sms - recording.sms_left, 1)


def numbers(text: str | None, option: str) -> tuple[float, ...]:
    """Numbers between commas; none where the option is not given. UserError: what is not a number."""
    try:
        return tuple(float(part) for part in text.split(",")) if text is not None else ()
    except ValueError as error:
        raise UserError(f"{option} {text!r}: expected numbers between commas, such as 0.1,0.5,1") from error


def example(path: Path | None, direction: str = "forward") -> "Recording":
    """The recording given, or the package's of hsp-loguniform."""
    from profiling import examples
    from profiling.recording import Recording

    return examples.load(direction=direction) if path is None else Recording.read(path)


def read_all(paths: Sequence[Path]) -> list["Recording"]:
    """Every recording, or the error of the first that cannot be read."""
    from profiling.recording import Recording

    return [Recording.read(path) for path in paths]


def output_file(path: Path, suffixes: Sequence[str]) -> Path:
    """``path`` if a file of that kind can be written there. UserError: suffix, folder missing, no permission."""
    if not path.name.endswith(tuple(suffixes)):
        raise UserError(f"-o {path}: expected a name that ends in {' or '.join(suffixes)}")
    if path.is_dir():
        raise UserError(f"-o {path}: is a folder; give a file in it, such as {path / ('out' + suffixes[0])}")
    _writable_folder(path.parent, path)
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"-o {path}: exists and may not be overwritten; change its mode, or give another name")
    return path


def output_folder(path: Path, option: str = "-o") -> Path:
    """``path`` if it is a folder that can be written into, or one can be made there. UserError otherwise."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{option} {path}: is a file; expected a folder, or a name for a new one")
    if path.is_dir():
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"{option} {path}: no permission to write into it; give another folder")
        return path
    _writable_folder(path.parent, path, option)
    return path


def _writable_folder(folder: Path, path: Path, option: str = "-o") -> None:
    if not folder.exists():
        raise UserError(f"{option} {path}: there is no folder {folder}; make it first: mkdir -p {folder}")
    if not folder.is_dir():
        raise UserError(f"{option} {path}: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{option} {path}: no permission to write into {folder}; give another folder")
