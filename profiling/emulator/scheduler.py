"""Tasks that take turns, in an order that a seed decides; barriers; work that happens some time after it was issued."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PACES, CHANGE_OF_PACE = 6, 1 / 16
"""Powers of ten between the quickest and the slowest; how often a task that takes its turn becomes another."""


class EmulationError(Exception):
    """The kernel did what a GPU would answer with a fault or a wrong result."""


class Deadlock(EmulationError):
    """No task can go on."""


class _Abort(BaseException):
    """Ends the other tasks after one has failed."""


@dataclass(eq=False)
class Later:
    """Work of an asynchronous engine: done at some moment after it was issued.

    ``cta``: whose shared memory it needs; None where it needs none. ``then``: what follows when it is done.
    """

    what: str
    work: Callable[[], None]
    cta: Any
    pace: float
    done: bool = False
    then: Later | None = None

    @property
    def over(self) -> bool:
        """Whether it is done, and what follows too."""
        return self.done and (self.then is None or self.then.over)

    def run(self) -> None:
        if self.cta is not None and self.cta.ended:
            raise EmulationError(f"{self.what} is still to come when CTA {self.cta.index} has ended")
        self.work()
        self.done = True


class Task:
    """A role of a CTA."""

    def __init__(self, name: str, cta: Any, threads: int, body: Callable[[], None]) -> None:
        self.name, self.cta, self.threads = name, cta, threads
        self.body = body
        self.replica = 0
        self.pace = 1.0
        self.waits_for = ""
        self.ready: Callable[[], bool] | None = None
        self.finished = False
        self.error: BaseException | None = None
        self.stores: list[Later] = []
        self.products: list[Any] = []
        self.turn = threading.Semaphore(0)
        self.thread: threading.Thread | None = None


@dataclass(eq=False)
class World:
    """All tasks that run at once, and what is still to happen."""

    seed: int = 0
    tasks: list[Task] = field(default_factory=list)
    pending: list[Later] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._back = threading.Semaphore(0)
        self._aborting = False
        self.current: Task | None = None

    def me(self) -> Task:
        assert self.current is not None
        return self.current

    def later(self, what: str, work: Callable[[], None]) -> Later:
        """Issue work that happens at any moment from now on."""
        issued = Later(what, work, self.me().cta, self._pace())
        self.pending.append(issued)
        return issued

    def store(self, what: str, read: Callable[[], Callable[[], None]]) -> Later:
        """Issue a store, done when shared memory has been read: what ``read`` gives writes memory at a later moment."""

        def work() -> None:
            issued.then = Later(what, read(), None, self._pace())
            self.pending.append(issued.then)

        issued = self.later(what, work)
        return issued

    def pause(self, waits_for: str = "", ready: Callable[[], bool] | None = None) -> None:
        """Let others run; go on when ``ready``."""
        task = self.me()
        task.waits_for, task.ready = waits_for, ready
        self._back.release()
        task.turn.acquire()
        if self._aborting:
            raise _Abort
        task.waits_for, task.ready = "", None

    def start(self, tasks: list[Task]) -> None:
        """Have more tasks take turns."""
        for task in tasks:
            task.pace = self._pace()
            task.thread = threading.Thread(target=self._body, args=(task,), daemon=True)
            task.thread.start()
        self.tasks += tasks

    def run(self) -> None:
        """Until every task has ended and nothing is left to happen.

        Raises:
            Deadlock: what each task waits for. EmulationError: what a task raised.
        """
        first, self.tasks = self.tasks, []
        self.start(first)
        try:
            while True:
                able: list[Task | Later] = [
                    task for task in self.tasks if not task.finished and (task.ready is None or task.ready())
                ]
                able += self.pending
                if not able:
                    break
                self.steps += 1
                chosen = self._random.choices(able, [one.pace for one in able])[0]
                if isinstance(chosen, Later):
                    self.pending.remove(chosen)
                    chosen.run()
                    continue
                if self._random.random() < CHANGE_OF_PACE:
                    chosen.pace = self._pace()
                self.current = chosen
                chosen.turn.release()
                self._back.acquire()
                self.current = None
                if chosen.error is not None:
                    raise EmulationError(
                        f"{chosen.name}: {type(chosen.error).__name__}: {chosen.error}"
                    ) from chosen.error
            stuck = [task for task in self.tasks if not task.finished]
            if stuck:
                raise Deadlock("; ".join(f"{task.name} waits for {task.waits_for}" for task in stuck))
        finally:
            self._end()

    def _pace(self) -> float:
        """How often one takes its turn: some are so slow that the others get as far ahead as the barriers let them."""
        return 10.0 ** -self._random.uniform(0, PACES)

    def _body(self, task: Task) -> None:
        task.turn.acquire()
        try:
            if not self._aborting:
                task.body()
                self._check_ended(task)
        except _Abort:
            pass
        except BaseException as error:
            task.error = error
        task.finished = True
        self._back.release()

    @staticmethod
    def _check_ended(task: Task) -> None:
        if left := [store.what for store in task.stores if not store.done]:
            raise EmulationError(f"ends while {left[0]} may still read its shared memory")
        if any(not product.done for product in task.products):
            raise EmulationError("ends without waiting for its products")

    def _end(self) -> None:
        """Unwind the tasks that a failure left waiting."""
        self._aborting = True
        for task in self.tasks:
            while not task.finished:
                task.turn.release()
                self._back.acquire()
            assert task.thread is not None
            task.thread.join()


class Barrier:
    """An mbarrier in a CTA's shared memory; ``by_thread``: at which every thread arrives for itself."""

    def __init__(self, world: World, name: str, count: int, by_thread: bool = False) -> None:
        self.world, self.name, self.count, self.by_thread = world, name, count, by_thread
        self.index, self._pending, self._bytes = 0, count, 0

    def arrive(self, count: int = 1) -> None:
        self._pending -= count
        if self._pending < 0:
            raise EmulationError(f"{self.name}: more arrivals in phase {self.index} than its count of {self.count}")
        self._settle()

    def expect(self, size: int) -> None:
        """Arrive, and let the phase last until so many bytes more have come."""
        self._bytes += size
        self.arrive()

    def complete(self, size: int) -> None:
        """So many bytes have come."""
        self._bytes -= size
        self._settle()

    def wait(self, phase: int) -> None:
        """Until the phase of that parity has completed."""
        self.world.pause(f"{self.name} (parity {phase})", lambda: (self.index & 1) != phase)

    def _settle(self) -> None:
        if self._pending == 0 and self._bytes == 0:
            self.index += 1
            self._pending = self.count


class NamedBarrier:
    """A barrier of a CTA's threads, by number."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self._came, self._generation = 0, 0

    def arrive(self, threads: int) -> int:
        """Its generation before this arrival."""
        generation = self._generation
        self._came += self.world.me().threads
        if self._came > threads:
            raise EmulationError(f"{self.name}: more threads than its {threads}")
        if self._came == threads:
            self._came, self._generation = 0, self._generation + 1
        return generation

    def wait(self, threads: int) -> None:
        generation = self.arrive(threads)
        self.world.pause(self.name, lambda: self._generation > generation)
