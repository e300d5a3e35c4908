"""Notebooks without Jupyter: their code cells run in one namespace, and what they show is stored.

python -m tests.support.notebook examples/pages_of_a_question.ipynb
"""

from __future__ import annotations

import base64
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TypedDict

PLAIN = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class Cell(TypedDict, total=False):
    cell_type: str
    source: list[str]
    outputs: list[dict[str, object]]
    execution_count: int | None


class Notebook(TypedDict):
    cells: list[Cell]
    metadata: dict[str, object]


def read(path: Path) -> Notebook:
    notebook: Notebook = json.loads(path.read_text())
    return notebook


def code_of(notebook: Notebook) -> list[Cell]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: Notebook) -> None:
    """Run the code cells in turn, and put what each printed and drew into its outputs."""
    import matplotlib

    matplotlib.use("Agg")
    names: dict[str, object] = {}
    for number, cell in enumerate(code_of(notebook), start=1):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        text = printed.getvalue().splitlines(keepends=True)
        stream: dict[str, object] = {"name": "stdout", "output_type": "stream", "text": text}
        cell["outputs"] = ([stream] if text else []) + pictures()
        cell["execution_count"] = number


def pictures() -> list[dict[str, object]]:
    from matplotlib import pyplot

    shown: list[dict[str, object]] = []
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", metadata={"Software": None})
        data = {"image/png": base64.b64encode(file.getvalue()).decode()}
        shown.append({"data": data, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    return shown


def main() -> None:
    path = Path(sys.argv[1])
    notebook = read(path)
    run(notebook)
    notebook["metadata"] = {**PLAIN}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
