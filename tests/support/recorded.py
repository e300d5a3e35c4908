"""The machines of tests/machines as folders of files and links, for `cxlkv info` to read."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "machines"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.txt")))


def plant_machine(name: str, root: Path) -> Path:
    """Make the files and links of one recorded machine; tests/machines/README.md has the form."""
    folder, file = root, root
    for line in (FOLDER / f"{name}.txt").read_text().splitlines():
        if line.startswith("    "):
            with file.open("a") as opened:
                opened.write(line[4:] + "\n")
        elif line.startswith("["):
            folder = root / line[1:-1]
            folder.mkdir(parents=True, exist_ok=True)
        elif line and not line.startswith("#"):
            file = _plant_line(folder, line)
    return root


def _plant_line(folder: Path, line: str) -> Path:
    name, arrow, leads_to = line.partition(" -> ")
    if line.endswith("!"):  # a circle of links: unreadable for anyone, root included
        name, arrow, leads_to = line[:-1], "!", Path(line[:-1]).name
    elif not arrow:
        name, _, text = line.partition(": ")
        name = name.removesuffix(":")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if arrow:
        path.symlink_to(leads_to)
    else:
        path.write_text(f"{text}\n" if text else "")
    return path
