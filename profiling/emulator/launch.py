"""A kernel's source made to run on the CPU, and launches of it."""

from __future__ import annotations

import ast
import inspect
import math
import random
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from jfa import instrument
from jfa.impl.hopper import primitives
from profiling.emulator.language import Cta, task_of, tl_of, tlx_of
from profiling.emulator.memory import Pointer
from profiling.emulator.scheduler import World

_TASKS, _CONVERT = "__run_tasks__", "__convert__"


class EmulatedKernel:
    """Stands in for a jitted kernel: ``kernel[grid](arguments)`` runs the CTAs cluster by cluster, in a seed's order.

    Attributes:
        launches: how many there were. steps: turns that tasks took in all.
    """

    def __init__(self, kernel: Any, seed: int = 0) -> None:
        self._kernel, self.seed = kernel, seed
        self.launches, self.steps = 0, 0
        self.__name__ = kernel.fn.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            self._run(grid, arguments, named)

        return launch

    def _run(self, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        cluster = (named.get("ctas_per_cga") or (1,))[0]
        parameters = inspect.signature(self._kernel.fn).parameters
        given = {name: value for name, value in named.items() if name in parameters}
        values = [Pointer.to(value) if isinstance(value, Tensor) else value for value in arguments]
        count = math.prod(grid)
        if count % cluster:
            raise ValueError(f"{count} CTAs are no whole number of clusters of {cluster}")
        for first in random.Random(self.seed).sample(range(0, count, cluster), count // cluster):
            world = World(self.seed + first)
            made = Source(world)
            body = made.function(self._kernel)
            ctas = [Cta(world, first + rank, grid, rank) for rank in range(cluster)]
            for cta in ctas:
                cta.cluster = ctas
                cta.start = task_of(world, cta, "start", 4, 0, partial(body, *values, **given))
                world.tasks.append(cta.start)
            world.run()
            self.steps += world.steps
        self.launches += 1


STEP_NS = 10
"""What a turn takes on the emulated clocks, which both count ns."""


class Source:
    """Functions of kernels as plain Python functions, in which ``tl`` and ``tlx`` are the emulator's.

    The recorder's reading of clocks and its stores, which are assembly, are the emulator's too.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._tl, self._tlx = tl_of(world, tl.constexpr), tlx_of(world)
        self._made: dict[int, Callable[..., Any]] = {
            id(instrument.read_clock.fn): self._now,
            id(instrument.read_timer.fn): self._now,
            id(instrument.read_sm.fn): lambda: world.me().cta.index,
            id(instrument.read_low_clock.fn): self._now,
            id(instrument.read_wait_clock.fn): self._now,
            id(instrument.start_count.fn): lambda roles: 0,
            id(primitives.one_of_eight.fn): lambda: 1 / 8,
            id(primitives.stored.fn): self._stored,
            id(instrument.store_word.fn): self._store_word,
            id(instrument.store_pair.fn): self._store_pair,
            id(instrument.store_quad.fn): self._store_quad,
        }

    def _stored(self) -> None:
        before = list(self.world.me().stores)
        self.world.pause("its TMA stores to arrive", lambda: all(store.over for store in before))

    def _now(self, count: int = 0, limit: int = 1) -> int:
        return STEP_NS * (1 + self.world.steps)

    @staticmethod
    def _store_word(address: Pointer, word: int, count: int, limit: int) -> None:
        if count < limit:
            address.store(word)

    @staticmethod
    def _store_pair(address: Pointer, first: int, second: int, count: int, limit: int) -> None:
        if count < limit:
            address.store(first)
            (address + 1).store(second)

    @classmethod
    def _store_quad(cls, address: Pointer, *parts: int) -> None:
        *halves, count, limit = map(int, parts)
        low, high = (halves[i] & 0xFFFFFFFF | halves[i + 1] << 32 for i in (0, 2))
        cls._store_pair(address, low, high, count, limit)

    def function(self, jitted: Any) -> Callable[..., Any]:
        """The Python function of a jitted one."""
        original = jitted.fn
        if id(original) in self._made:
            return self._made[id(original)]
        tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = []
        for argument in (*definition.args.args, *definition.args.kwonlyargs):
            argument.annotation = None
        tree = ast.fix_missing_locations(_Kernel().visit(tree))
        names = {name: self.value(value) for name, value in original.__globals__.items() if not name.startswith("__")}
        names |= {_TASKS: self._run_tasks, _CONVERT: converted}
        exec(compile(tree, inspect.getsourcefile(original) or "kernel", "exec"), names)
        self._made[id(original)] = names[definition.name]
        return self._made[id(original)]

    def value(self, value: Any) -> Any:
        """A global of a kernel as the emulation sees it."""
        if value is tl:
            return self._tl
        if inspect.ismodule(value):
            return self._tlx if value.__name__.endswith("extra.tlx") else _Module(self, value)
        if hasattr(value, "fn") and hasattr(value, "arg_names"):
            return _Lazy(self, value)
        return value.value if isinstance(value, tl.constexpr) else value

    def _run_tasks(self, blocks: list[tuple[dict[str, Any], Callable[[], None]]]) -> None:
        """Start the roles of the CTA that is here, and wait for them."""
        cta = self.world.me().cta
        cta.allocated = True
        # As the compiler has it: a cluster's CTAs meet once their barriers are there, and never again.
        self.world.pause("its cluster", lambda: all(other.allocated for other in cta.cluster))
        started = []
        for number, (options, body) in enumerate(blocks):
            for replica in range(options.get("replicate", 1)):
                name = f"role {number}.{replica}"
                started.append(task_of(self.world, cta, name, options.get("num_warps", 4), replica, body))
        self.world.start(started)
        self.world.pause("its roles", lambda: all(task.finished for task in started))


class _Lazy:
    """A jitted function that is made when it is called."""

    def __init__(self, source: Source, jitted: Any) -> None:
        self._source, self._jitted = source, jitted

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._source.function(self._jitted)(*arguments, **named)


class _Module:
    """A module whose jitted functions and constants are the emulation's."""

    def __init__(self, source: Source, module: Any) -> None:
        self._source, self._module = source, module

    def __getattr__(self, name: str) -> Any:
        return self._source.value(getattr(self._module, name))


class _Kernel(ast.NodeTransformer):
    """Two things that plain Python has not.

    ``with tlx.async_tasks(): with tlx.async_task(…): …`` becomes functions, one a role, handed to the scheduler;
    ``x.to(type)`` a call that takes numbers too.
    """

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return ast.Call(ast.Name(_CONVERT, ast.Load()), [node.func.value, *node.args], node.keywords)
        return node

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        call = node.items[0].context_expr
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") != "async_tasks":
            return node
        made: list[ast.stmt] = []
        blocks: list[ast.expr] = []
        for number, block in enumerate(node.body):
            assert isinstance(block, ast.With) and isinstance(block.items[0].context_expr, ast.Call)
            options = block.items[0].context_expr
            name = f"__role_{number}__"
            role = ast.parse(f"def {name}(): pass").body[0]
            assert isinstance(role, ast.FunctionDef)
            role.body = block.body
            made.append(role)
            keys: list[ast.expr | None] = [ast.Constant(word.arg) for word in options.keywords]
            values = [word.value for word in options.keywords]
            blocks.append(ast.Tuple([ast.Dict(keys, values), ast.Name(name, ast.Load())], ast.Load()))
        run = ast.Call(ast.Name(_TASKS, ast.Load()), [ast.List(blocks, ast.Load())], [])
        return [*made, ast.Expr(run)]


def converted(value: Any, kind: torch.dtype) -> Any:
    """``value.to(kind)`` of a block or a number."""
    if isinstance(value, Tensor):
        return value.to(kind)
    return float(value) if kind.is_floating_point else int(value)
