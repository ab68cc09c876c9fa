"""``doctor``: what works on this machine."""

from dataclasses import asdict

from profiling.commands import printing
from profiling.commands.arguments import Json
from profiling.commands.printing import Column
from profiling.text import count

COLUMNS = [
    Column("status", "", right=False),
    Column("name", "check", right=False),
    Column("found", "found", right=False),
    Column("fix", "what to do", right=False),
]


def doctor(json: Json = False) -> int:
    """Say what works on this machine, and how to mend what does not.

    A warning is what is not there (a base install has neither torch nor a GPU, and reads recordings all the same); a
    failure is what gives wrong results or stops what the machine could do: then the exit code is 1. Note that
    Python 3.15's standard library has a `profiling` package of its own, so 3.11 to 3.14 are supported.

    \b
    Examples:
      python -m profiling doctor
      python -m profiling doctor --json
    """
    from profiling.doctor import examine

    with printing.progress() as bar:
        task = bar.add_task("", total=None)
        checks = examine(lambda name: bar.update(task, description=name))
    failed = [check.name for check in checks if check.status == "fail"]
    rows = [asdict(check) for check in checks]
    if json:
        printing.document({"checks": rows, "failed": failed})
    else:
        warned = sum(check.status == "warn" for check in checks)
        verdict = f"{len(failed)} failed, {count(warned, 'warning')}, {len(checks) - warned - len(failed)} fine"
        printing.table(rows, COLUMNS, title="What works on this machine", grade=verdict)
    return 1 if failed else 0
