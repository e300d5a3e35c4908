"""Reads procfs and sysfs of this machine, or of a recorded one.

Every file may be absent, masked by a container, forbidden, or hold what nobody expects; then the
answer is empty or None ("not known"), never an error.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

READ_BYTES_MAX = 16 << 20  # /proc/cpuinfo of the largest machines has a few MiB
READ_BYTES = 64 << 10  # at once: the kernel makes room for so much first, and /proc/sys refuses MiB
IDS_MAX = 1 << 16  # more CPUs or nodes than any kernel is built for: such a list is garbage


def read(path: Path) -> str:
    """Return the file's stripped text; "" where it is absent, masked or not a file."""
    try:
        text = b""
        with path.open("rb", buffering=0) as file:
            while len(text) < READ_BYTES_MAX and (more := file.read(READ_BYTES)):
                text += more
        return text.decode(errors="replace").strip()
    except (OSError, ValueError):  # ValueError: a name from another file has a zero byte in it
        return ""


def number(path: Path) -> int | None:
    """Read a number from a file: decimal, or 0x-hexadecimal as the CXL drivers write it."""
    return to_number(read(path))


def to_number(text: str) -> int | None:
    """Parse a number of at most 20 digits; None for -1, which means "none" in sysfs."""
    if re.fullmatch(r"[0-9]{1,20}", text):
        return int(text)
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text) else None


def flag(path: Path) -> bool | None:
    """Parse a switch: true or false, 1 or 0, Y or N."""
    return {"true": True, "1": True, "Y": True, "false": False, "0": False, "N": False}.get(
        read(path)
    )


def numbers(text: str) -> tuple[int, ...]:
    """Parse numbers separated by spaces; empty if one of them is malformed."""
    found = [to_number(part) for part in text.split()]
    known = [each for each in found if each is not None]
    return tuple(known) if len(known) == len(found) else ()


def names(folder: Path, pattern: str) -> tuple[str, ...]:
    """List matching names in `folder`, node2 before node10."""
    try:
        found = [entry.name for entry in folder.iterdir()]
    except (OSError, ValueError):
        return ()
    matching = (name for name in found if re.fullmatch(pattern, name))
    return tuple(sorted(matching, key=lambda name: [int(n) for n in re.findall(r"[0-9]+", name)]))


def target(link: Path) -> Path | None:
    """Resolve a link through all links on the way; None where it is broken."""
    try:
        return link.resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a circle of links
        return None


def target_name(link: Path) -> str:
    """Return the last component of a link's target, such as of `driver`; "" without a link."""
    try:
        return os.path.basename(os.readlink(link))
    except (OSError, ValueError):
        return ""


def path_below(root: Path, path: Path) -> str:
    """A path as the machine below `root` would write it: /sys/devices/..."""
    whole = root.resolve()
    return f"/{path.relative_to(whole)}" if path.is_relative_to(whole) else str(path)


def fields(text: str) -> dict[str, str]:
    """Parse `key: value` lines; a repeated key (one per CPU) keeps its first value."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def kilobytes(text: str | None) -> int | None:
    """Parse "123 kB" into bytes."""
    match = re.fullmatch(r"([0-9]{1,20}) kB", text or "")
    return int(match[1]) << 10 if match else None


def node_fields(meminfo: Path) -> dict[str, str]:
    """fields() of a NUMA node's meminfo, where each line starts with "Node 0 "."""
    return fields(re.sub(r"^Node [0-9]+ ", "", read(meminfo), flags=re.MULTILINE))


def allowed_nodes(root: Path) -> tuple[int, ...]:
    """The nodes that this process's cpuset lets it have memory of; (): not known."""
    return id_list(fields(read(root / "proc/self/status")).get("Mems_allowed_list", ""))


def chosen(path: Path) -> str:
    """Return the bracketed word: "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", read(path))
    return match[1] if match else ""


def id_list(text: str) -> tuple[int, ...]:
    """Parse ids such as "0-3,8"; empty if a part is malformed."""
    ids: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part.strip())
        if match is None:
            return ()
        ids.extend(range(int(match[1]), min(int(match[2] or match[1]), IDS_MAX) + 1))
        if len(ids) > IDS_MAX:
            return ()
    return tuple(ids)


def trouble(path: Path) -> str:
    """Say why `path` cannot be read, such as "absent" or "no permission"; "" if it can."""
    try:
        if path.is_dir():
            os.scandir(path).close()
        else:
            path.open("rb").close()
    except FileNotFoundError:
        return "absent"
    except PermissionError:
        return "no permission"
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""
