"""What `cxlkv tune` measured on this machine: for selects with method "auto", and what things cost.

Without a file there are defaults for the former, and nothing is known of the latter.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from cxlkv import _core, certificate
from cxlkv.costs import TIERS, Costs, Tier
from cxlkv.state import state_folder, write_whole

PAGES_MIN = 1024
"""Below this many pages a sample of 256 would read most of what is to be spared."""


@dataclass(frozen=True)
class Tuning:
    """From how many pages on method "auto" estimates from sketches; machine: what it holds for.

    costs: of the tiers and of work near the data, without a prefill speed; None: not measured.
    """

    two_stage_pages: int = PAGES_MIN
    machine: str = ""
    costs: Costs | None = None


def this_machine() -> str:
    """What the figures depend on: the machine, its CPU, the instruction set in use."""
    found = certificate.this_machine()
    return f"{found['id']} {found['architecture']} {found['cpu']} {_core.isa()}"


def default_path() -> Path:
    return state_folder() / "tuning.json"


def write(tuning: Tuning, path: Path) -> None:
    """Whole or not at all; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(asdict(tuning), indent=2) + "\n")


def read(path: Path) -> Tuning:
    """Defaults when there is none; with a warning also when it is damaged or another machine's."""
    try:
        found = json.loads(path.read_text())
        pages, machine = found["two_stage_pages"], found["machine"]
        if not isinstance(pages, int) or not PAGES_MIN <= pages < 2**31:
            raise ValueError(f"two_stage_pages is {pages!r}")
        costs = None if found.get("costs") is None else _costs(found["costs"])
    except FileNotFoundError:
        return Tuning()
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path} is not used: {error}; `cxlkv tune` writes it anew", stacklevel=2)
        return Tuning()
    if machine != this_machine():
        warnings.warn(f"{path} is of another machine: run `cxlkv tune` on this one", stacklevel=2)
        return Tuning()
    return Tuning(pages, machine, costs)


def _costs(found: object) -> Costs:
    """Raises ValueError or TypeError for what is none: the file may be damaged."""
    if not isinstance(found, dict) or found.get("prefill") is not None:
        raise ValueError("costs are a table without prefill: that is the engine's")
    made = {}
    for name, value in found.items():
        if name in TIERS and value is not None:
            if not isinstance(value, dict) or not isinstance(value.get("where"), str):
                raise ValueError(f"{name} is {value!r}")
            made[name] = Tier(**value)
        else:
            made[name] = value
    return Costs(**made)  # type: ignore[arg-type]


@cache
def current() -> Tuning:
    """Read once in a process."""
    return read(default_path())
