"""Our kernels compiled for a GPU that is not there, and what the compiler made of them. Needs fbtriton, no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jfa import toolchain
from jfa.config import BackwardConfig, ForwardConfig, HopperBackwardConfig, HopperForwardConfig, HopperResidentConfig
from jfa.impl.hopper import left_out
from jfa.impl.triton import backward, forward


@dataclass(frozen=True)
class Compiled:
    """SASS and PTX; registers a thread, stack frame and shared memory in bytes, tensor memory in columns."""

    sass: str
    registers: int
    stack: int
    shared: int
    tensor_memory: int
    ptx: str


def compile_kernel(
    fn: Any, signature: dict[str, Any], constants: dict[str, Any], arch: int, **options: Any
) -> Compiled:
    """Compile a jitted function for ``sm_<arch>``; arguments without a type in ``signature`` are constants."""
    toolchain.prefer_packaged_ptxas()
    full = {name: signature.get(name, "constexpr") for name in fn.arg_names}
    position = fn.arg_names.index
    # torch aligns what it allocates, and a launch compiles for that.
    aligned = [name for name, kind in signature.items() if str(kind).startswith("*")]
    source = ASTSource(
        fn,
        full,
        constexprs={(position(name),): value for name, value in constants.items()},
        attrs={(position(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    with warnings.catch_warnings():
        # A launcher for a descriptor without hardware is not made; nothing is launched here.
        warnings.filterwarnings("ignore", message="Unknown Triton type")
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(cubin))
        sass = _tool("cuobjdump", "-sass", str(cubin))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    tensor_memory = getattr(kernel.metadata, "tmem_size", None) or 0
    return Compiled(sass, int(found[1]), int(found[2]), kernel.metadata.shared, tensor_memory, kernel.asm["ptx"])


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


def _descriptor(block: int, dim: int, kind: str = "bf16") -> str:
    return f"tensordesc<{kind}[{block}, {dim}]>"


def compile_forward(
    config: ForwardConfig,
    arch: int = 90,
    *,
    dim: int = 128,
    deal: int = 3,
    level: int = 0,
    broadcast: bool = True,
    causal: bool = False,
    jitted: Any = None,
) -> Compiled:
    """The forward as the op launches it, for bfloat16."""
    signature = {
        "q_desc": _descriptor(config.block_q, dim),
        "k_desc": _descriptor(config.block_kv, dim),
        "v_desc": _descriptor(config.block_kv, dim),
        "out": "*bf16",
        "lse": "*fp32",
        **dict.fromkeys(("kv_offsets", "pairs", "counts", "counter"), "*i32"),
        **dict.fromkeys(("batch_count", "heads", "q_uniform", "total_q", "before", "after", "capacity"), "i32"),
        "score_scale": "fp32",
    }
    constants: dict[str, Any] = {
        "group": 1,
        "BROADCAST_Q": broadcast,
        "HAS_BEFORE": False,
        "HAS_AFTER": causal,
        "BLOCK_Q": config.block_q,
        "BLOCK_KV": config.block_kv,
        "DIM": dim,
        "STAGES": config.num_stages,
        "PEEL": config.peel,
        "DEAL": deal,
        "PRECISION": "tf32",
        "LEVEL": level,
    }
    _optional(signature, constants, broadcast, level)
    return compile_kernel(jitted or forward.jfa_forward, signature, constants, arch, num_warps=config.num_warps)


def compile_backward(
    config: BackwardConfig,
    arch: int = 90,
    *,
    dim: int = 128,
    deal: int = 3,
    level: int = 0,
    broadcast: bool = True,
    causal: bool = False,
    jitted: Any = None,
) -> Compiled:
    """The backward as the op launches it, for bfloat16."""
    signature: dict[str, Any] = {
        "q_desc": _descriptor(config.block_q, dim),
        "k_desc": _descriptor(config.block_kv, dim),
        "v_desc": _descriptor(config.block_kv, dim),
        "do_desc": _descriptor(config.block_q, dim),
        "dq": _descriptor(config.block_q, dim, "fp32") if config.reduce == "tma" else ("*fp32", "i32"),
        **dict.fromkeys(("dk", "dv"), "*bf16"),
        **dict.fromkeys(("lse", "delta"), "*fp32"),
        **dict.fromkeys(("kv_offsets", "pairs", "counts", "counter"), "*i32"),
        **dict.fromkeys(
            ("batch_count", "heads_kv", "q_uniform", "total_q", "total_kv", "before", "after", "capacity"), "i32"
        ),
        **dict.fromkeys(("score_scale", "scale"), "fp32"),
    }
    constants: dict[str, Any] = {
        "group": 1,
        "BROADCAST_Q": broadcast,
        "HAS_BEFORE": causal,
        "HAS_AFTER": False,
        "BLOCK_Q": config.block_q,
        "BLOCK_KV": config.block_kv,
        "DIM": dim,
        "STAGES": config.num_stages,
        "DEAL": deal,
        "PRECISION": "tf32",
        "REDUCE": config.reduce,
        "LEVEL": level,
    }
    _optional(signature, constants, broadcast, level)
    return compile_kernel(jitted or backward.jfa_backward, signature, constants, arch, num_warps=config.num_warps)


def compile_dq(
    config: BackwardConfig,
    arch: int = 90,
    *,
    dim: int = 128,
    level: int = 0,
    broadcast: bool = True,
    causal: bool = False,
) -> Compiled:
    """dQ in a fixed order as the op launches it, for bfloat16; it has no recorder, whatever the ``level``."""
    from jfa.impl.triton import dq

    signature: dict[str, Any] = {
        "q_desc": _descriptor(config.block_q, dim),
        "k_desc": _descriptor(config.block_kv, dim),
        "v_desc": _descriptor(config.block_kv, dim),
        "do_desc": _descriptor(config.block_q, dim),
        "partial" if broadcast else "grad_q": "*fp32" if broadcast else "*bf16",
        **dict.fromkeys(("lse", "delta"), "*fp32"),
        **dict.fromkeys(("q_offsets", "kv_offsets", "pairs", "counts"), "*i32"),
        **dict.fromkeys(("batch_count", "heads", "q_len", "total_q", "before", "after"), "i32"),
        **dict.fromkeys(("score_scale", "scale"), "fp32"),
    }
    constants: dict[str, Any] = {
        "group": 1,
        "HAS_BEFORE": False,
        "HAS_AFTER": causal,
        "BLOCK_Q": config.block_q,
        "BLOCK_KV": config.block_kv,
        "DIM": dim,
        "STAGES": config.num_stages,
        "PRECISION": "tf32",
    }
    kernel = dq.jfa_dq_shared if broadcast else dq.jfa_dq
    own = {name: kind for name, kind in signature.items() if name in kernel.arg_names}
    return compile_kernel(kernel, own, constants, arch, num_warps=config.num_warps)


def compile_hopper_forward(
    config: HopperForwardConfig,
    arch: int = 90,
    *,
    dim: int = 128,
    deal: int = 3,
    level: int = 0,
    broadcast: bool = True,
    causal: bool = False,
    window: bool = False,
    split: bool = False,
    kind: str = "bf16",
    leave_out: str = "",
    cluster: int = 1,
) -> Compiled:
    """The forward for sm_90 as the op launches it; ``cluster``: CTAs that load keys together."""
    from jfa.impl.hopper.forward import jfa_forward_hopper
    from jfa.impl.triton.launch import half_block

    def ragged(block: int) -> str:
        return f"tensordesc<{kind}[1, 1, {block}, {dim}]>"

    def keys(block: int) -> str:
        rows, width = (block, dim) if cluster == 1 else half_block(block, dim, 2)
        return f"tensordesc<{kind}[1, 1, {rows}, {width}]>"

    tail = 0 if causal or window else config.tail
    half = config.block_q // 2
    signature = {
        **dict.fromkeys(("q_desc", "o_desc"), ragged(half)),
        **dict.fromkeys(("k_desc", "v_desc"), keys(config.block_kv)),
        **dict.fromkeys(("k_tail_desc", "v_tail_desc"), keys(config.tail or config.block_kv)),
        "out": f"*{kind}",
        "lse": "*fp32",
        **dict.fromkeys(("kv_offsets", "pairs", "counts", "counter"), "*i32"),
        **dict.fromkeys(("batch_count", "heads", "q_uniform", "total_q", "q_stride", "split"), "i32"),
        **dict.fromkeys(("before", "after", "capacity"), "i32"),
        "score_scale": "fp32",
    }
    constants: dict[str, Any] = {
        "group": 1,
        "BROADCAST_Q": broadcast,
        "HAS_BEFORE": window,
        "HAS_AFTER": causal or window,
        "SPLIT": split,
        "BLOCK_Q": config.block_q,
        "BLOCK_KV": config.block_kv,
        "TAIL": tail,
        "DIM": dim,
        "STAGES": config.stages,
        "REGISTERS": config.registers,
        "PINGPONG": config.pingpong,
        "PEEL": config.peel,
        "EARLY_FETCH": config.early_fetch,
        "CLUSTER": cluster,
        "DEAL": deal,
        "LEVEL": level,
        "LEAVE_OUT": left_out.code("jfa_forward_hopper", leave_out),
    }
    _optional(signature, constants, broadcast, level)
    for name, given in (("partial_desc", ragged(half)), ("partial_lse", "*fp32")):
        if split:
            signature[name] = given
        else:
            constants[name] = None
    options: dict[str, Any] = {"num_warps": 4, "num_stages": 1, "ptx_options": config.ptx_options}
    if cluster > 1:
        options["ctas_per_cga"] = (cluster, 1, 1)
    return compile_kernel(jfa_forward_hopper, signature, constants, arch, **options)


def compile_hopper_backward(
    config: HopperBackwardConfig,
    arch: int = 90,
    *,
    dim: int = 128,
    deal: int = 3,
    level: int = 0,
    broadcast: bool = True,
    causal: bool = False,
    kind: str = "bf16",
    leave_out: str = "",
) -> Compiled:
    """The backward for sm_90 as its launch would compile it."""
    from jfa.impl.hopper.backward import jfa_backward_hopper
    from jfa.impl.hopper.dq import LINE
    from jfa.impl.hopper.statistics import COLUMNS

    def ragged(block: int, width: int = dim, of: str = kind) -> str:
        return f"tensordesc<{of}[1, 1, {block}, {width}]>"

    signature = {
        **dict.fromkeys(("q_desc", "do_desc"), ragged(config.block_q)),
        **dict.fromkeys(("k_desc", "v_desc"), ragged(config.block_kv)),
        "dq_desc": f"tensordesc<fp32[{config.block_q * dim // 2 // config.dq_slices // LINE}, {LINE}]>",
        **dict.fromkeys(("dk_desc", "dv_desc"), ragged(config.block_kv // 2)),
        **dict.fromkeys(("dk", "dv"), f"*{kind}"),
        "stat_desc": f"tensordesc<bf16[{config.block_q}, {COLUMNS}]>",
        "taker_desc": f"tensordesc<bf16[{config.block_kv // 2}, {COLUMNS}]>",
        **dict.fromkeys(("kv_offsets", "pairs", "counts", "counter", "done", "started"), "*i32"),
        **dict.fromkeys(("batch_count", "heads_kv", "q_uniform", "stat_rows", "total_kv"), "i32"),
        **dict.fromkeys(("before", "after", "capacity"), "i32"),
        **dict.fromkeys(("score_scale", "scale"), "fp32"),
    }
    constants: dict[str, Any] = {
        "group": 1,
        "BROADCAST_Q": broadcast,
        "HAS_BEFORE": causal,
        "HAS_AFTER": False,
        "BLOCK_Q": config.block_q,
        "BLOCK_KV": config.block_kv,
        "DIM": dim,
        "STAGES": config.stages,
        "PREFETCH": config.prefetch and config.stages > 1,
        "DQ_SLICES": config.dq_slices,
        "DQ_BUFFERS": config.dq_buffers,
        "PEEL": config.peel,
        "ANNOUNCE": config.round_beside and not broadcast and not causal,
        "REGISTERS": config.registers,
        "DEAL": deal,
        "LEVEL": level,
        "LEAVE_OUT": left_out.code("jfa_backward_hopper", leave_out),
    }
    _optional(signature, constants, broadcast, level)
    options = {"num_warps": 4, "num_stages": 1, "ptx_options": config.ptx_options}
    return compile_kernel(jfa_backward_hopper, signature, constants, arch, **options)


def compile_resident_backward(
    config: HopperResidentConfig,
    arch: int = 90,
    *,
    dim: int = 128,
    cluster: int = 2,
    add: bool = False,
    level: int = 0,
    kind: str = "bf16",
    leave_out: str = "",
) -> Compiled:
    """The backward for sm_90 that keeps dQ, as its launch would compile it."""
    from jfa.impl.hopper.resident import ROWS, jfa_backward_resident

    def ragged(block: int, width: int = dim, of: str = kind) -> str:
        return f"tensordesc<{of}[1, 1, {block}, {width}]>"

    signature = {
        **dict.fromkeys(("q_desc", "do_desc"), ragged(ROWS)),
        **dict.fromkeys(("k_desc", "v_desc", "dk_desc", "dv_desc"), ragged(config.block_kv)),
        "dq_desc": ragged(ROWS // 2, 64, "fp32"),
        **dict.fromkeys(("dk", "dv"), f"*{kind}"),
        **dict.fromkeys(("stat_lse", "stat_delta"), "*fp32"),
        **dict.fromkeys(("kv_offsets", "pairs", "counts"), "*i32"),
        **dict.fromkeys(("batch_count", "heads", "q_len", "first_row", "stat_rows", "total_kv", "capacity"), "i32"),
        **dict.fromkeys(("score_scale", "scale"), "fp32"),
    }
    constants: dict[str, Any] = {
        "CLUSTER": cluster,
        "ADD": add,
        "BLOCK_KV": config.block_kv,
        "DIM": dim,
        "K_STAGES": config.k_stages,
        "V_STAGES": config.v_stages,
        "REGISTERS": config.registers,
        "LEVEL": level,
        "LEAVE_OUT": left_out.code("jfa_backward_resident", leave_out),
    }
    if level:
        signature["recorder"] = "*i64"
    else:
        constants["recorder"] = None
    options = {"num_warps": 4, "num_stages": 1, "ptx_options": config.ptx_options}
    if cluster > 1:
        options["ctas_per_cga"] = (cluster, 1, 1)
    return compile_kernel(jfa_backward_resident, signature, constants, arch, **options)


def loop_spills(sass: str) -> list[int]:
    """Accesses of local memory in each innermost loop that issues tensor-core products of Hopper (HGMMA).

    A loop ends in a conditional jump back; an unconditional one is the way back of a wait's slow path, which stands
    behind all other code.
    """
    code = [
        (int(found[1], 16), found[2])
        for line in sass.splitlines()
        if (found := re.match(r"\s+/\*(\w{4,})\*/\s+(.*);", line))
    ]
    jumps = [(int(found[1], 16), at) for at, words in code if (found := re.match(r"@.*\bBRA (0x\w+)", words))]
    loops: list[tuple[tuple[int, int], int]] = []
    for first, last in sorted((jump for jump in jumps if jump[0] <= jump[1]), key=lambda loop: loop[1] - loop[0]):
        inside = [words for at, words in code if first <= at <= last]
        known = any(inner[0] <= last and first <= inner[1] for inner, _ in loops)
        if not known and any("HGMMA" in words for words in inside):
            loops.append(((first, last), sum(bool(re.search(r"\b(LDL|STL)\b", words)) for words in inside)))
    return [count for _, count in loops]


def ptxas_says(compiled: Compiled, arch: str = "sm_90a", options: str = "") -> str:
    """What ptxas reports of the PTX: registers, spills, and what it warns of, such as serialised wgmma."""
    ptxas, _ = toolchain.ptxas_in_use()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.ptx)
        words = [str(ptxas), "-v", "--gpu-name", arch, *options.split(), str(source), "-o", str(source) + ".cubin"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _optional(signature: dict[str, Any], constants: dict[str, Any], broadcast: bool, level: int) -> None:
    """Pointers that a launch may pass as None."""
    for name, present, kind in (("q_offsets", not broadcast, "*i32"), ("recorder", level > 0, "*i64")):
        if present:
            signature[name] = kind
        else:
            constants[name] = None
