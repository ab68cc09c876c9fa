"""``ablate``: what each optimisation buys."""

import json as jsonlib
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from profiling.commands import arguments, printing
from profiling.commands.bench import INTERRUPTED
from profiling.errors import UserError

if TYPE_CHECKING:
    from profiling.ablation.plan import Plan
    from profiling.recording import Recording

RUN = "run.json"
ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120)


def ablate(
    workload: Annotated[str, typer.Option("--workload", help="A named workload, such as hsp-loguniform.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The report's folder.")],
    direction: Annotated[str, typer.Option(help=" or ".join(arguments.DIRECTIONS))] = "forward",
    impl: Annotated[str, typer.Option(help=" or ".join(arguments.IMPLEMENTATIONS))] = "auto",
    switches: Annotated[
        list[str] | None, typer.Option("--switches", help="Only this one; may be given again. Default: all.")
    ] = None,
    start: Annotated[
        list[str] | None,
        typer.Option(
            "--from", metavar="NAME=VALUE", help="Full, but for this; may be given again. Default: as pinned."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Rounds; in each, every configuration is timed once.")] = 30,
    arch: Annotated[int, typer.Option(help="Without a GPU: compile for sm_ARCH.")] = 90,
    why: Annotated[bool, typer.Option("--why/--no-why", help="Record SM time and waits of each too.")] = True,
    ncu: Annotated[
        bool, typer.Option("--ncu", help="Measure a launch of each with Nsight Compute too, after the rounds.")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="Only compile, GPU or not.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in the folder.")] = False,
    json: arguments.Json = False,
) -> int:
    """Say what each optimisation buys, and how sure that is.

    Of the full configuration (the pinned one, or what --from makes of it) each switch otherwise alone, of the plain one
    each alone, and the ladder from the one to the other, timed in turn in one process. A configuration that does not
    compile, hangs, faults or gives a wrong result is a row that says so. Recordings stay in the folder, and the page
    shows them as linked heatmaps. With --ncu each is launched once more under Nsight Compute, after the rounds. Without
    a GPU every configuration is compiled, and schedules are replayed where a recording of that kernel and workload
    comes along.

    \b
    Examples:
      python -m profiling ablate --workload hsp-loguniform -o ablation
      python -m profiling ablate --workload hsp-extreme --direction backward --switches schedule -o extreme --resume
      python -m profiling ablate --workload hsp-half-empty --ncu -o half-empty
      python -m profiling ablate --workload dense-1024 --direction backward --from stages=2 --switches prefetch -o two
    """
    from profiling.ablation import results
    from profiling.ablation.plan import begun_from, can_stay_in_registers, full_setting, make_plan
    from profiling.ablation.report import tables, write_report

    arguments.choice(direction, arguments.DIRECTIONS, "direction")
    arguments.choice(impl, arguments.IMPLEMENTATIONS, "impl")
    work = arguments.workload(workload)
    if resume and force:
        raise UserError("--resume and --force: one goes on, the other begins anew; give one")
    if find_spec("torch") is None or find_spec("triton") is None:
        raise UserError(
            "ablate compiles kernels and needs torch and Triton, which are not installed here: make install"
        )
    device, capability = _device(compiled, arch)
    if ncu:
        _require_ncu(device)
    kernel = _kernel(impl, capability)
    resident = kernel == "hopper" and direction == "backward" and can_stay_in_registers(work)
    full = begun_from(full_setting(kernel, direction, capability, work.head_dim, 2, resident), start or (), resident)
    plan = make_plan(full, switches or ())
    told = [f"--from {words}" for words in start or ()]
    told += [f"--switches {name}" for name in switches or ()] + ([] if why else ["--no-why"])
    told += ["--ncu"] if ncu else []
    told += [f"--repeats {repeats}"] if device == "cuda" else ["--compiled", f"--arch {arch}"]
    about = f"--workload {workload} --direction {direction} --impl {kernel}"
    command = " ".join(["python -m profiling ablate", about, *told, f"-o {output}"])
    _claim(output, plan, workload, device, resume, force)
    measured, facts, modelled, replays = None, {}, {}, {}
    environment: dict[str, Any] = {"command": command, "arch": f"sm_{capability[0]}{capability[1]}"}
    with printing.progress() as bar:
        task = bar.add_task("configurations", total=None)
        if device == "cuda":
            from profiling.ablation.counters import count
            from profiling.ablation.run import measure

            environment |= _environment()
            measured = measure(
                workload,
                plan,
                output,
                rounds=repeats,
                why=why,
                count=count if ncu else None,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        else:
            from profiling.ablation.compiled import compile_setting, modelled_ms, modelled_recordings

            settings = plan.settings()
            for done, (key, setting) in enumerate(settings.items()):
                bar.update(task, completed=done, total=len(settings))
                facts[key] = compile_setting(setting, work, 10 * capability[0] + capability[1])
            modelled = modelled_ms(plan, work)
            replays = _keep(modelled_recordings(plan, work), plan, output)
    document = results.assemble(plan, workload, measured, facts, modelled, environment, replays)
    page = write_report(document, output, measured)
    if json:
        printing.document(document)
    else:
        for table in tables(document)[1:]:
            printing.words(table)
        printing.line(f"report: {page}")
    return INTERRUPTED if document["interrupted"] else 0


def _device(compiled: bool, arch: int) -> tuple[str, tuple[int, int]]:
    import torch

    if torch.cuda.is_available() and not compiled:
        return "cuda", torch.cuda.get_device_capability()
    if arch not in ARCHITECTURES:
        known = ", ".join(map(str, ARCHITECTURES))
        raise UserError(f"--arch {arch}: expected one that the kernels are compiled for: {known}")
    return "none", divmod(arch, 10)


def _require_ncu(device: str) -> None:
    from profiling.ablation.counters import require

    if device != "cuda":
        raise UserError("--ncu: measures on a GPU, and nothing is run on one here; leave it out")
    require()


def _keep(recordings: "Mapping[str, Recording]", plan: "Plan", folder: Path) -> dict[str, str]:
    """Write recordings, by key, into the folder; their files' names by key."""
    from profiling.ablation.run import RECORDINGS, recording_names

    names = {key: name for key, name in recording_names(plan).items() if key in recordings}
    for key, name in names.items():
        (folder / RECORDINGS).mkdir(exist_ok=True)
        recordings[key].write(folder / RECORDINGS / name)
    return names


def _kernel(impl: str, capability: tuple[int, int]) -> str:
    from jfa.impl import choice

    if impl == "hopper" and capability[0] != 9:
        raise UserError(f"--impl hopper: is for sm_90, this is sm_{capability[0]}{capability[1]}; pass --impl triton")
    if impl == "hopper" and not choice.has_tlx():
        raise UserError("--impl hopper: needs a Triton with TLX (fbtriton), this one has none; pass --impl triton")
    if impl != "auto":
        return impl
    return "hopper" if capability[0] == 9 and choice.has_tlx() else "triton"


def _run_of(mark: Path) -> Any:
    try:
        return jsonlib.loads(mark.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{mark}: is no JSON ({error}); give --force, which begins anew") from None


def _environment() -> dict[str, Any]:
    import torch

    from profiling.versions import versions

    return {"gpu": torch.cuda.get_device_name(), **versions()}


def _not_a_run(folder: Path, entries: list[str]) -> str:
    """Why a folder without a run's mark is not taken: it is kept results, or holds what is another's."""
    from profiling.ablation.report import MARKDOWN, PAGE
    from profiling.ablation.results import RESULTS, SAMPLES, is_there
    from profiling.ablation.run import PROGRESS, RECORDINGS
    from profiling.page import PLOTLY_FILE

    results = is_there(folder)
    own = {RESULTS, SAMPLES, MARKDOWN, PAGE, PLOTLY_FILE, PROGRESS, RECORDINGS} if results else set()
    if foreign := sorted(set(entries) - own):
        return f"-o {folder}: holds {foreign[0]}, which no ablation made; give a new or empty folder"
    return (
        f"-o {folder}: holds an ablation's results but not its {RUN}: it can be neither resumed nor replaced; give a "
        "new folder"
    )


def _claim(folder: Path, plan: "Plan", workload: str, device: str, resume: bool, force: bool) -> None:
    """Take the folder: new or empty, or of the same run with --resume, or of any run with --force."""
    from profiling.ablation.run import PROGRESS, described
    from profiling.page import write

    arguments.output_folder(folder)
    settings = {key: described(setting) for key, setting in plan.settings().items()}
    asked = {"tool": "ablate", "workload": workload, "device": device, "variants": settings}
    mark = folder / RUN
    entries = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    if entries and not mark.exists():
        raise UserError(_not_a_run(folder, entries))
    if entries and force:
        shutil.rmtree(folder)
    elif entries and resume:
        if _run_of(mark) != jsonlib.loads(jsonlib.dumps(asked)):
            raise UserError(f"-o {folder}: holds another run (other switches, workload or kernel); give a new folder")
    elif entries:
        found = (folder / PROGRESS).exists()
        hint = "--resume to go on with it, or --force to replace it" if found else "--force to replace it"
        raise UserError(f"-o {folder}: holds a run already; give {hint}")
    folder.mkdir(parents=True, exist_ok=True)
    write(mark, jsonlib.dumps(asked, indent=1) + "\n")
