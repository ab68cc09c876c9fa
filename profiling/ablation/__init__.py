"""What each optimisation buys: every switch of a kernel turned off alone, on alone, and one after the other.

`plan` says which variants there are, `child` checks and times them in a process of its own, `run` minds that process
and keeps what it measured, `counters` runs `one_launch` under Nsight Compute, `compiled` asks the compiler and the
replay where there is no GPU, `effects` compares, `report` writes it up, with the `figures` and linked `heatmaps`.
"""
