"""The notebook of examples/ runs as it stands there, and has the pictures that it draws."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cxlkv.errors import UnsupportedError

from .support.notebook import PLAIN, code_of, read

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "examples/pages_of_a_question.ipynb"
BYTES_MAX = 400_000
ANSWERS = ("oranges", "Lantern Seven", "Ingrid Vasari")
RUN = """
import sys
from pathlib import Path
from tests.support.notebook import code_of, read, run
notebook = read(Path(sys.argv[1]))
run(notebook)
print([output for cell in code_of(notebook) for output in cell["outputs"] if "text" in output])
"""


def test_it_is_stored_as_it_was_run() -> None:
    notebook = read(PATH)
    cells = code_of(notebook)
    assert len(notebook["cells"]) <= 14
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    assert sum(output["output_type"] == "display_data" for output in outputs) >= 4
    assert all(answer in str(outputs) for answer in ANSWERS)
    assert notebook["metadata"] == PLAIN
    assert PATH.stat().st_size < BYTES_MAX


@pytest.mark.nightly  # the model reads 7,000 tokens
@pytest.mark.timeout(1800)
def test_it_runs() -> None:
    if find_spec("matplotlib") is None or find_spec("transformers") is None:
        pytest.skip("matplotlib or transformers is not installed here: pip install 'cxlkv[demo]'")
    from cxlkv.demo import smollm2

    try:
        smollm2.prepare()
    except UnsupportedError as missing:
        pytest.skip(str(missing))
    done = subprocess.run(
        [sys.executable, "-c", RUN, PATH], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(answer in done.stdout for answer in ANSWERS), done.stdout
