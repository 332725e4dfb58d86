"""Runs the notebooks and keeps their outputs: `make notebooks`, or `python notebooks/run.py 01_drop_in_for_gepa`.

What would change from run to run without meaning anything is left out: standard error, metadata and times.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def run(path: Path) -> None:
    """Execute a notebook, elsewhere, and write it back with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02}", nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "metadata" in output:
                    output.metadata = nbformat.from_dict({})
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main() -> None:
    """Run those that are named, or all of them."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if path.stem in sys.argv[1:] or not sys.argv[1:]:
            print(path.name, flush=True)
            run(path)


if __name__ == "__main__":
    main()
