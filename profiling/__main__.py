"""``python -m profiling``: the one place where errors become a line on stderr and an exit code."""

import os
import sys
from collections.abc import Sequence

import typer

from profiling.errors import UserError
from profiling.text import plain

FINE, WRONG_INPUT, INTERRUPTED, PIPE_CLOSED = 0, 2, 130, 141
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
        return _say(error.format_message())  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # rich and typer say the former with the latter, and nothing else
        _silence()
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is None:
            raise
        return _say(f"{error.filename}: {error.strerror}")
    return code if isinstance(code, int) else FINE


def _say(message: str) -> int:
    print(f"error: {plain(message, 2000)}", file=sys.stderr)
    return WRONG_INPUT


def _silence() -> None:
    """The reader of our output has gone: nothing more goes out, nor does Python complain of it when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
