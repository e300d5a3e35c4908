"""`cxlkv pool top` shows pools live: pages as a bar, and each process's rates."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cxlkv.emulation.link import marked
from cxlkv.layout import format_bytes
from cxlkv.machine.numa_mode import VARIABLE
from cxlkv.ops.console import print_json
from cxlkv.stats import Counters, Overview, Process, find

# State, sign and style: the signs tell the states apart without colours too.
BAR = (
    ("held", "█", "green"),
    ("published", "▓", "cyan"),
    ("quarantined", "?", "yellow"),
    ("retired", "x", "red"),
    ("withdrawn", "w", "yellow"),
    ("elsewhere", "-", "bright_black"),
    ("free", "·", "bright_black"),
)
BAR_WIDTH = 60
COLUMNS = (
    *("pid", "command", "pages", "seqs", "append/s", "score/s", "fetch/s", "attend/s"),
    *("hits", "recall", "mass"),
)
DROPPED_FIRST = ("seqs", "append/s", "fetch/s", "mass", "attend/s", "score/s", "recall", "hits")
COMMAND_WIDTH_MIN, GAP = 22, 2  # "all, since it was made"
RATES = ("appended_bytes", "scored_bytes", "fetched_bytes", "attended_bytes")
NAME_LENGTH_MAX = 28
UNUSED = 'not used yet: give an engine this path as its "where"'

# The model in the name of a pool that an engine made: adapters.common.pools.path_for().
OF_ENGINE = re.compile(r"/cxlkv-(?:vllm|sglang|lmcache)-(.+)-[0-9a-f]{16}[^/]*$")

Who = tuple[str, int, int]  # pool identity, pid, start time


class Top:
    """Frames, one after the other; rates are those since the frame before."""

    def __init__(self, places: Sequence[str]):
        self._places = places
        self._before: dict[Who, Counters] = {}
        self._at_s = time.monotonic()

    def frame(self) -> RenderableType:
        """What is there now; pools come and go between frames."""
        found, gone, elapsed_s = self._look()
        missing = [Text(f"{plain(place)}: not there (yet)", style="yellow") for place in gone]
        parts = [self._pool(overview, elapsed_s) for overview in found]
        self._keep(found)
        if not parts and not missing:
            parts.append(Text(none_found(self._places), no_wrap=True, overflow="ignore"))
        return Group(Text(time.strftime("%H:%M:%S"), style="bright_black"), *parts, *missing)

    def numbers(self) -> dict[str, object]:
        """The same for other programs."""
        found, gone, elapsed_s = self._look()
        pools = []
        for overview in found:
            pool = as_dict(overview)
            rows = []
            for process in overview.processes:
                before = self._before.get((overview.identity, process.pid, process.start_time))
                rates = {
                    f"{which}_per_s": None
                    if before is None
                    else (process.counters[which] - before[which]) / elapsed_s
                    for which in RATES
                }
                told = {"command": command_of(process), "emulated": emulated_by(process)}
                rows.append({**asdict(process), **told, **rates})
            pools.append({**pool, "processes": rows})
        self._keep(found)
        return {"pools": pools, "missing": gone}

    def _look(self) -> tuple[list[Overview], list[str], float]:
        gone: list[str] = []
        found = find(self._places, gone)
        now_s = time.monotonic()
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        return found, gone, elapsed_s

    def _keep(self, found: Sequence[Overview]) -> None:
        self._before = {
            (overview.identity, process.pid, process.start_time): process.counters
            for overview in found
            for process in overview.processes
        }

    def _pool(self, overview: Overview, elapsed_s: float) -> RenderableType:
        # A path stays in one piece, whatever the terminal's width.
        head = Text(plain(overview.path), style="bold", no_wrap=True, overflow="ignore")
        room = f", {overview.tokens:,} tokens" if overview.tokens else ""
        what = f"{overview.state}  {format_bytes(overview.bytes)}{room}"
        head.append(f"\n{what}  {plain(model_text(overview))}".rstrip(), style="not bold")
        if overview.detail:
            head.append(f"\n{plain(overview.detail)}", style="not bold yellow")
        if not overview.pages_total or not overview.pages:
            return Group(Text(), head)
        rows = sorted(overview.processes, key=lambda row: (-row.pages_held, row.pid))
        if not rows and not any(overview.totals.numbers.values()):
            return Group(Text(), head, bar(overview), Text(UNUSED, style="bright_black"))
        return Group(Text(), head, bar(overview), self._table(overview, rows, elapsed_s))

    def _table(
        self, overview: Overview, rows: Sequence[Process], elapsed_s: float
    ) -> RenderableType:
        table = Processes()
        for row in rows:
            before = self._before.get((overview.identity, row.pid, row.start_time))
            name = command_of(row) if row.alive else "(dead: to be reaped)"
            table.add(
                str(row.pid),
                name,
                f"{row.pages_held:,}",
                f"{row.sequences:,}",
                *(rate(row.counters, before, which, elapsed_s) for which in RATES),
                *quality(row.counters),
            )
        sums = [format_bytes(overview.totals[which]) for which in RATES]
        table.add("", "all, since it was made", "", "", *sums, *quality(overview.totals))
        lines = [
            Text(marked(f"pid {row.pid}: its rates", label), style="yellow")
            for row in rows
            if row.alive and (label := emulated_by(row))
        ]
        return Group(table, *lines)


class Processes:
    """A table whose numbers are never cut: a narrow terminal gets fewer columns. The last row sums
    up."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, ...]] = []

    def add(self, *cells: str) -> None:
        self._rows.append(cells)

    def widths(self, width: int) -> dict[str, int]:
        """The columns that fit into `width`, and how wide each is; the command takes the rest."""
        kept = {
            name: max(len(name), *(len(row[index]) for row in self._rows))
            for index, name in enumerate(COLUMNS)
        }
        longest = kept["command"]
        kept["command"] = COMMAND_WIDTH_MIN
        for name in sorted(DROPPED_FIRST, key=self._tells):
            if sum(kept.values()) + GAP * len(kept) <= width:
                break
            del kept[name]
        spare = width - sum(kept.values()) - GAP * len(kept)
        kept["command"] = min(longest, COMMAND_WIDTH_MIN + max(0, spare))
        return kept

    def _tells(self, name: str) -> bool:
        """Whether anything but nothing stands in the column: those without go first."""
        index = COLUMNS.index(name)
        return any(row[index] not in ("", "-", "0", "0 B") for row in self._rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self.widths(options.max_width)
        kept = [index for index, name in enumerate(COLUMNS) if name in widths]
        table = Table(box=None, pad_edge=False, header_style="bright_black")
        for name, width in widths.items():
            left = name == "command"
            table.add_column(name, justify="left" if left else "right", no_wrap=True, width=width)
        for row in self._rows:
            style = "dim" if row is self._rows[-1] else None
            table.add_row(*(Text(row[index]) for index in kept), style=style)
        yield table


def plain(text: str) -> str:
    """Names come from others: nothing in them may steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def as_dict(overview: Overview) -> dict[str, object]:
    """The JSON of a pool; its layout is what `cxlkv pool inspect` tells."""
    found = asdict(replace(overview, layout=None))
    del found["layout"]
    encoding = None if overview.layout is None else overview.layout.encoding
    return {**found, "model": model_name(overview), "encoding": encoding}


def none_found(places: Sequence[str]) -> str:
    """What helps where no pool is."""
    made = "cxlkv pool create /dev/shm/my.pool --model smollm2 --capacity 1GiB"
    return f"No pool in {' '.join(map(plain, places))}. Make one: {made}"


def model_name(overview: Overview) -> str:
    """What a person calls the model: as the layout names it, or the engine in the file's name;
    else its shape."""
    if name := overview.model_id:
        return name if re.fullmatch(r"[^/.~]*/?[^/]*", name) else name.rstrip("/").split("/")[-1]
    if named := OF_ENGINE.search(overview.path):
        return named[1]
    layout = overview.layout
    if layout is None:
        return ""
    if layout.object_bytes is not None:
        return f"objects of {format_bytes(layout.object_bytes)}"
    shapes = dict.fromkeys(f"{group.kv_heads}x{group.head_dim}" for group in layout.groups)
    return f"{layout.layers} layers {', '.join(shapes)}"


def encoding_text(overview: Overview) -> str:
    """What keys and values are kept as, "" where as the model made them."""
    layout = overview.layout
    return layout.encoding if layout is not None and layout.is_encoded else ""


def model_text(overview: Overview) -> str:
    """The model's name, and what its keys and values are kept as."""
    return ", ".join(filter(None, [model_name(overview), encoding_text(overview)]))


def bar(overview: Overview) -> Text:
    """A sign for each share of the pages; a state that there is has one sign at least."""
    shares = {
        state: max(1, overview.pages[state] * BAR_WIDTH // overview.pages_total)
        for state, _, _ in BAR
        if overview.pages[state]
    }
    largest = max(shares, key=lambda state: shares[state])
    shares[largest] += BAR_WIDTH - sum(shares.values())
    line, legend = Text(), Text("\n")
    for state, sign, style in BAR:
        line.append(sign * shares.get(state, 0), style=style)
        if overview.pages[state] or state in ("held", "published", "free"):
            legend.append(f"{state} {overview.pages[state]:,}  ", style=style)
    return line + legend + Text(f"of {overview.pages_total:,} pages")


def rate(now: Counters, before: Counters | None, which: str, elapsed_s: float) -> str:
    if before is None or elapsed_s <= 0:
        return "-"
    return format_bytes(round((now[which] - before[which]) / elapsed_s))


def quality(counters: Counters) -> list[str]:
    """Hits, recall and mass in per cent; "-" while nothing was asked or audited."""
    shares = (counters.hits, counters.recall, counters.mass)
    return ["-" if share is None else f"{100 * share:.1f} %" for share in shares]


def command_of(process: Process) -> str:
    """Its program, and for an interpreter its script; "?" when the pid is not that process here."""
    folder = Path(f"/proc/{process.pid}")
    try:
        started = (folder / "stat").read_text().rpartition(")")[2].split()[19]
        words = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except (OSError, IndexError):
        return "?"
    if process.start_time and abs(int(started) - process.start_time) > 2:  # ticks; see Process
        return "?"
    name = os.path.basename(words[0])
    if name.startswith("python"):
        name = " ".join(filter(None, (name, program_of(words[1:]))))
    return plain(name)[:NAME_LENGTH_MAX]


def emulated_by(process: Process) -> str | None:
    """What CXLKV_EMULATE says in a process's environment, as it began; None also where that may not
    be read, as of another user's."""
    if command_of(process) == "?":
        return None
    try:
        found = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    name = f"{VARIABLE}=".encode()
    values = [one.removeprefix(name) for one in found if one.startswith(name)]
    return plain(values[0].decode(errors="replace")).strip() or None if values else None


def program_of(words: Sequence[str]) -> str:
    """What an interpreter runs: a script's name, the end of a module's after -m, or "-c"."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "-m":
            return f"-m {'.'.join(following.split('.')[-2:])}"
        if word == "-c":
            return "-c"
        if not word.startswith("-"):
            return os.path.basename(word)
    return ""


@contextmanager
def keyboard() -> Iterator[Callable[[float], bool]]:
    """Yields wait(seconds): true as soon as q was pressed; without a terminal it only waits."""
    if not sys.stdin.isatty():
        yield no_key
        return
    fd = sys.stdin.fileno()
    saved = termios.tcgetattr(fd)

    def wait(seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            ready, _, _ = select.select([fd], [], [], left_s)
            if ready and os.read(fd, 1) in (b"q", b"Q", b""):
                return True
        return False

    try:
        tty.setcbreak(fd)  # keys at once and unseen; Ctrl-C still interrupts
        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, saved)


def no_key(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def run(
    places: Sequence[str], interval_s: float, once: bool, as_json: bool, console: Console
) -> None:
    """Shows frames until q or Ctrl-C; once: a single one, whose rates are of one interval."""
    top = Top(places)
    frame = top.frame()  # without rates: they are those since the frame before
    if once or as_json:
        time.sleep(interval_s)
        if as_json:
            print_json(top.numbers())
        else:
            console.print(top.frame(), crop=False)
        return
    try:
        with keyboard() as wait:
            if console.is_terminal:
                with Live(frame, console=console, screen=True, auto_refresh=False) as live:
                    while not wait(interval_s):
                        live.update(top.frame(), refresh=True)
            while not console.is_terminal and not wait(interval_s):
                console.print(top.frame(), crop=False)
    except KeyboardInterrupt:
        return
