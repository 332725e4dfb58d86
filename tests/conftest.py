"""What every test gets: no network, no shared DSPy state, and in CI no skip that is not written down."""

import copy
import importlib
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before dspy or litellm is imported: no price map from the network, no cache in the home directory.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
_cache_dir = tempfile.TemporaryDirectory(prefix="dspy-combee-tests-")
os.environ["DSPY_CACHEDIR"] = _cache_dir.name

import dspy  # noqa: E402
import hypothesis  # noqa: E402
from dspy.clients import base_lm  # noqa: E402

from .openai_server import OpenAIServer  # noqa: E402

# The module: its package shows only the object of the same name.
dspy_settings = importlib.import_module("dspy.dsp.utils.settings")

# A shell starts what it runs in the background with Ctrl-C ignored, and the processes that tests start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, and no deadline: a loaded machine is no failure.
hypothesis.settings.register_profile("tests", derandomize=True, deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def fresh_dspy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test DSPy's default settings, an empty memory cache, no disk cache and no history."""
    monkeypatch.setattr(dspy_settings, "main_thread_config", copy.deepcopy(dspy_settings.DEFAULT_CONFIG))
    monkeypatch.setattr(dspy_settings, "config_owner_thread_id", None)
    monkeypatch.setattr(dspy_settings, "config_owner_async_task", None)
    monkeypatch.setattr(base_lm, "GLOBAL_HISTORY", [])
    dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=True)
    overrides = dspy_settings.thread_local_overrides.set(type(dspy_settings.DEFAULT_CONFIG)())
    yield
    dspy_settings.thread_local_overrides.reset(overrides)


@pytest.fixture
def openai_server() -> Iterator[OpenAIServer]:
    """Start a server that answers "ok"; the test sets `openai_server.handler`."""
    with OpenAIServer() as server:
        yield server
    assert not server.handler_errors, f"the handler raised: {server.handler_errors}"


# For a Ray that a test starts: no token in the home directory.
RAY_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """Start Ray once for the session."""
    import ray

    folder = tempfile.TemporaryDirectory(prefix="ray-")  # A short path: Ray's sockets are in it.
    with pytest.MonkeyPatch.context() as patch, folder:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=4,
            object_store_memory=800_000_000,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder.name,
        )
        yield
        ray.shutdown()


# A skip or an expected failure that the file named by ALLOWED_SKIPS does not list is a failure.


def _refuse_unlisted_skip(report: Any) -> None:
    if not os.environ.get("ALLOWED_SKIPS") or report.outcome != "skipped":
        return
    reason = getattr(report, "wasxfail", None)
    if reason is None:
        reason = report.longrepr[2].removeprefix("Skipped: ")
    listed = Path(os.environ["ALLOWED_SKIPS"]).read_text(encoding="utf-8").splitlines()
    if report.nodeid not in listed and reason not in listed:
        report.__dict__.pop("wasxfail", None)
        report.outcome = "failed"
        report.longrepr = f"Skipped or expected to fail, and not on the list of allowed skips: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Any:
    report = yield
    _refuse_unlisted_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Any:
    report = yield
    _refuse_unlisted_skip(report)
    return report
