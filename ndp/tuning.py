"""What `cxlkv tune` measured on this machine: what things cost, and (`--gpu`) by what way pages get
into a GPU. Without a file nothing is known of either."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path

from cxlkv import _core
from cxlkv.errors import BadArgumentError
from cxlkv.machine import certificate
from cxlkv.machine.costs import TIERS, Costs, Tier
from cxlkv.machine.state import state_folder, write_whole


@dataclass(frozen=True)
class GpuCopyConstants:
    """When a kernel copies host memory into a GPU, and else its DMA engine: for pieces smaller than
    kernel_piece_bytes_below, if there are kernel_pieces_from of them or more. kernel_sms: how many
    programs of that kernel run. device: the GPU's name, where it was measured.

    The defaults were measured on an H100 behind PCIe 5 (bench/results/h100): 1,024 pieces of 28 KiB
    take the kernel 0.49 of the DMA engine's time, of 64 KiB 0.84, of 256 KiB as long. Published for
    the piece: 28 KiB (Beluga, arXiv 2511.20172, and vLLM's `swap_blocks_triton`).
    """

    kernel_piece_bytes_below: int = 128 << 10
    kernel_pieces_from: int = 16
    kernel_sms: int = 12
    device: str = ""


@dataclass(frozen=True)
class Tuning:
    """machine: what it holds for. costs: of the tiers and of work near the data, without a prefill
    speed. gpu: how pages are copied. None: not measured.
    """

    machine: str = ""
    costs: Costs | None = None
    gpu: GpuCopyConstants | None = None

    @cached_property
    def read_rate(self) -> float:
        """GB/s at which K and V are attended to, from which method "auto" tells what is cheapest;
        0: not known."""
        found = self.costs.attend_bytes_per_s if self.costs else None
        return found / 1e9 if found else 0.0


def this_machine() -> str:
    """What the figures depend on: the machine, its CPU, the instruction set in use."""
    found = certificate.this_machine()
    return f"{found['id']} {found['architecture']} {found['cpu']} {_core.isa()}"


def default_path() -> Path:
    return state_folder() / "tuning.json"


def write(tuning: Tuning, path: Path) -> None:
    """Whole or not at all; raises OSError, and BadArgumentError for costs of an emulated link."""
    if tuning.costs is not None and tuning.costs.emulated:
        raise BadArgumentError(f"{tuning.costs.emulated}: what is emulated is no cost of a machine")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(asdict(tuning), indent=2) + "\n")


def read(path: Path) -> Tuning:
    """Defaults when there is none; with a warning also when it is damaged or another machine's."""
    try:
        found = json.loads(path.read_text())
        machine = found["machine"]
        costs = None if found.get("costs") is None else _costs(found["costs"])
        gpu = None if found.get("gpu") is None else _gpu(found["gpu"])
    except FileNotFoundError:
        return Tuning()
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path} is not used: {error}; `cxlkv tune` writes it anew", stacklevel=2)
        return Tuning()
    if machine != this_machine():
        warnings.warn(f"{path} is of another machine: run `cxlkv tune` on this one", stacklevel=2)
        return Tuning()
    return Tuning(machine, costs, gpu)


def _costs(found: object) -> Costs:
    """Raises ValueError or TypeError for what is none: the file may be damaged."""
    if not isinstance(found, dict) or found.get("prefill") is not None:
        raise ValueError("costs are a table without prefill: that is the engine's")
    made = {}
    for key, value in found.items():
        name = "local" if key == "near" else key  # which files up to 0.2 say
        if name in TIERS and value is not None:
            if not isinstance(value, dict) or not isinstance(value.get("where"), str):
                raise ValueError(f"{name} is {value!r}")
            made[name] = Tier(**value)
        else:
            made[name] = value
    return Costs(**made)  # type: ignore[arg-type]


def _gpu(found: object) -> GpuCopyConstants:
    """Raises ValueError or TypeError for what is none."""
    if not isinstance(found, dict):
        raise ValueError("gpu is no table")
    for name, value in found.items():
        if name == "device":
            right = isinstance(value, str)
        else:  # JSON's true is no number of programs
            right = type(value) is int and int(name == "kernel_sms") <= value < 2**31
        if not right:
            raise ValueError(f"{name} is {value!r}")
    return GpuCopyConstants(**found)


@cache
def current() -> Tuning:
    """Read once in a process; a user without a home folder has the defaults."""
    try:
        return read(default_path())
    except FileNotFoundError:
        return Tuning()
