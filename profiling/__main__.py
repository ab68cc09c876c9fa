"""``python -m profiling``: the one place where errors become a line on stderr and an exit code."""

import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from profiling.errors import UserError
from profiling.text import plain

FINE, WRONG_INPUT, INTERRUPTED, PIPE_CLOSED = 0, 2, 130, 141
OUTPUT_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# typer has had this exception under two addresses; its BadParameter has always been one of them.
USAGE_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; without arguments, the help."""
    from profiling.commands import application

    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = application()(words or ["--help"], prog_name="python -m profiling", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        return _say(str(error))
    except USAGE_ERROR as error:
        return _say(_usage(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("jfa", "profiling"):
            raise
        return _say(f"this needs {error.name}, which is not installed; `python -m profiling doctor` says what to do")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # rich and typer say the former with the latter, and nothing else
        _silence()
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is not None:
            return _say(f"{error.filename}: {error.strerror}")
        if error.errno not in OUTPUT_FULL:
            raise
        _silence()
        return _say(f"the output could not be written: {error.strerror}; make room, or send it elsewhere")
    return code if isinstance(code, int) else FINE


def _usage(error: Any) -> str:
    """What was wrong with the words of the command line, and where the right ones are."""
    path = error.ctx.command_path if getattr(error, "ctx", None) else "python -m profiling"
    return f"{error.format_message().rstrip('.')}; see {path} --help"


def _say(message: str) -> int:
    print(f"error: {plain(message, 2000)}", file=sys.stderr)
    return WRONG_INPUT


def _silence() -> None:
    """The reader of our output has gone: nothing more goes out, nor does Python complain of it when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
