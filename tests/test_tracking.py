"""The steps of a run in a real MLflow (file store) and a real W&B (offline), beside GEPA's own numbers."""

import importlib.util
import json
import math
import os
import struct
import threading
from dataclasses import replace

import pytest

from dspy_combee import PowerLawBatchSize
from dspy_combee.runs.tracking import PREFIX, STEP, StepTracking, TrackingOptions, has_wandb_run, step_metrics

from . import playbook_lessons, trace_runs
from .clocks import LookClock
from .lessons import examples, learn, learning_lm, make
from .report_samples import EXAMPLES, steps_of
from .trace_samples import traces

# MLflow, pandas, W&B and what they import warn each other.
pytestmark = pytest.mark.filterwarnings("default")


def needs(extra: str) -> None:
    if importlib.util.find_spec(extra) is None:
        if os.environ.get("REQUIRE_EXTRAS") == "1":
            pytest.fail(f"REQUIRE_EXTRAS=1 is set and the extra {extra!r} is not installed")
        pytest.skip(f"the extra `{extra}` is not installed")


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow over a folder, with no run active."""
    needs("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    mlflow.set_experiment("test")
    yield mlflow
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(before)


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """W&B without a network, with no run active."""
    needs("wandb")
    for name, value in {"MODE": "offline", "DIR": tmp_path, "SILENT": "true", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    import wandb

    yield wandb
    wandb.finish()
    wandb.teardown()


def runs_of(mlflow):
    client = mlflow.MlflowClient()
    return client.search_runs([client.get_experiment_by_name("test").experiment_id])


def series(mlflow, run_id, name):
    return [(item.step, item.value) for item in mlflow.MlflowClient().get_metric_history(run_id, name)]


def wandb_rows(folder):
    """The history of each W&B run in a folder, row by row, as its file holds it."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # Its service has then written all of it.

    runs = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        rows = []
        for data in leveldb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({name: json.loads(value) for name, value in items.items()})
        runs.append(rows)
    return runs


def leveldb_records(data):
    """The records of a file in LevelDB's log format, behind W&B's header of 7 bytes."""
    place, parts = 7, []
    while place + 7 <= len(data):
        left = 32_768 - place % 32_768  # Blocks of this size; a header is not split, the rest is padding.
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # Whole, or the last part.
            yield b"".join(parts)
            parts = []


def ours(rows):
    return [row for row in rows if STEP in row]


# The numbers -------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_step():
    step = steps_of(9)[-1]
    metrics = {name.removeprefix(PREFIX): value for name, value in step_metrics(step, EXAMPLES).items()}
    calls = sum(node.usage.calls for node in step.nodes)
    assert (metrics["n"], metrics["k"], metrics["p"]) == (step.n, step.k, step.duplication_factor)
    assert (metrics["fit/alpha"], metrics["fit/plateau"]) == (step.fit.alpha, step.fit.plateau)
    assert metrics["fit/choice"] == step.fit.choice
    assert metrics["seconds/epoch"] == pytest.approx(step.seconds * EXAMPLES / step.n)
    assert {"seconds/rollouts", "seconds/reflection", "seconds/step"} <= metrics.keys()
    assert metrics["reflection/calls"] == calls
    assert metrics["reflection/input_tokens"] == 900 * calls
    assert metrics["reflection/output_tokens"] == 100 * calls
    assert metrics["reflection/dollars"] == pytest.approx(0.004 * calls)
    assert metrics["score/best"] == step.best_score
    assert all(isinstance(value, float) for value in metrics.values())


def test_what_is_not_known_or_not_finite_is_left_out():
    step = replace(steps_of(1)[0], best_score=None, scores_before=(math.nan,), scores_after=())
    node = replace(step.nodes[0], usage=replace(step.nodes[0].usage, cost=None))
    tree = replace(step.reductions[0], nodes=(node, *step.nodes[1:]))
    names = step_metrics(replace(step, reductions=(tree,)), EXAMPLES)
    missing = "score/best", "score/minibatch_before", "score/minibatch_after", "reflection/dollars", "fit/alpha"
    assert not {f"{PREFIX}{name}" for name in missing} & names.keys()


def test_without_trackers_nothing_is_imported_or_logged():
    StepTracking(TrackingOptions(), EXAMPLES)(steps_of(1)[0])


# MLflow ------------------------------------------------------------------------------------------------------


def test_our_numbers_stand_beside_gepa_s_in_one_run(mlflow):
    result = learn(learning_lm(), n_train=20, max_metric_calls=100, use_mlflow=True).detailed_results
    (run,) = runs_of(mlflow)
    assert run.info.status == "FINISHED"
    assert mlflow.active_run() is None
    assert {"best_score_on_valset", "total_metric_calls"} <= run.data.metrics.keys()
    steps = result.steps
    assert series(mlflow, run.info.run_id, "combee/n") == [(step.iteration, step.n) for step in steps]
    assert series(mlflow, run.info.run_id, "combee/score/best") == [(s.iteration, s.best_score) for s in steps]
    assert run.data.metrics["combee/metric_calls"] == steps[-1].metric_calls


def test_the_fit_of_the_controller_is_logged(mlflow):
    size = PowerLawBatchSize(candidates=(1, 2, 4), clock=LookClock())
    result = learn(
        learning_lm(), n_train=20, max_metric_calls=300, reflection_minibatch_size=size, use_mlflow=True
    ).detailed_results
    (run,) = runs_of(mlflow)
    chosen = [(step.iteration, step.fit.choice) for step in result.steps if step.fit is not None]
    assert series(mlflow, run.info.run_id, "combee/fit/choice") == chosen != []


def test_a_host_s_run_stays_open_and_a_second_compile_goes_on_from_the_first(mlflow):
    with mlflow.start_run() as run:
        mlflow.log_metric("loss", 1.0, step=100)
        counts = [len(learn(learning_lm(), use_mlflow=True, seed=seed).detailed_results.steps) for seed in range(2)]
        assert mlflow.active_run().info.run_id == run.info.run_id
        mlflow.log_metric("loss", 0.5, step=101)
    assert len(runs_of(mlflow)) == 1
    assert series(mlflow, run.info.run_id, "loss") == [(100, 1.0), (101, 0.5)]
    numbers = [step for step, _ in series(mlflow, run.info.run_id, "combee/n")]
    assert numbers == list(range(1, sum(counts) + 1))


def test_an_attached_run_is_not_closed_when_the_run_fails(mlflow):
    with mlflow.start_run() as run:
        with pytest.raises(KeyboardInterrupt):
            learn(learning_lm((lambda prompt: "new_instruction" in prompt.output_fields, KeyboardInterrupt())),
                  use_mlflow=True, gepa_kwargs={"mlflow_attach_existing": True})  # fmt: skip
        assert mlflow.active_run().info.run_id == run.info.run_id


def test_logging_happens_on_the_thread_of_compile(mlflow, monkeypatch):
    threads = []
    real = mlflow.MlflowClient.log_batch

    def log_batch(self, *args, **kwargs):
        threads.append(threading.current_thread())
        return real(self, *args, **kwargs)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    result = learn(learning_lm(), use_mlflow=True, num_threads=8).detailed_results
    assert threads == [threading.main_thread()] * len(result.steps)


def test_a_resumed_run_goes_on_with_its_steps(mlflow, tmp_path):
    log_dir = str(tmp_path / "log")
    first = learn(learning_lm(), n_train=20, use_mlflow=True, log_dir=log_dir, max_metric_calls=50).detailed_results
    steps = learn(learning_lm(), n_train=20, use_mlflow=True, log_dir=log_dir, max_metric_calls=120).detailed_results
    (_, later) = sorted(runs_of(mlflow), key=lambda run: run.info.start_time)
    (earlier,) = [run for run in runs_of(mlflow) if run.info.run_id != later.info.run_id]
    both = [step for run in (earlier, later) for step, _ in series(mlflow, run.info.run_id, "combee/n")]
    assert both == [step.iteration for step in steps.steps]
    assert len(steps.steps) > len(first.steps)


def test_a_tracker_that_fails_does_not_end_the_run(mlflow, monkeypatch, caplog):
    def refuses(self, *args, **kwargs):
        raise OSError("the server is away")

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", refuses)
    assert learn(learning_lm(), use_mlflow=True).detailed_results.steps
    assert "the server is away" in caplog.text


# W&B ---------------------------------------------------------------------------------------------------------


def test_w_and_b_gets_the_same_numbers(wandb, tmp_path):
    result = learn(learning_lm(), n_train=20, max_metric_calls=100, use_wandb=True).detailed_results
    assert wandb.run is None
    (rows,) = wandb_rows(tmp_path)
    assert any("best_score_on_valset" in row for row in rows)
    assert [(row[STEP], row["combee/n"]) for row in ours(rows)] == [(step.iteration, step.n) for step in result.steps]
    # In the row of GEPA's iteration, so nothing of GEPA's is refused either.
    assert [row["iteration"] for row in ours(rows)] == [step.iteration for step in result.steps]


def traces_then_search(lm, **options):
    optimizer = make(lm, reflection_minibatch_size=4, **options)
    return trace_runs.compile_on(optimizer, lm, traces(8), trainset=examples(12), valset=examples(4))


@pytest.mark.parametrize(
    ("run", "model"),
    [(playbook_lessons.learn, playbook_lessons.playbook_lm), (traces_then_search, learning_lm)],
    ids=["playbook", "traces then search"],
)
def test_w_and_b_gets_each_step_of_a_run_that_is_no_search_alone(run, model, wandb, tmp_path):
    steps = run(model(), use_wandb=True).detailed_results.steps
    assert wandb.run is None
    (rows,) = wandb_rows(tmp_path)
    assert len(steps) > 1
    assert [(row[STEP], row["combee/n"]) for row in ours(rows)] == [(step.iteration, step.n) for step in steps]


@pytest.mark.parametrize("options", [{}, {"gepa_kwargs": {"wandb_attach_existing": True}}], ids=["found", "told"])
def test_a_host_s_w_and_b_run_is_neither_closed_nor_stepped_back(wandb, tmp_path, options):
    run = wandb.init(project="host")
    run.log({"loss": 1.0}, step=100)
    result = learn(learning_lm(), n_train=20, use_wandb=True, **options).detailed_results
    assert wandb.run is run
    assert has_wandb_run()
    run.log({"loss": 0.5})
    wandb.finish()
    (rows,) = wandb_rows(tmp_path)
    assert [row["loss"] for row in rows if "loss" in row] == [1.0, 0.5]
    assert [row[STEP] for row in ours(rows)] == [step.iteration for step in result.steps]
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(numbers)
    assert numbers[0] >= 100
