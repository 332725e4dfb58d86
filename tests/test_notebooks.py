"""The notebooks: kept with outputs that read well, and each of them runs."""

import importlib.util
import json
import os
import re
import socket
from pathlib import Path

import pytest

import dspy_combee

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
IDS = [path.stem for path in NOTEBOOKS]
TIMED = {"03_batch_size"}
"""Their outputs hold measured times."""
CHURN = re.compile(
    r"\x1b|/(tmp|root|home|work|usr|Users)/|\b\d\d:\d\d:\d\d\b|\b20\d\d-\d\d-\d\d\b|0x[0-9a-f]{6}|it/s\b"
)

pytestmark = pytest.mark.skipif(not NOTEBOOKS, reason="the notebooks are not here: they come with the repository")


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text(lines) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def printed(cell) -> str:
    return "".join(text(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_it_was_run_from_top_to_bottom(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert [cell["execution_count"] for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    kinds = {output["output_type"] for cell in code_cells(notebook) for output in cell["outputs"]}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert any(printed(cell) for cell in code_cells(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_nothing_in_it_tells_where_and_when_it_was_run(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        for output in cell.get("outputs", ()):
            assert output.get("name") != "stderr"
            shown = text(output.get("text", "")) + text(output.get("data", {}).get("text/plain", ""))
            assert not CHURN.search(shown), shown
            assert socket.gethostname() not in shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_it_says_that_it_is_simulated_and_how_to_use_a_real_model(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert any("simulated" in text(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    (model,) = [text(cell["source"]) for cell in cells if "For a real one change this cell" in text(cell["source"])]
    assert "dspy.LM(" in model


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # Jupyter's own.
@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_it_runs_and_prints_what_it_shows(path, tmp_path, monkeypatch):
    missing = [name for name in ("nbclient", "ipykernel", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        if os.environ.get("REQUIRE_EXTRAS") == "1":
            pytest.fail(f"REQUIRE_EXTRAS=1 is set and {missing} are not installed")
        pytest.skip("the extra `notebooks` is not installed")
    import nbformat
    from nbclient import NotebookClient

    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "DSPY_CACHEDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", str(Path(dspy_combee.__file__).parent.parent))
    kept = json.loads(path.read_text(encoding="utf-8"))
    notebook = nbformat.reads(json.dumps(kept), as_version=4)
    NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    if path.stem not in TIMED:
        assert [printed(cell) for cell in code_cells(notebook)] == [printed(cell) for cell in code_cells(kept)]
