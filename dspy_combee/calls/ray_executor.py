"""`RayExecutor`: rollouts as Ray tasks, on this machine or on a cluster; everything else on threads."""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import dspy

from dspy_combee.calls.executors import WAKE, Executor, ThreadExecutor, check_timeout
from dspy_combee.calls.remote import RemoteFunction, TaskPayload, loads, run_shard
from dspy_combee.records.checks import check_int
from dspy_combee.records.errors import ExecutorError
from dspy_combee.records.secrets import shorten

logger = logging.getLogger("dspy_combee")

T = TypeVar("T")
R = TypeVar("R")

TASK_NAME = "dspy_combee.rollouts"
_LARGEST_SHARD = 64  # Default limit of examples per task: a lost worker loses them all, and they are run again.


class RayExecutor(Executor):
    """Run rollouts as tasks on Ray, and reflection and feedback calls on threads of this process.

    Each task takes a shard of the examples and runs their rollouts in a thread pool of its own, with back-off and
    timeouts as in `ThreadExecutor`. Program, metric and DSPy's settings in force are sent once for each map. The
    metric scores where the rollout ran; what it changes there (a counter, a list) stays there. A rollout that never
    ends is given up after the optimizer's `rollout_timeout`, even when it blocks its whole process.

    When a worker dies, the examples of its task are run once more, each in a task of its own; one that loses its
    worker again is a failed rollout.

    An optimizer connects to Ray when a run begins and disconnects at the end. A Ray that it started is shut down, one
    that it found (`ray.init` was called before, or `ray start`) stays. To keep a connection over several runs, use the
    executor in a `with` statement.

    Its `width`, the rollouts and other calls in flight over all tasks, is the optimizer's `num_threads`, else DSPy's
    setting of that name.

    Args:
        address: The Ray cluster to join: `"auto"`, `"host:port"` or `"ray://host:port"`. None joins the one of this
            machine (or of RAY_ADDRESS), or starts one.
        num_workers: Ray tasks at once. Default: as many as the cluster has room for.
        examples_per_task: Examples per task at most. Default: the examples divided by `num_workers`, at most 64
            or, where it is more, four for each thread of a task. With fewer than the threads of a task (the width
            divided by `num_workers`) the width is not reached.
        resources: What one task takes, by Ray's names: `{"CPU": 2, "GPU": 1, "memory": 4e9, "sandbox": 1}`. Default:
            one CPU.
        runtime_env: Ray's runtime environment of the workers. A local `working_dir` or `py_modules` needs an address
            or a Ray that is not connected yet. Do not put keys in it, since Ray logs it: give them to the language
            model, or set them in the environment of the workers' machines.

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
        if address is not None and not isinstance(address, str):
            raise TypeError(f"address must be a text or None, got {address!r}.")
        if address is not None and not address.strip():
            raise ValueError(f"address must be 'auto', 'host:port' or 'ray://host:port', or None, got {address!r}.")
        self.address = address
        for name, number in (("num_workers", num_workers), ("examples_per_task", examples_per_task)):
            if number is not None:
                check_int(name, number)
        self.num_workers = num_workers
        self.examples_per_task = examples_per_task
        self.resources = _check_mapping("resources", resources) or {}
        for name, value in self.resources.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"resources[{name!r}] must be a number, got {value!r}.")
            if not 0 <= value < math.inf:
                raise ValueError(f"resources[{name!r}] must be 0 or more and finite, got {value!r}.")
        self.runtime_env = _check_mapping("runtime_env", runtime_env)
        self.local = ThreadExecutor(dspy.settings.num_threads)
        self.width = self.local.width

    def with_width(self, width: int) -> RayExecutor:
        """Return an executor with the same options and another width."""
        made = copy.copy(self)
        made.local = ThreadExecutor(width)
        made.width = width
        return made

    def __repr__(self) -> str:  # Without runtime_env, which may hold a key.
        return f"RayExecutor(address={self.address!r}, num_workers={self.num_workers})"

    def __enter__(self) -> RayExecutor:
        _CONNECTION.open(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _CONNECTION.close()

    def opened(self) -> RayExecutor:
        """Keep this process connected to Ray for the duration of a run."""
        return self

    def map(
        self,
        function: Callable[[T], R],
        items: Sequence[T],
        *,
        timeout: float | None = None,
        on_timeout: Callable[[T], R] | None = None,
    ) -> list[R]:
        """Apply `function` to every item: a `RemoteFunction` (rollouts) on Ray, any other on threads here.

        See `Executor.map`.

        Raises:
            TypeError: If the function or an item cannot be pickled, naming what cannot.
            ExecutorError: If Ray cannot be reached, its workers cannot run the function, or all of them are lost.
        """
        if not isinstance(function, RemoteFunction) or self.local.holds_caller:
            return self.local.map(function, items, timeout=timeout, on_timeout=on_timeout)
        check_timeout(timeout, on_timeout)
        if not items:
            return []
        payload = TaskPayload(function, timeout, on_timeout, self.local.backoff).pack()
        with self:
            return RayMap(self, function, list(items)).run(payload)

    def check(self, function: Callable[[T], Any], items: Iterable[T]) -> None:
        """Refuse what cannot be pickled; see `Executor.check`."""
        if isinstance(function, RemoteFunction):
            TaskPayload(function, None, None, self.local.backoff).pack()
            for item in items:
                function.send_items([item])

    def needs(self) -> dict[str, float]:
        """Return what one task takes: one CPU, on this machine less if it has fewer CPUs than workers are wanted."""
        import ray

        cpus = 1.0
        if self.address is None and self.num_workers is not None:
            share = ray.cluster_resources().get("CPU", 1.0) / self.num_workers
            cpus = min(1.0, math.floor(share * 10_000) / 10_000)  # As finely as Ray counts.
        return {"CPU": cpus, **self.resources}


def _check_mapping(name: str, mapping: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if mapping is None:
        return None
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{name} must be a mapping, got {type(mapping).__name__}.")
    for key in mapping:
        if not isinstance(key, str):
            raise TypeError(f"The keys of {name} must be texts, got {key!r}.")
    return dict(mapping)


@dataclass(frozen=True)
class _Shard:
    positions: Sequence[int]
    is_retry: bool = False


class RayMap:
    """Run one map on Ray: submit shards of the items, collect their results, resubmit the items of a lost worker."""

    def __init__(self, executor: RayExecutor, function: RemoteFunction, items: list[Any]) -> None:
        import ray

        needs = executor.needs()
        tasks = executor.num_workers
        if tasks is None:  # As many as the cluster has room for.
            there = ray.cluster_resources()
            tasks = int(min((there.get(name, 0.0) // need for name, need in needs.items() if need), default=1.0))
        self.tasks = max(1, min(tasks, executor.width))
        self.threads = math.ceil(executor.width / self.tasks)
        most = executor.examples_per_task or max(_LARGEST_SHARD, 4 * self.threads)
        shards = math.ceil(len(items) / min(math.ceil(len(items) / self.tasks), most))
        options = {
            "name": TASK_NAME,
            "max_retries": 0,  # Lost items are resubmitted here, in another way.
            "num_cpus": needs.pop("CPU"),
            "num_gpus": needs.pop("GPU", None),
            "memory": needs.pop("memory", None),
            "resources": needs or None,
            "runtime_env": None if executor.runtime_env == _CONNECTION.environment else executor.runtime_env,
        }
        self.task = ray.remote(run_shard).options(
            **{name: value for name, value in options.items() if value is not None}
        )
        self.function = function
        self.items = items
        self.slots = executor.local.slots  # A task takes one slot for each of its threads.
        self._waiting = deque(_Shard(range(first, len(items), shards)) for first in range(shards))
        self._running: dict[Any, tuple[_Shard, int]] = {}
        self._results: dict[int, Any] = {}
        self._lost = 0

    def run(self, payload: bytes) -> list[Any]:
        """Return the results, in the order of the items, or raise the first error."""
        import ray

        shared = ray.put(payload)
        try:
            while self._waiting or self._running:
                self._submit(shared)
                done, _ = ray.wait(list(self._running), num_returns=1, timeout=WAKE)
                for reference in done:
                    self._collect(reference)
        finally:
            for reference, (_, taken) in self._running.items():
                with suppress(Exception):
                    ray.cancel(reference, force=True)
                self.slots.release(taken)
        return [self._results[position] for position in range(len(self.items))]

    def _submit(self, shared: Any) -> None:
        import ray

        while self._waiting:
            shard = self._waiting[0]
            if len(self._running) >= self.tasks and not shard.is_retry:
                return
            taken = self.slots.acquire(min(self.threads, len(shard.positions)), wait=not self._running)
            if not taken:
                return
            try:
                sent = ray.put(self.function.send_items([self.items[position] for position in shard.positions]))
                reference = self.task.remote(shared, sent, taken)
            except BaseException:
                self.slots.release(taken)
                raise
            self._running[reference] = self._waiting.popleft(), taken

    def _collect(self, reference: Any) -> None:
        import ray
        from ray import exceptions

        shard, taken = self._running.pop(reference)
        self.slots.release(taken)
        try:
            sent_back, failure, usage = loads(ray.get(reference))
        except (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError, exceptions.TaskUnschedulableError) as error:
            cause = getattr(error, "cause", None) or error
            raise ExecutorError(
                f"A Ray worker cannot run the rollouts: {type(cause).__name__}: {shorten(str(cause))}. Workers need "
                "this package and the modules of program and metric, in the same versions as here; runtime_env can "
                "give them."
            ) from error
        except exceptions.RayError as error:
            self._resubmit(shard, f"{type(error).__name__}: {shorten(str(error).split('.')[0], 200)}")
            return
        tracker = dspy.settings.usage_tracker
        if tracker is not None:
            for name, entries in usage.items():
                tracker.usage_data[name].extend(entries)
        if failure is not None:
            raise failure
        items = [self.items[position] for position in shard.positions]
        self._results.update(zip(shard.positions, self.function.receive_results(items, sent_back), strict=True))

    def _resubmit(self, shard: _Shard, reason: str) -> None:
        """Submit the items of a lost shard again, one to a task; an item that is lost again stays lost."""
        if not shard.is_retry:
            logger.warning(
                "A Ray worker was lost (%s). Its %d examples are run once more, each in a task of its own.",
                reason,
                len(shard.positions),
            )
            self._waiting.extend(_Shard([position], is_retry=True) for position in shard.positions)
            return
        self._lost += 1
        if self._lost == len(self.items):
            raise ExecutorError(f"Every example was lost with its Ray worker, twice. The last time: {reason}.")
        for position in shard.positions:
            what = f"the Ray worker that ran it was lost, twice; the last time: {reason}"
            self._results[position] = self.function.lost_result(self.items[position], what)


class _Connection:
    """Share this process's connection to Ray: open it for the first user that needs it, close it with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._own = False  # Whether the connection was made here.
        self.environment: dict[str, Any] | None = None  # What the workers have already.
        self._on_sigterm: Any = None  # The program's handler, which Ray replaces with its own.

    def open(self, executor: RayExecutor) -> None:
        """Connect unless that has been done; an `ExecutorError` says why it failed or that no task could ever run."""
        import ray

        with self._lock:
            self._users += 1
            try:
                if self._users == 1 and not ray.is_initialized():
                    self._connect(executor)
                _check_room(executor)
            except BaseException:
                self._leave()
                raise

    def close(self) -> None:
        """Disconnect with the last user; shut Ray down if it was started here."""
        with self._lock:
            self._leave()

    def _connect(self, executor: RayExecutor) -> None:
        import ray

        # Ray says much at INFO.
        options: dict[str, Any] = {"logging_level": logging.ERROR, "runtime_env": executor.runtime_env}
        if not (executor.address or os.environ.get("RAY_ADDRESS", "")).startswith("ray://"):
            options["include_dashboard"] = False
        self._own, self.environment = True, executor.runtime_env
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            try:
                ray.init(address=executor.address, **options)
            except ConnectionAbortedError:  # The server that Ray starts for each client did not start: once more.
                ray.shutdown()
                ray.init(address=executor.address, **options)
        except Exception as error:
            where = "started" if executor.address is None else f"joined at {executor.address!r}"
            raise ExecutorError(f"Ray could not be {where}: {shorten(str(error))}") from error
        if callable(self._on_sigterm):  # Otherwise Ray's handler is useful: it ends the program, and Ray with it.
            self._restore_sigterm()

    def _leave(self) -> None:
        import ray

        self._users -= 1
        if self._own and not self._users:
            self._own, self.environment = False, None
            ray.shutdown()
            self._restore_sigterm()

    def _restore_sigterm(self) -> None:
        is_ray = getattr(signal.getsignal(signal.SIGTERM), "__module__", "").startswith("ray.")
        if is_ray and self._on_sigterm is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)


def _check_room(executor: RayExecutor) -> None:
    """Refuse a task that no node of this machine's Ray could ever run; a cluster may yet get such a node."""
    import ray

    needs = executor.needs()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(name, 0.0) >= need for name, need in needs.items()) for node in nodes):
        return
    text = f"No node of the Ray cluster has what one task takes: {needs}"
    if executor.address is None:
        raise ExecutorError(f"{text}. Its nodes have: {nodes}.")
    logger.warning("%s. The rollouts wait for one.", text)


_CONNECTION = _Connection()
