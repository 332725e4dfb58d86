"""`RayExecutor`: rollouts as Ray tasks, on this machine or on a cluster; everything else on threads."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import dspy

from dspy_combee.calls.executors import Executor, ThreadExecutor, check_timeout
from dspy_combee.calls.ray_tasks import Cargo, Flight, Shape, run_shard
from dspy_combee.calls.travel import RemoteFunction
from dspy_combee.records.checks import check_int
from dspy_combee.records.errors import ExecutorError
from dspy_combee.records.secrecy import shorten

logger = logging.getLogger("dspy_combee")

T = TypeVar("T")
R = TypeVar("R")

TASK_NAME = "dspy_combee.rollouts"
_LARGEST_SHARD = 64  # Examples of a task at most, where nobody says: what is lost with a worker, and made again.


class RayExecutor(Executor):
    """Executor that runs rollouts as tasks on Ray, and reflection and feedback calls on threads of this process.

    The examples are cut into shards; each is a Ray task that runs its rollouts in a thread pool of its own, with
    back-off and timeouts as in `ThreadExecutor`. Program, metric and DSPy's settings in force travel once for each
    map, each example with its shard. The metric scores where the rollout ran; what it changes there (a counter, a
    list) stays there. A rollout that never ends is given up after the optimizer's `rollout_timeout`, even when it
    blocks its whole process; without that it is waited for, as on threads.

    When a worker dies, the examples of its task are run once more, each in a task of its own, so that an example that
    kills its worker fails alone: it is then a failed rollout.

    An optimizer connects to Ray when a run begins and leaves it at the end. A Ray that it started is shut down, one
    that it found (`ray.init` was called before, or `ray start`) stays. To keep a connection over several runs, use the
    executor in a `with` statement.

    Args:
        address: The Ray cluster to join: `"auto"`, `"host:port"` or `"ray://host:port"`. None joins the one of this
            machine (or of RAY_ADDRESS), or starts one.
        num_workers: Ray tasks at once. Default: as many as the cluster has room for.
        examples_per_task: Examples of one task at most. Default: the examples divided by `num_workers`, at most 64
            or, where it is more, four for each thread of a task. Below the threads of a task (the width divided by
            `num_workers`) the width is not reached.
        resources: What one task takes, by Ray's names: `{"CPU": 2, "GPU": 1, "memory": 4e9, "sandbox": 1}`. Default:
            one CPU.
        runtime_env: Ray's runtime environment of the workers. A local `working_dir` or `py_modules` needs an address
            or a Ray that is not connected yet. Keys do not belong in it, since Ray logs it: give them to the language
            model, or put them in the environment of the workers' machines.

    Attributes:
        width: Rollouts plus other calls in flight at most, over all tasks: `num_threads` of the optimizer, else
            DSPy's setting of that name.

    Raises:
        ImportError: If ray is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        address: str | None = None,
        num_workers: int | None = None,
        examples_per_task: int | None = None,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ImportError("Rollouts on Ray need the extra 'ray': pip install 'dspy-combee[ray]'.")
        for name, value in (("num_workers", num_workers), ("examples_per_task", examples_per_task)):
            if value is not None:
                check_int(name, value)
        if address is not None and not isinstance(address, str):
            raise TypeError(f"address must be a text or None, got {address!r}.")
        if address is not None and not address.strip():
            raise ValueError(f"address must be 'auto', 'host:port' or 'ray://host:port', or None, got {address!r}.")
        for name, mapping in (("resources", resources), ("runtime_env", runtime_env)):
            _check_mapping(name, mapping)
        self.address = address
        self.num_workers = num_workers
        self.examples_per_task = examples_per_task
        self.resources = _check_resources(resources)
        self.runtime_env = None if runtime_env is None else dict(runtime_env)
        self._threads = ThreadExecutor(dspy.settings.num_threads)
        self.width = self._threads.width

    def with_width(self, width: int) -> RayExecutor:
        """An executor with the same options and another width."""
        made = RayExecutor(self.address, self.num_workers, self.examples_per_task, self.resources, self.runtime_env)
        made._threads = ThreadExecutor(width)
        made.width = width
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        options = self.address, self.num_workers, self.examples_per_task, self.resources, self.runtime_env
        return _with_width, (options, self.width)

    def __repr__(self) -> str:  # Without runtime_env, which may hold a key.
        return f"RayExecutor(address={self.address!r}, num_workers={self.num_workers})"

    def __enter__(self) -> RayExecutor:
        _CONNECTION.open(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _CONNECTION.close()

    def map(
        self,
        function: Callable[[T], R],
        items: Sequence[T],
        *,
        timeout: float | None = None,
        on_timeout: Callable[[T], R] | None = None,
    ) -> list[R]:
        """See `Executor.map`. A function that can travel (rollouts) runs on Ray, any other on threads here.

        Raises:
            TypeError: If the function or an item cannot be pickled; it names what cannot.
            ExecutorError: If Ray cannot be reached, its workers cannot run the function, or all of them are lost.
        """
        if not isinstance(function, RemoteFunction) or self._threads.holds_caller:
            return self._threads.map(function, items, timeout=timeout, on_timeout=on_timeout)
        check_timeout(timeout, on_timeout)
        if not items:
            return []
        cargo = Cargo(function, timeout, on_timeout, self._threads.backoff).pack()
        with self:
            return self._flight(function, list(items)).results(cargo)

    def opened(self) -> RayExecutor:
        """Keep this process connected to Ray for the duration of a run."""
        return self

    def check(self, function: Callable[[T], Any], items: Iterable[T]) -> None:
        """Refuse what cannot be pickled; see `Executor.check`."""
        if not isinstance(function, RemoteFunction):
            return
        Cargo(function, None, None, self._threads.backoff).pack()
        for item in items:
            function.send_items([item])

    def check_room(self) -> None:
        """Find out now whether a task could ever run.

        Raises:
            ExecutorError: If no node of this machine's Ray has what a task takes. (A cluster may yet get one.)
        """
        import ray

        needs = self._needs()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if any(all(node.get(name, 0.0) >= need for name, need in needs.items()) for node in nodes):
            return
        text = f"No node of the Ray cluster has what one task takes: {needs}"
        if self.address is None:
            raise ExecutorError(f"{text}. Its nodes have: {nodes}.")
        logger.warning("%s. The rollouts wait for one.", text)

    def _needs(self) -> dict[str, float]:
        """What one task takes: one CPU; on this machine less, where it has fewer CPUs than there should be workers."""
        import ray

        cpus = 1.0
        if self.address is None and self.num_workers is not None:
            share = ray.cluster_resources().get("CPU", 1.0) / self.num_workers
            cpus = min(1.0, math.floor(share * 10_000) / 10_000)  # As finely as Ray counts.
        return {"CPU": cpus, **self.resources}

    def _flight(self, function: RemoteFunction, items: list[Any]) -> Flight:
        import ray

        needs = self._needs()
        workers = self._tasks_at_once(needs)
        threads = -(-self.width // workers)
        most = self.examples_per_task or max(_LARGEST_SHARD, 4 * threads)
        size = min(-(-len(items) // workers), most)
        options = {
            "name": TASK_NAME,
            "max_retries": 0,  # What is lost is run again in another way.
            "num_cpus": needs.pop("CPU"),
            "num_gpus": needs.pop("GPU", None),
            "memory": needs.pop("memory", None),
            "resources": needs or None,
            "runtime_env": None if self.runtime_env == _CONNECTION.environment else self.runtime_env,
        }
        task = ray.remote(run_shard).options(**{name: value for name, value in options.items() if value is not None})
        return Flight(function, items, task, self._threads.slots, Shape(workers, threads, size))

    def _tasks_at_once(self, needs: Mapping[str, float]) -> int:
        """`num_workers`, else what the cluster has room for; never more than the width."""
        if self.num_workers is not None:
            return min(self.num_workers, self.width)
        import ray

        there = ray.cluster_resources()
        room = min((there.get(name, 0.0) // need for name, need in needs.items() if need), default=1.0)
        return max(1, min(int(room), self.width))


def _with_width(options: tuple[Any, ...], width: int) -> RayExecutor:
    return RayExecutor(*options).with_width(width)


def _check_mapping(name: str, mapping: object) -> None:
    if mapping is None:
        return
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{name} must be a mapping, got {type(mapping).__name__}.")
    for key in mapping:
        if not isinstance(key, str):
            raise TypeError(f"The keys of {name} must be texts, got {key!r}.")


def _check_resources(resources: Mapping[str, float] | None) -> dict[str, float]:
    for name, value in (resources or {}).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"resources[{name!r}] must be a number, got {value!r}.")
        if not 0 <= value < math.inf:
            raise ValueError(f"resources[{name!r}] must be 0 or more and finite, got {value!r}.")
    return dict(resources or {})


class _Connection:
    """This process's connection to Ray: made for the first that needs it, ended with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._own = False  # Whether the connection was made here.
        self.environment: dict[str, Any] | None = None  # What the workers have already.
        self._on_sigterm: Any = None  # What the process did before Ray's own handler took its place.

    def open(self, executor: RayExecutor) -> None:
        """Connect, unless that has been done.

        Raises:
            ExecutorError: If that fails, or no node of a Ray that was started could ever run a task.
        """
        import ray

        with self._lock:
            if not self._users and not ray.is_initialized():
                self._connect(executor)
            try:
                executor.check_room()
            except BaseException:
                self._leave_if_unused()
                raise
            self._users += 1

    def close(self) -> None:
        """Leave Ray with the last user; shut it down if it was started here."""
        with self._lock:
            self._users -= 1
            self._leave_if_unused()

    def _connect(self, executor: RayExecutor) -> None:
        import ray

        # Ray says much at INFO.
        options: dict[str, Any] = {"logging_level": logging.ERROR, "runtime_env": executor.runtime_env}
        client = (executor.address or os.environ.get("RAY_ADDRESS", "")).startswith("ray://")
        if not client:
            options["include_dashboard"] = False
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            try:
                ray.init(address=executor.address, **options)
            except ConnectionAbortedError:  # The server that Ray starts for each client did not start: once more.
                ray.shutdown()
                ray.init(address=executor.address, **options)
        except BaseException as error:
            with suppress(Exception):
                ray.shutdown()
            self._restore_sigterm()
            if not isinstance(error, Exception):
                raise
            where = "started" if executor.address is None else f"joined at {executor.address!r}"
            raise ExecutorError(f"Ray could not be {where}: {shorten(str(error))}") from error
        self._own, self.environment = True, executor.runtime_env
        if callable(self._on_sigterm):  # Else Ray's is of use: it ends the program, and Ray with it.
            self._restore_sigterm()

    def _leave_if_unused(self) -> None:
        if self._users or not self._own:
            return
        import ray

        ray.shutdown()
        self._restore_sigterm()
        self._own, self.environment = False, None

    def _restore_sigterm(self) -> None:
        known = self._on_sigterm is not None and threading.current_thread() is threading.main_thread()
        if known and getattr(signal.getsignal(signal.SIGTERM), "__module__", "").startswith("ray."):
            signal.signal(signal.SIGTERM, self._on_sigterm)


_CONNECTION = _Connection()
