"""Launches one variant, told by the JSON of its only argument, under its NVTX range: for ncu to measure.

The JSON: workload, device, and setting as `profiling.ablation.run.described` writes it.
"""

from __future__ import annotations

import json
import sys


def main(told: str) -> None:
    """Compile and warm the variant up outside any range, then launch it once."""
    import torch

    from jfa import workloads
    from profiling.ablation.child import setting_of
    from profiling.launching import launch

    request = json.loads(told)
    setting = setting_of(request["setting"])
    launch(
        workloads.get(request["workload"]),
        direction=setting.direction,
        schedule=setting.schedule,
        impl=setting.impl,
        device=torch.device(request["device"]),
        config=setting.config,
        split=setting.split,
    )


if __name__ == "__main__":
    main(sys.argv[1])
