"""Does the batch-size controller find a good minibatch size? Real runs, on a simulated language model.

    python -m benchmarks.batch_size            # some minutes
    python -m benchmarks.batch_size --quick    # a coarse look, under a minute

The language model is simulated, and so are its times: a call takes a fixed time, so much for each token of its
reply, and a random (exponential) part; and the server answers only so many calls at once (its width). All the
rest is real: `CombeeOptimizer`, its threads, GEPA's loop, and the clock. Times are scaled down, by a factor that is
printed; each width has its own, so that the time that Python itself takes stays small beside the waiting.

For each width a run with `reflection_minibatch_size="auto"` gives n*. Then another run times a sweep of sizes up
to the controller's cap, n* among them. Every step starts from the program before learning, so that the times of
different steps can be compared.

The figure of merit is (T(n_1) - T(n*)) / (T(n_1) - T(best n)), the share of the possible saving that the
controller gets, T being the seconds of an epoch and n_1 the smallest profiled size. The target is 0.90.
T(n*) / T(best n) is printed without a target: where a step takes as long for any n, the paper's rule itself
gives 2.5.
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import dspy
from gepa.proposer.reflective_mutation.base import CandidateSelector

from benchmarks._options import whole
from dspy_combee import CombeeOptimizer, CombeeResult, PowerLawBatchSize
from dspy_combee.testing import Prompt, Reflector, Role, SimulatedLM, Student, Task, conventions_task

TARGET = 0.90
NUM_EXAMPLES = 400
NUM_VALIDATION = 4


@dataclass(frozen=True)
class Server:
    """A provider's times, in seconds before scaling.

    Attributes:
        width: Calls that it answers at once.
        speedup: What the times are divided by.
        fixed: For each call.
        per_token: For each token of the reply.
        random_mean: Mean of the exponential part.
    """

    width: int
    speedup: float
    fixed: float = 0.4
    per_token: float = 0.01
    random_mean: float = 0.4


SERVERS = (Server(8, speedup=30), Server(32, speedup=15), Server(128, speedup=6))


@dataclass(frozen=True)
class TimedRole:
    """A role of the simulated model, at the speed of a server."""

    role: Role
    server: Server
    rng: random.Random

    @property
    def name(self) -> str:
        return self.role.name

    def handles(self, prompt: Prompt) -> bool:
        return self.role.handles(prompt)

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        return self.role.fields(prompt, rng)

    def seconds(self, output_tokens: int) -> float:
        server = self.server
        drawn = self.rng.expovariate(1 / server.random_mean)
        return (server.fixed + server.per_token * output_tokens + drawn) / server.speedup


class LimitedEngine:
    """An engine that answers at most `width` calls at once; the others wait."""

    def __init__(self, engine: Any, width: int) -> None:
        self.engine = engine
        self.slots = threading.Semaphore(width)

    def __deepcopy__(self, memo: dict[int, Any]) -> LimitedEngine:
        return self

    def complete(self, request: Any) -> Any:
        with self.slots:
            return self.engine.complete(request)

    def stream(self, request: Any) -> Any:
        raise NotImplementedError("This engine does not stream.")

    def close(self) -> None:
        pass


class FromTheSeed(CandidateSelector):
    """Every step starts from the program before learning."""

    def select_candidate_idx(self, state: Any) -> int:
        return 0


def simulated_lm(server: Server, seed: int) -> dspy.LM:
    rng = random.Random(seed)
    roles = [TimedRole(role, server, rng) for role in (Reflector(), Student())]
    engine = LimitedEngine(SimulatedLM(seed, roles=roles).engine, server.width)
    return dspy.LM("simulated/server", engine=engine, cache=False, num_retries=0)


def run(server: Server, task: Task, size: Any, num_draws: int, seed: int) -> CombeeResult:
    """A run of the optimizer that draws `num_draws` examples for its minibatches."""
    lm = simulated_lm(server, seed)
    selector: Any = FromTheSeed()
    optimizer = CombeeOptimizer(
        metric=task.metric,
        num_epochs=num_draws / NUM_EXAMPLES,
        reflection_minibatch_size=size,
        reflection_lm=lm,
        candidate_selection_strategy=selector,
        skip_perfect_score=False,
        use_merge=False,
        num_threads=128,
        track_stats=True,
        seed=seed,
        verbose=False,
    )
    with dspy.context(lm=lm):
        program = optimizer.compile(task.program, task.trainset, valset=task.valset)
    result: CombeeResult = program.detailed_results
    return result


def sweep(server: Server, task: Task, sizes: Sequence[int], passes: int, seed: int) -> dict[int, float]:
    """T for each size, in scaled seconds: the median over the passes, in one run, in mixed order, after a cold step."""
    order = [5]
    for _ in range(passes):
        order += random.Random(f"{seed}/{len(order)}").sample(list(sizes), len(sizes))
    result = run(server, task, order, sum(order), seed + 1)
    times: dict[int, list[float]] = {}
    for step in result.steps[1:]:
        if step.scores_after:  # A step that proposed nothing shows nothing.
            times.setdefault(step.n, []).append(step.epoch_seconds(NUM_EXAMPLES))
    return {n: statistics.median(times[n]) for n in sorted(times)}


def report(server: Server, result: CombeeResult, epochs: dict[int, float], chosen: int) -> bool:
    """Print what was found at one width; whether the target was met."""
    fit = result.batch_size_fit
    print(f"\nWidth {server.width} (simulated; times divided by {server.speedup:g}, printed as they were measured)")
    print(f"  sizes of the run  {' '.join(map(str, result.batch_sizes))}")
    if fit is not None:
        print(f"  measured d(n)     {', '.join(f'd({n}) = {seconds:.3f} s' for n, seconds in fit.medians)}")
        if fit.alpha is not None and fit.A is not None:
            print(f"  fit               T(n) = {fit.A:.1f} s * n^-{fit.alpha:.3f}, plateau {fit.plateau or 0:.1f}")
        print(f"  choice            {fit.reason}")
    print("  sweep of T(n)     n      T(n)    T(n) / T(n_1)")
    first, best = min(epochs), min(epochs, key=epochs.__getitem__)
    for n, seconds in epochs.items():
        marks = [mark for mark, size in (("n_1", first), ("n*", chosen), ("best", best)) if n == size]
        print(
            f"                    {n:<4} {seconds:7.2f} s  {seconds / epochs[first]:10.3f}   {' '.join(marks)}".rstrip()
        )
    possible, saved = epochs[first] - epochs[best], epochs[first] - epochs[chosen]
    merit = saved / possible if possible > 0 else 1.0
    met = merit >= TARGET
    verdict = "met" if met else f"MISSED by {TARGET - merit:.3f}"
    print(f"  saved             {merit:.3f} of what the best n saves; target {TARGET:.2f}: {verdict}")
    print(f"  T(n*) / T(best)   {epochs[chosen] / epochs[best]:.2f} (no target)")
    return met


def measure(server: Server, policy: PowerLawBatchSize, step: int, passes: int, seed: int) -> bool:
    """Run and report one width."""
    task = conventions_task(seed, (NUM_EXAMPLES, NUM_VALIDATION, 1))
    # Profiling takes a quarter of the rollouts, and the rest is three times that.
    num_draws = 4 * (policy.candidates[0] + sum(policy.candidates))
    result = run(server, task, policy, num_draws, seed)
    fit = result.batch_size_fit
    chosen = fit.choice if fit is not None else result.batch_sizes[-1]
    grid = {policy.candidates[0], *range(step, policy.max_minibatch_size + 1, step), chosen}
    return report(server, result, sweep(server, task, sorted(grid), passes, seed), chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few sizes, one pass, times scaled down four times more")
    parser.add_argument("--widths", type=whole, nargs="+", default=[server.width for server in SERVERS])
    parser.add_argument("--passes", type=whole, help="how often the sweep times each size")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    known = {server.width: server for server in SERVERS}
    servers = [known.get(width) or Server(width, speedup=6) for width in options.widths]
    if options.quick:
        servers = [replace(server, speedup=4 * server.speedup) for server in servers]
    step, passes = (20, 1) if options.quick else (5, 2)
    print("The batch-size controller on a SIMULATED language model (its replies and its latency are simulated).")
    first = servers[0]
    print(
        f"A call takes {first.fixed:g} s, {first.per_token:g} s for each token of its reply and {first.random_mean:g} "
        f"s on average at random, before scaling. N = {NUM_EXAMPLES}."
    )
    met = [measure(server, PowerLawBatchSize(), step, options.passes or passes, options.seed) for server in servers]
    missed = [server.width for server, ok in zip(servers, met, strict=True) if not ok]
    print(f"\nTarget {TARGET:.2f} MISSED at width {missed}." if missed else f"\nTarget {TARGET:.2f} met at each width.")


if __name__ == "__main__":
    main()
