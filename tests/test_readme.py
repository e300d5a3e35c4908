"""The README's first example runs as it stands there."""

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_ten_lines_run() -> None:
    first = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert first is not None
    names: dict[str, object] = {}
    exec(compile(first[1], str(README), "exec"), names)
    assert getattr(names["out"], "shape", None) == (32, 128)
    assert getattr(names["picked"], "pages", None) is not None
