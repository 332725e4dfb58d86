"""Made-up runs for the tests of the report."""

import random
from typing import Any

from dspy_combee import PowerLawBatchSize, ProposalNode, Reduction, StepRecord, Usage
from dspy_combee.playbook import Playbook
from dspy_combee.playbook.records import PlaybookChange, PlaybookStep, Reflection
from dspy_combee.reduce.shuffle import augmented_shuffle

HOSTILE = (
    "<script>window.hacked = 1</script></script><img src=x onerror='window.hacked = 2'> &lt;b&gt; "
    "<!-- ]]> {{ }} ${window.hacked = 3} \u2028 \ud800 javascript:window.hacked=4 \"'"
)
"""A text that must show as it stands and do nothing (but for the lone surrogate)."""
EXAMPLES = 120


def usage(calls: int) -> Usage:
    return Usage(calls, 0, 900 * calls, 100 * calls, 0.004 * calls)


def reduction(number: int, n: int = 20, k: int = 4, failed: int = 0, **changes) -> Reduction:
    """A tree of two levels whose first `failed` calls failed."""
    copies = 2 if k > 2 else 1
    nodes = []
    for i, group in enumerate(augmented_shuffle(list(range(n)), k, copies, random.Random(number))):
        inputs = tuple(f"r{position}" for position in group)
        prompt = f"The records {group}. " + "Some record of a call that went wrong. " * 40
        if i < failed:
            made = (None, prompt, "It was cut", 1.5 + i / 10, usage(2), "the reply was cut short")
        else:
            output = f"Answer in one word.\nGroup {i} of step {number} says: be brief."
            made = (output, prompt, "", 1.5 + i / 10, usage(1), None)
        nodes.append(ProposalNode(f"1.{i}", "answer", inputs, *made))
    text = "\n".join(["Answer in one word.", *(f"Lesson {i} of {number}." for i in range(12)), f"{HOSTILE} {number}"])
    read = tuple(node.id for node in nodes if node.output is not None)
    root = ProposalNode("2.0", "answer", read, text, "Merge.", seconds=2.0, usage=usage(1))
    current = "\n".join(["Answer in two words.", *(f"Lesson {i} of {number}." for i in range(11)), "Old lesson."])
    values = {"text": text, "current": current, "sources": tuple(range(n)), **changes}
    return Reduction("answer", values.pop("text"), (*nodes, root), k, copies, **values)


def steps_of(count: int, k: int = 9) -> tuple[StepRecord, ...]:
    """A run of so many steps: the first ones time sizes, each third one is accepted."""
    sizes = [5, 5, 10, 20, 40, 80]
    fit, timed, steps, best = None, [], [], 0.4
    for index in range(count):
        n = sizes[index] if index < len(sizes) else 55
        seconds = 4.0 + 0.1 * n
        timed.append((n, seconds))
        accepted = index % 3 == 0
        best += 0.03 * accepted
        if index >= len(sizes):
            fit = PowerLawBatchSize().fit(timed[1:], EXAMPLES)
        tree = reduction(index + 1, n, min(k, max(2, n // 5)), failed=index % 2)
        record = StepRecord(
            iteration=index + 1,
            parent=max(0, index // 3),
            minibatch_ids=tuple(range(n)),
            n=n,
            k=tree.num_groups,
            duplication_factor=tree.duplication_factor,
            scores_before=(0.0, 1.0) * (n // 2) + (0.0,) * (n % 2),
            scores_after=(1.0,) * n if accepted else (0.0,) * n,
            accepted=accepted,
            candidate=1 + index // 3 if accepted else None,
            reason="" if accepted else f"not better {HOSTILE}",
            reductions=(tree,),
            seconds=seconds,
            validation_seconds=2.0 * accepted,
            profiling=index < len(sizes),
            size_reason=f"n = {n}, as asked",
            fit=fit,
            usage=Usage(2 * n, 0, 20_000, 3_000, 0.1) + sum((node.usage for node in tree.nodes), Usage()),
            phase_seconds={"rollouts": seconds - 2, "reflection": 2.0, **({"validation": 2.0} if accepted else {})},
            metric_calls=(index + 1) * 150,
            elapsed=(index + 1) * 12.5,
            validation_score=best if accepted else None,
            best_score=best,
        )
        steps.append(record)
    return tuple(steps)


def playbook_steps(count: int, seed: int = 0) -> tuple[tuple[PlaybookStep, ...], Playbook]:
    """A run of playbook learning by random tags and deltas, and the playbook that it ends with."""
    rng = random.Random(seed)
    playbook, steps = Playbook(), []
    for number in range(1, count + 1):
        known = [bullet.id for bullet in playbook] or ["gen-09999"]
        reflections = []
        for i in range(4):
            tags = tuple((rng.choice(known), rng.choice(["helpful", "harmful", "neutral", "odd"])) for _ in range(3))
            reflections.append(Reflection(f"s{number}.r{i}", "answer", i, {"key_insight": f"Insight {HOSTILE}"}, tags))
        tagged = playbook.tag([pair for item in reflections for pair in dict(reversed(item.tags)).items()])
        applied = tagged.playbook.apply(_random_deltas(rng, known, number))
        held = applied.playbook.enforce_budget(150)
        playbook = held.playbook
        change = PlaybookChange(
            *("answer", len(playbook), held.tokens_after),
            *(tagged.helpful, tagged.harmful, tagged.neutral, tagged.refused),
            applied=applied.applied,
            refused=applied.refused,
            conflicts=applied.conflicts,
            pruned=held.pruned,
        )
        tree = reduction(number, 4, 2, text=tuple(item.delta for item in applied.applied))
        scores = (0.0, 1.0, 1.0, number / count)
        step = PlaybookStep(
            *(number, number - 1, tuple(range(4)), 4, 2, 1, scores, (), True, number, "", (tree,), 3.0, 0.0),
            metric_calls=4 * number,
            elapsed=3.0 * number,
            changes=(change,),
            reflections=tuple(reflections),
            unused_reflections=(reflections[0].id,),
        )
        steps.append(step)
    return tuple(steps), playbook


def _random_deltas(rng: random.Random, known: list[str], number: int) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = []
    for i in range(3):
        section = rng.choice(["Formulas", "Pitfalls"])
        deltas.append({"type": "ADD", "section": section, "content": f"Lesson {number} {i} {rng.random()}"})
    for _ in range(4):
        kind = rng.choice(["UPDATE", "MERGE", "REMOVE"])
        ids = rng.sample(known, min(3, len(known)))
        deltas.append({"type": kind, "id": ids[0], "ids": ids, "content": f"New {kind} {rng.random()}"})
    return deltas
