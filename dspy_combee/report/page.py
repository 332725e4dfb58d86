"""The report of a run: one HTML page that stands alone and opens without a network, made from its step records."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from dspy_combee.records.types import StepRecord
from dspy_combee.report.data import page_data
from dspy_combee.report.step_log import FILE_NAME, read_steps

DEFAULT_NAME = "report.html"

# Nothing but the page's own style and script runs, and nothing is fetched, whatever a text of the run says.
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '{style_hash}'; \
script-src '{script_hash}'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Combee report</title>
<style>{style}</style>
</head>
<body>
<div class="page">
<h1>Combee report</h1>
<noscript><p>This report needs JavaScript, which it holds itself: it loads nothing.</p></noscript>
<main id="report"></main>
</div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def html_page(steps: Sequence[StepRecord]) -> str:
    """The report as one HTML page, in ASCII but for its own style and script.

    Args:
        steps: The steps of a run, in order.
    """
    style, script = _part("report.css"), _part("report_charts.js") + _part("report.js")
    return PAGE.format(
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=_embedded(json.dumps(page_data(steps), allow_nan=False, separators=(",", ":"))),
    )


def save_html(steps: Sequence[StepRecord], path: str | os.PathLike[str]) -> Path:
    """Write the report to a file.

    Args:
        steps: The steps of a run, in order.
        path: The file; one that is there is replaced.

    Returns:
        The file's path.

    Raises:
        OSError: If the file cannot be written.
    """
    file = Path(path)
    file.write_text(html_page(steps), encoding="utf-8", newline="\n")
    return file


def report_main(log_dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> tuple[Path, int]:
    """Write the report of a run that kept its steps in a `log_dir`.

    Args:
        log_dir: The folder, or its `steps.jsonl`.
        out: The file to write. Default: `report.html` in the folder.

    Returns:
        The file's path, and how many steps it shows.

    Raises:
        ValueError: If there are no steps, or the file holds something else; the message is one line.
        OSError: If a file cannot be read or written.
    """
    folder = Path(log_dir)
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; expected the log_dir of a run")
    file = folder / FILE_NAME if folder.is_dir() else folder
    if not file.is_file():
        raise ValueError(f"{folder} holds no {FILE_NAME}; expected the log_dir of a run")
    steps = read_steps(file)
    if not steps:
        raise ValueError(f"{file} holds no steps yet")
    try:
        return save_html(steps, file.parent / DEFAULT_NAME if out is None else out), len(steps)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{file} holds values of the wrong kind: {error}") from error


def _embedded(text: str) -> str:
    """JSON that no HTML parser takes for markup: the characters it knows are written as escapes."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _part(name: str) -> str:
    return resources.files("dspy_combee.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
