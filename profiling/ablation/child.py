"""The process that compiles, checks and times variants, told by JSON on its stdin; a line of JSON on stdout an event.

It is a process of its own so that a kernel that hangs or faults takes only itself: `profiling.ablation.run` minds it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiling.errors import RecordingError

if TYPE_CHECKING:
    import torch

    from jfa.workloads import Workload
    from profiling.ablation.clocks import Watch
    from profiling.ablation.plan import Setting
    from profiling.launching import Launcher
    from profiling.recording import Recording

WARMUP = 3
WORST_ERROR = 2e-2
"""Relative L2 error against the plain Triton kernel's result from which a variant counts as wrong: both are rounded to
bfloat16, whose step is 0.4 %."""


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    """Check each variant of the request, then time those that are right, in turn."""
    request = json.loads(sys.stdin.readline())
    from jfa import workloads
    from profiling.bench import orders

    workload = workloads.get(request["workload"])
    device = _device(request["device"])
    expected = None
    ready: dict[str, Callable[[], float]] = {}
    for key, described in request["variants"].items():
        say(event="begin", key=key)
        try:
            setting = setting_of(described)
            launcher = launcher_of(workload, setting, device)
            found = launcher.results()
            if expected is None:
                expected = reference_of(workload, setting, device)
            error = worst_error(found, expected)
            if not error <= WORST_ERROR:
                say(event="failed", key=key, why=f"wrong result: relative error {error:.3g} against impl triton")
                continue
            say(event="checked", key=key, error=error, **resources(launcher.launcher))
            ready[key] = launcher.timer()
        except Exception as error:  # whatever a variant raises is its row, not the run's end
            say(event="failed", key=key, why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    for key, take in ready.items():
        say(event="begin", key=key)
        for _ in range(WARMUP):
            take()
    keys, watch = list(ready), _watch(device)
    for number, order in enumerate(orders(len(keys), request["rounds"])):
        for key in (keys[place] for place in order):
            say(event="begin", key=key)
            say(event="sample", key=key, round=number, ms=ready[key]())
        if watch is not None:
            say(event="clocks", round=number, **watch.read())
    for key in request["why"]:
        if key not in ready:
            continue
        say(event="begin", key=key, phase="why")
        try:
            keep = request.get("recordings", {}).get(key)
            reasons = why(workload, setting_of(request["variants"][key]), device, keep)
        except Exception as error:  # its times stand
            reasons = {"no_why": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        say(event="why", key=key, **reasons)
    say(event="end")


def _device(name: str) -> torch.device:
    import torch

    return torch.device(name)


def _watch(device: torch.device) -> Watch | None:
    from profiling.ablation.clocks import Watch

    if device.type != "cuda":
        return None
    import torch

    return Watch.of(str(torch.cuda.get_device_properties(device).uuid))


def setting_of(described: dict[str, Any]) -> Setting:
    """The setting that `profiling.ablation.run.described` wrote down."""
    from jfa import config
    from profiling.ablation.plan import Setting

    fields = dict(described["config"])
    kind = getattr(config, fields.pop("kind"))
    return Setting(described["impl"], described["direction"], kind(**fields), described["schedule"], described["split"])


class Ready:
    """A variant's launcher, its results and its times."""

    def __init__(self, launcher: Launcher, device: torch.device) -> None:
        self.launcher, self._device = launcher, device

    def results(self) -> list[torch.Tensor]:
        """What one launch gave: out and lse, or the three gradients."""
        from jfa.instrument import OFF

        self.launcher.run(OFF)
        return list(self.launcher.results)

    def timer(self) -> Callable[[], float]:
        """Times one launch, ms."""
        from jfa.instrument import OFF

        def run() -> Any:
            return self.launcher.run(OFF)

        if self._device.type == "cuda":
            from profiling.bench import GpuClock

            clock = GpuClock()
            return lambda: clock.time(run)

        def on_the_host() -> float:
            begun = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - begun)

        return on_the_host


def launcher_of(workload: Workload, setting: Setting, device: torch.device) -> Ready:
    from profiling.launching import prepare

    made = prepare(
        workload, setting.schedule, setting.direction, device, setting.impl, config=setting.config, split=setting.split
    )
    return Ready(made, device)


def reference_of(workload: Workload, setting: Setting, device: torch.device) -> list[torch.Tensor]:
    """The result of the plain Triton kernel as pinned."""
    from profiling.launching import prepare

    return Ready(prepare(workload, "static", setting.direction, device, "triton"), device).results()


def worst_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative L2 error of a result; where the expected one is not finite, both must be alike."""
    import torch

    worst = 0.0
    for mine, other in zip(found, expected, strict=True):
        finite = other.isfinite()
        if not torch.equal(mine[~finite], other[~finite]):
            return float("inf")
        difference = torch.where(finite, mine, 0).double() - torch.where(finite, other, 0).double()
        norm = torch.where(finite, other, 0).double().norm()
        error = float(difference.norm() / norm) if norm > 0 else float(difference.norm())
        if not error <= worst:  # NaN is worse than any
            worst = error if error == error else float("inf")
    return worst


def resources(launcher: Launcher) -> dict[str, Any]:
    """What the compiler gave the kernel; nothing where it is interpreted."""
    from jfa.instrument import OFF
    from profiling.record import resources_of

    return {name.removesuffix("_bytes"): value for name, value in resources_of(launcher, OFF).items()}


def why(workload: Workload, setting: Setting, device: torch.device, keep: str | None = None) -> dict[str, Any]:
    """How SM time divides, and of a kernel of roles who waits for what, from a recording of its own.

    ``keep``: the file into which the recording of SM time goes; its name is then in the answer.
    """
    if device.type != "cuda":
        return {}
    from profiling.lost import lost_time
    from profiling.record import record_launcher
    from profiling.sm_time import summary

    launcher = launcher_of(workload, setting, device).launcher
    recording = record_launcher(launcher, workload, device, "tile", 1, 5)
    total = summary(recording).iloc[0]
    split = {part: float(total[f"{part}_share"]) for part in ("work", "ramp", "fetch", "tail", "unused")}
    split["headroom"] = float(total["headroom"])
    found: dict[str, Any] = {"sm_time": split, **(kept(recording, Path(keep)) if keep else {})}
    if launcher.roles != ("cta",):
        try:
            lost = lost_time(record_launcher(launcher, workload, device, "wait", 1, 5))
            found["waits"] = {"work": lost.work, "words": lost.words, "barrier": lost.barrier}
        except RecordingError as error:  # what is known of SM time stays
            found["waits"] = {"words": f"waits not known: {error}"}
    return found


def kept(recording: Recording, path: Path) -> dict[str, Any]:
    """Writes the recording; its name as ``recording``, or why it could not be written, as ``no_recording``."""
    try:
        recording.write(path)
    except RecordingError as error:
        return {"no_recording": " ".join(str(error).split())[:300]}
    return {"recording": path.name}


if __name__ == "__main__":
    main()
