"""The switches of a kernel, and the variants that an ablation looks at."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from profiling.errors import UserError

if TYPE_CHECKING:
    from jfa.config import Config
    from jfa.validation import Problem
    from jfa.workloads import Workload


@dataclass(frozen=True)
class Switch:
    """One thing that can be otherwise.

    Attributes:
        name: of a field of the configuration, or ``schedule``, ``split`` or ``dq`` (the kernel, by where dQ adds up).
        full, other: its value in the full configuration, and the one to compare with.
        what: what it is, in a few words.
        extra: the full configuration does without it, so that the ladder does not climb over it.
    """

    name: str
    full: Any
    other: Any
    what: str
    extra: bool = False


@dataclass(frozen=True)
class Setting:
    """How a kernel is launched: everything that a switch can change."""

    impl: str
    direction: str
    config: Config
    schedule: str
    split: bool = True

    def changed(self, values: dict[str, Any]) -> Setting:
        """The same with the switches at these values; what the kernel of that ``dq`` does not have stays aside."""
        config = self.config
        if values.get("dq", dq_of(config)) != dq_of(config):
            from jfa.config import hopper_backward_config

            config = hopper_backward_config(values["dq"] == "resident")
        fields = {name: value for name, value in values.items() if hasattr(config, name)}
        if dq_of(config) == "shared" and fields.get("stages") == 1:
            fields["prefetch"] = False  # as the launch does: there is no block to start ahead
        others = {name: values[name] for name in ("schedule", "split") if name in values}
        return replace(self, config=replace(config, **fields), **others)


@dataclass(frozen=True)
class Variant:
    """One configuration, and what it is compared with.

    Attributes:
        name: such as "without peel". kind: full, plain, without, with or rung. switch: which differs from ``against``.
        values: of every switch. against: the name of the variant that its effect is relative to ("" for none).
    """

    name: str
    kind: str
    switch: str
    values: dict[str, Any] = field(hash=False)
    against: str = ""

    @property
    def key(self) -> str:
        """Equal for variants that are one configuration, which is run once."""
        return " ".join(f"{name}={value}" for name, value in sorted(self.values.items()))


@dataclass(frozen=True)
class Plan:
    """The variants of one kernel, those of one key first as the earliest says."""

    setting: Setting
    switches: tuple[Switch, ...]
    variants: tuple[Variant, ...]

    def settings(self) -> dict[str, Setting]:
        """key → setting, each once, in the order in which they are run."""
        return {variant.key: self.setting.changed(variant.values) for variant in self.variants}

    def named(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)


_HOPPER_FORWARD = (
    ("schedule", "static", "tiles sorted by cost and fetched on demand, against dealt in order"),
    ("split", False, "sequences longer than a CTA's fair share cut into parts; uncut ones may be multicast"),
    ("peel", False, "the block that needs a mask taken out of the loop over keys"),
    ("early_fetch", False, "the next tile fetched while the current one is loaded (by pairs on demand: behind it)"),
    ("tail", 0, "a product of its own size for a short rest of keys"),
    ("stages", 1, "buffers of K and V in flight"),
    ("multicast", False, "K and V loaded once for two blocks of a shared Q, where no sequence is cut"),
    ("pingpong", True, "the two compute warpgroups take turns at the tensor cores"),
)
_TRITON_FORWARD = (
    ("schedule", "static", "tiles sorted by cost and fetched on demand, against dealt in order"),
    ("peel", False, "blocks that need no mask in a loop without one"),
    ("num_stages", 1, "loads of keys in flight"),
    ("ctas_per_sm", 2, "CTAs that share an SM"),
)
_TRITON_BACKWARD = (
    ("schedule", "static", "tiles sorted by cost and fetched on demand, against dealt in order"),
    ("num_stages", 1, "loads of queries in flight"),
    ("reduce", "atomic", "dQ added up by TMA, against atomic adds"),
    ("ctas_per_sm", 2, "CTAs that share an SM"),
)
_HOPPER_BACKWARD = (
    ("schedule", "static", "tiles sorted by cost and fetched on demand, against dealt in order"),
    ("stages", 1, "blocks of queries in flight; one leaves nothing to start ahead (prefetch)"),
    ("prefetch", False, "the next scores started before dQ is stored"),
    ("round_beside", False, "dQ rounded beside the kernel, on SMs left to it, against a pass behind it"),
    ("dq", "shared", "dQ kept in registers, against added up in memory"),
    ("k_stages", 1, "tiles of K in flight"),
    ("v_stages", 2, "tiles of V in flight"),
    ("dq_slices", 2, "slices of columns in which dQ is stored"),
    ("dq_buffers", 2, "buffers through which dQ is stored"),
)
_OTHERS = {
    ("hopper", "forward"): _HOPPER_FORWARD,
    ("hopper", "backward"): _HOPPER_BACKWARD,
    ("triton", "forward"): _TRITON_FORWARD,
    ("triton", "backward"): _TRITON_BACKWARD,
}
_EXTRA = ("pingpong", "ctas_per_sm", "v_stages", "dq_slices", "dq_buffers")
"""Whose other value is one more thing, not one less."""


def dq_of(config: Config) -> str:
    """Where a backward for sm_90 adds dQ up: "resident" (in registers) or "shared" (in memory); "" of other kernels."""
    from jfa.config import HopperBackwardConfig, HopperResidentConfig

    return {HopperResidentConfig: "resident", HopperBackwardConfig: "shared"}.get(type(config), "")


def full_setting(
    impl: str, direction: str, capability: tuple[int, int] | None, head_dim: int, itemsize: int, resident: bool = False
) -> Setting:
    """The pinned configuration; ``resident``: of a backward whose dQ can stay in registers."""
    from jfa.config import backward_config, forward_config, hopper_backward_config, hopper_forward_config

    if impl == "hopper" and direction == "backward":
        return Setting(impl, direction, hopper_backward_config(resident), "balanced-dynamic", split=False)
    if impl == "hopper":
        return Setting(impl, direction, hopper_forward_config(head_dim), "balanced-dynamic")
    choose = forward_config if direction == "forward" else backward_config
    return Setting(impl, direction, choose(capability, head_dim, itemsize), "balanced-dynamic", split=False)


def begun_from(full: Setting, given: Sequence[str], resident: bool = False) -> Setting:
    """The setting with what ``given`` says otherwise, "name=value" each: what an ablation then takes as the full one.

    A name is a field of the configuration, ``schedule``, ``split`` or ``dq``; ``resident``: dQ can stay in registers.
    UserError: no such name or value; the nearest names.
    """
    asked = dict(_parted(words) for words in given)
    if dq := asked.pop("dq", ""):
        known = [name for name in ("resident", "shared") if dq_of(full.config) and (resident or name == "shared")]
        full = full.changed({"dq": _one_of(dq, known, "dq has")})
    for name, text in asked.items():
        now = _settable(full).get(_one_of(name, list(_settable(full)), f"the {full.impl} {full.direction} has"))
        full = full.changed({name: _valued(name, text, now)})
    return full


def _parted(words: str) -> tuple[str, str]:
    name, equals, value = words.partition("=")
    if not (name and equals and value):
        raise UserError(f"--from {words}: expected NAME=VALUE, such as stages=1")
    return name.strip(), value.strip()


def _settable(full: Setting) -> dict[str, Any]:
    """What can be set of a setting, at its present value."""
    split = {"split": full.split} if (full.impl, full.direction) == ("hopper", "forward") else {}
    return {"schedule": full.schedule, **split, **asdict(full.config)}


def _one_of(name: str, known: Sequence[str], of: str) -> str:
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known) or 'none'}"
    raise UserError(f"--from: {of} no {name!r}; {hint}")


def _valued(name: str, text: str, now: Any) -> Any:
    """The value that a text names, of the kind of the present one."""
    from jfa.schedule import SCHEDULES

    if name == "schedule":
        return _one_of(text, SCHEDULES, "schedules have")
    if isinstance(now, bool):
        if text.lower() not in ("true", "false"):
            raise UserError(f"--from {name}={text}: expected True or False")
        return text.lower() == "true"
    if isinstance(now, int):
        if not text.isascii() or not text.isdigit():
            raise UserError(f"--from {name}={text}: expected a whole number, such as {now}")
        return int(text)
    return text


def switches_of(full: Setting, names: Sequence[str] = ()) -> tuple[Switch, ...]:
    """The switches whose other value differs from the full setting's, or those named. UserError: the nearest names."""
    found = []
    for name, other, what in _OTHERS[full.impl, full.direction]:
        value = _value(full, name)
        if value not in (None, other):
            found.append(Switch(name, value, other, what, name in _EXTRA))
    known = [switch.name for switch in found]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise UserError(f"--switches: the {full.impl} {full.direction} has none named {name!r}; {hint}")
    return tuple(switch for switch in found if not names or switch.name in names)


def _value(full: Setting, name: str) -> Any:
    """The full setting's value of a switch, or the pinned one of the kernel that ``dq`` turns to; None: of neither."""
    if name in ("schedule", "split"):
        return getattr(full, name)
    if name == "dq":
        return dq_of(full.config)
    if name == "round_beside":  # of a shared Q, whose kernel is another as pinned, it does nothing
        return getattr(full.config, name, None)
    other = full.changed({"dq": "shared"}).config if dq_of(full.config) == "resident" else full.config
    return getattr(full.config, name, getattr(other, name, None))


def can_stay_in_registers(workload: Workload) -> bool:
    """Whether the backward for sm_90 keeps dQ of this workload in registers."""
    from jfa.impl.hopper.resident import serves

    return serves(problem_of(workload))


def problem_of(workload: Workload) -> Problem:
    """What the op is asked for with this workload's tensors."""
    from jfa.validation import Problem as Asked

    q_len = workload.max_q_len if workload.broadcast_q else 0
    longest = (workload.max_q_len, workload.max_kv_len)
    sizes = (workload.heads, workload.heads_kv, workload.head_dim, workload.total_q, q_len, workload.total_kv, *longest)
    return Asked(workload.broadcast_q, workload.batch, *sizes, 1.0, *workload.window_bounds)


def make_plan(full: Setting, names: Sequence[str] = ()) -> Plan:
    """Full; each switch otherwise alone; plain, each switch alone on it; and the ladder from plain to full."""
    switches = switches_of(full, names)
    at_full = {switch.name: switch.full for switch in switches}
    climbed = [switch for switch in switches if not switch.extra]
    at_plain = at_full | {switch.name: switch.other for switch in climbed}
    variants = [Variant("full", "full", "", at_full)]
    for switch in switches:
        word = "with" if switch.extra else "without"
        name = f"{word} {switch.name}" if isinstance(switch.full, bool) else f"{switch.name} {switch.other}"
        variants.append(Variant(name, "without", switch.name, at_full | {switch.name: switch.other}, "full"))
    variants.append(Variant("plain", "plain", "", at_plain))
    for switch in climbed:
        variants.append(
            Variant(f"plain + {switch.name}", "with", switch.name, at_plain | {switch.name: switch.full}, "plain")
        )
    values, before = dict(at_plain), "plain"
    for number, switch in enumerate(climbed, start=1):
        values = values | {switch.name: switch.full}
        variants.append(Variant(f"rung {number}: + {switch.name}", "rung", switch.name, values, before))
        before = variants[-1].name
    return Plan(full, switches, tuple(_that_differ(full, variants)))


def _that_differ(full: Setting, variants: Sequence[Variant]) -> Iterator[Variant]:
    """Without those that turn a switch of a kernel that does not run: nothing differs from what they compare with."""
    by_name: dict[str, Variant] = {}
    for variant in variants:
        known = by_name.get(variant.against)
        if known is None or full.changed(variant.values) != full.changed(known.values):
            by_name[variant.name] = variant
            yield variant if known is None else replace(variant, against=known.name)
        else:
            by_name[variant.name] = known
