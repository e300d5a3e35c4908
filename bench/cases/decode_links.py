"""Forms of a decode step over each emulated device: as long as it takes, and by its clock alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cxlkv.bench.cases.decode_layers import Walk
from cxlkv.bench.measure import interleave_reported
from cxlkv.bench.result import Result
from cxlkv.emulation.link import Link, emulate
from cxlkv.emulation.profiles import OURS, read
from cxlkv.pool import Pool

DEVICES = tuple(read(OURS))
"""All that the project knows."""


def over_links(
    result: Result,
    pool: Pool,
    forms: Mapping[str, Walk],
    point: str,
    *,
    parts: int,
    parts_of_step: int = 1,
    rounds: int = 3,
    devices: Sequence[str] = DEVICES,
) -> None:
    """FORM_POINT in ms a step, FORM_clock_POINT by the device's clock, late_POINT: the share of
    operations in which the host was slower than the device, so that the time is its own. point: a
    name with {} for the device. A walk goes through so many parts, and returns seconds for one."""
    for device in devices:
        name = point.format(device)
        with emulate(pool, device) as link:
            samples = interleave_reported(forms, rounds)
        late, count = link.counts()
        result.measure(f"late_{name}", [late / count], "share of operations", link.label)
        with emulate(pool, device, mode="virtual") as clock:
            clocked = {f"{form}_clock": [clock_s(clock, forms[form]) / parts] for form in forms}
        for some, label in ((samples, link.label), (clocked, clock.label)):
            steps = {form: [parts_of_step * s for s in found] for form, found in some.items()}
            result.times(steps, "ms/step", f"{{}}_{name}", label)


def clock_s(link: Link, form: Walk) -> float:
    """What a form takes by the clock of a link in mode "virtual"."""
    before = link.seconds
    form()
    return link.seconds - before
