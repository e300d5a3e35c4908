"""Pages of the reference, made from the code: commands, settings, metrics, errors, Python names.

The C core need not be built: where it is not, something without values stands for it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cxlkv", "ndp", "kernels", "emulation", "bench")

# Pages of the Python reference: title, what is said first, and the names below it.
API: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "pool": (
        "Pools and sequences",
        "A pool of K and V, what it stores, and the sequences in it.",
        (
            *("cxlkv.CXLPool", "cxlkv.Sequence", "cxlkv.Batch", "cxlkv.Hit"),
            *(
                "cxlkv.KVLayout",
                "cxlkv.LayerGroup",
                "cxlkv.Rotary",
                "cxlkv.States",
                "cxlkv.pool.admin.Admin",
                "cxlkv.pages.Pages",
            ),
            *("cxlkv.pages.Hotness", "cxlkv.pages.Records", "cxlkv.prefix.prefix_keys"),
            "cxlkv.adapters.common.checkpoints.positions",
        ),
    ),
    "selection": (
        "Budgets and selections",
        "Which pages a decode step reads.",
        ("cxlkv.Budget", "cxlkv.Selection", "cxlkv.VirtualRows"),
    ),
    "objects": (
        "Objects",
        "A pool of whole blocks by their keys.",
        ("cxlkv.ObjectPool", "cxlkv.Buffers", "cxlkv.RowForm", "cxlkv.object_keys"),
    ),
    "tiers": (
        "Tiers",
        "More than the pool holds: copies in local memory, a file, other machines.",
        ("cxlkv.Tiers", "cxlkv.tiers.quota.Quota"),
    ),
    "transformers": (
        "With transformers",
        "The cache of a Hugging Face model in a pool.",
        tuple(
            f"cxlkv.adapters.transformers.{name}"
            for name in (
                *("CXLCache", "CXLRequests", "Hints", "LastQueries", "register", "layout_of"),
                *("hand_over", "take_over"),
                *("attention", "padding_mask", "Step", "LayerStep", "FarLayer", "Counters"),
            )
        ),
    ),
    "engines": (
        "With serving engines",
        "Classes that engines load by their names.",
        (
            "cxlkv.adapters.vllm.connector.CXLConnector",
            "cxlkv.adapters.sglang.CXLHiCache",
            "cxlkv.adapters.lmcache.CXLStorage",
        ),
    ),
    "gpu": ("On a GPU", "Decode steps that fetch chosen pages.", ("cxlkv.gpu.decode.Decoder",)),
    "transport": (
        "Other machines",
        "Pools that are served, and their clients.",
        tuple(
            f"cxlkv.transport.{name}"
            for name in ("Server", "Remote", "RemoteHit", "Moved", "pull", "push", "read_secret")
        ),
    ),
    "operations": (
        "Statistics and metrics",
        "Who uses a pool, and what was counted.",
        (
            *("cxlkv.stats.inspect", "cxlkv.stats.find", "cxlkv.stats.Overview"),
            *("cxlkv.stats.Process", "cxlkv.stats.Counters"),
            *("cxlkv.ops.metrics.PoolCollector", "cxlkv.ops.metrics.StatsCollector"),
            *("cxlkv.ops.metrics.registry", "cxlkv.machine.certificate.certified_mode"),
        ),
    ),
    "emulation": (
        "Emulation",
        "What a device would cost, and hosts whose caches do not see each other.",
        ("cxlkv.emulation.link.emulate", "cxlkv.emulation.sharing.simulate"),
    ),
}
CONSTRUCTED = (
    *("Budget", "KVLayout", "LayerGroup", "Tiers", "Quota", "CXLCache", "CXLRequests", "Decoder"),
    *("Hints", "LastQueries", "Rotary", "VirtualRows"),
    *("Server", "Remote", "PoolCollector", "StatsCollector"),
)
"""Classes that are made by their names; others are made by a function or a method."""
ERRORS = ("CXLKVError", "PoolFullError")  # of the front; the page on errors has them

# What the code reads; the page fails to be made when it reads another one.
VARIABLES = {
    "CXLKV_HOST": "The number of this host in pools that hosts share, or `auto`; goes where "
    "neither the call nor the settings name one. "
    "[A pool that hosts share](../how-to/operations.md#a-pool-that-hosts-share)",
    "CXLKV_EMULATE": "`numa:NODE`, or `PROFILE` or `PROFILE, MODE`: far memory that this machine "
    "does not have. [Emulation](../explanation/emulation.md), "
    "[placement](../how-to/placement.md)",
    "CXLKV_COMMIT": "The commit that a result file names, where there is no git checkout",
    "CXLKV_VLLM_PYTHON": "The Python with vLLM that `cxlkv bench vllm` starts; "
    "`build/vllm/env/bin/python` if not given",
    "XDG_STATE_HOME": "Measured costs and certificates are in `cxlkv` below it; "
    "`~/.local/state` if not given",
    "XDG_CACHE_HOME": "Converted models are in `cxlkv` below it; `~/.cache` if not given",
}
OF_TESTS = re.compile(r"CXLKV_(TEST_\w+|GUEST_RDMA|SITE)")


class Table:
    """Rows of a table in Markdown."""

    def __init__(self, *names: str):
        self._lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]

    def add(self, *cells: str) -> None:
        whole = [re.sub(r"(?<!\\)\|", r"\\|", " ".join(cell.split())) for cell in cells]
        whole[0] = re.sub(r"`([\w:]+)`", lambda one: breakable(one[1]), whole[0])
        self._lines.append(f"| {' | '.join(whole)} |")

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"


def breakable(name: str) -> str:
    """A name as code, that a narrow screen breaks between its words only."""
    return f"<code>{re.sub(r'(?<=[_:])(?=[a-z])|(?<=[a-z])(?=[A-Z])', '<wbr>', name)}</code>"


def pages() -> dict[str, str]:
    """All pages by their place in the site. Raises ValueError for what lacks a description."""
    stand_in_for_the_core()
    found = {
        "reference/commands.md": commands(),
        "reference/settings.md": settings(),
        "reference/metrics.md": metrics(),
        "reference/errors.md": errors(),
        "reference/environment.md": environment(),
    }
    return found | python_pages()


def stand_in_for_the_core() -> None:
    """Modules above the core can be imported afterwards, whether or not it is built."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    if not is_core_built():
        text = (ROOT / "cxlkv/_core/abi.py").read_text()
        (number,) = re.findall(r"^ABI = (\d+)", text, re.M)
        module = types.ModuleType("cxlkv._native")
        lib = MagicMock(CXLKV_ABI=int(number), cxlkv_abi=lambda: int(number))
        sys.modules["cxlkv._native"] = module
        module.__dict__.update(lib=lib, ffi=MagicMock())


def is_core_built() -> bool:
    """Whether cxlkv can be imported as it is; what a failed import leaves behind is taken out."""
    try:
        return find_spec("cxlkv._native") is not None
    except ImportError:  # find_spec imports the package, and that its core
        for name in [one for one in sys.modules if one.partition(".")[0] == "cxlkv"]:
            del sys.modules[name]
        return False


CODE = re.compile(
    r"(?<![\w`/.])"
    r'(\w+(?:\.\w+)*\([^()]*\)|"[\w:.]+"|[a-z]+(?:_\w+)+|(?:CXLKV|XDG)_\w+|\w+="?\w+"?)'
    r"(?![\w`])"
)


def escaped(text: str) -> str:
    """A docstring's words with code in backticks: no tags, no emphasis."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else of_prose(part) for part in parts)


def of_prose(text: str) -> str:
    parts = CODE.split(text)  # every other one is code
    for i in range(0, len(parts), 2):
        parts[i] = parts[i].replace("<", "&lt;").replace("*", r"\*")
    return "".join(f"`{part}`" if i % 2 else part for i, part in enumerate(parts))


# ---- commands ----


class Shown(typing.Protocol):
    """A command or a group, as typer makes it."""

    name: str | None
    help: str | None
    hidden: bool
    params: Sequence[object]


def commands() -> str:
    import typer

    from cxlkv.ops.cli import app

    parts = [
        "# Commands\n\n`cxlkv COMMAND --help` says the same. An expected failure is one line, "
        "`error: ...`, and exit code 1; a wrong option is exit code 2.\n"
    ]
    top = typer.main.get_command(app)
    for name, command in sorted(vars(top)["commands"].items()):
        parts += command_parts(f"cxlkv {name}", command, 2)
    return "\n".join(parts)


def command_parts(name: str, command: Shown, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{name}`\n"
    yield "\n\n".join(escaped(one) for one in inspect.cleandoc(command.help or "").split("\n\n"))
    yield ""
    for inner, each in vars(command).get("commands", {}).items():
        yield from command_parts(f"{name} {inner}", each, level + 1)
    table, rows = Table("option", "default", "what it does"), 0
    for option in (vars(one) for one in command.params):
        if option["name"] != "help" and not option["hidden"]:
            table.add(*option_cells(option))
            rows += 1
    if rows:
        yield str(table)


def option_cells(option: Mapping[str, object]) -> tuple[str, str, str]:
    opts = option["opts"]
    assert isinstance(opts, list)
    is_argument = not str(opts[0]).startswith("-")
    names = [str(option["name"]).upper()] if is_argument else [*map(str, opts)]
    default = option["default"]
    told = option.get("show_default")  # of one that the command works out
    default = told if isinstance(told, str) else default
    if option["required"]:
        shown = "needed"
    elif default in (None, (), [], False, ""):
        shown = ""
    else:
        shown = "on" if default is True else f"`{getattr(default, 'value', default)}`"
    return ", ".join(f"`{name}`" for name in names), shown, escaped(str(option["help"] or ""))


# ---- settings ----


def settings() -> str:
    from cxlkv import config
    from cxlkv.adapters.common.settings import PoolSettings
    from cxlkv.adapters.vllm import settings as vllm

    parts = [
        "# Settings\n\nA pool's YAML and engines' settings are checked by the same models, of "
        "which these tables are made. A mistake is named with file, line and key. How to write "
        "them: [a pool from a YAML file](configuration.md), [vLLM](../engines/vllm.md#settings), "
        "[SGLang](../engines/sglang.md#settings), [LMCache](../engines/lmcache.md#settings). "
        "A size is bytes, or text like `8GiB`.\n"
    ]
    for title, said, model in (
        ("Everywhere", "In a pool's YAML, and in each engine's settings.", config.PoolKeys),
        ("In a pool's YAML only", "Python reads them, engines do not.", config.PoolConfig),
        ("Layout: one shape", "Below `layout`.", config._OneShape),
        ("Layout: groups of layers", "Below `layout`.", config._Groups),
        ("Layout: one group", "An entry of `layer_groups`.", config._Group),
        ("Layout: objects", "Below `layout`, of a pool of objects.", config._Objects),
        ("Layout: in all forms", "Below `layout`.", config._Layout),
        ("In each engine", "Beside those that are everywhere.", PoolSettings),
        ("vLLM", "Beside those of each engine.", vllm.Settings),
        ("One request to vLLM", 'Below `"cxlkv"` in its `kv_transfer_params`.', vllm._Request),
    ):
        parts.append(f"## {title}\n\n{said}\n\n{fields_of(model)}")
    return "\n".join(parts)


def fields_of(model: type) -> Table:
    """The fields that a model declares itself."""
    table = Table("key", "type", "default", "what it says")
    own = [
        name
        for name in vars(model)["__annotations__"]
        if name in vars(model)["__pydantic_fields__"]
    ]
    hints = typing.get_type_hints(model, include_extras=True)
    told = meanings(inspect.getdoc(model) or "", own)
    inherited = {
        name for base in model.__mro__[1:] for name in vars(base).get("__annotations__", {})
    }
    own = [name for name in own if name in told or name not in inherited]
    if missing := [name for name in own if name not in told]:
        raise ValueError(f"the docstring of {model.__name__} has no `{missing[0]}: ...`")
    for name in own:
        field = vars(model)["__pydantic_fields__"][name]
        kind = field.description or kind_of(hints[name])
        default = "needed" if field.is_required() else shown(field.default)
        table.add(f"`{name}`", kind, default, escaped(told[name]))
    return table


def meanings(docstring: str, names: Sequence[str]) -> dict[str, str]:
    """What follows `name: ` or `name, name: ` at the beginning of a sentence."""
    text = " ".join(docstring.split("\n\nA message")[0].split())
    either = "|".join(map(re.escape, names))
    starts = [*re.finditer(rf"(?:^|(?<=[.;] ))((?:{either})(?:, (?:{either}))*): ", text)]
    found = {}
    for one, following in zip(starts, [*starts[1:], None], strict=True):
        said = text[one.end() : following.start() if following else len(text)]
        found.update(dict.fromkeys(one[1].split(", "), said.strip(" .;")))
    return found


def kind_of(hint: object) -> str:
    """What a value is, in words."""
    from cxlkv import config
    from cxlkv.adapters.vllm import settings as vllm

    for known, words in (
        (config.Size, "a size"),
        (config._Capacity, "a size, or `all`"),
        (config._DType, "`bfloat16`, `float16` or `float32`"),
        (config._Shard, "four whole numbers"),
        (vllm._Budget, "`true`, or keys of a [budget](../how-to/budgets.md)"),
        (config._AnyLayout, "keys below"),
        (bool, "`true` or `false`"),
        (int, "a whole number"),
        (float, "a number"),
        (str, "text"),
    ):
        if hint == known:
            return words
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in inner)
    if origin is list:
        return "a list"
    wanted = inner[:1] if origin is typing.Annotated else inner
    return ", ".join(kind_of(one) for one in wanted if one is not type(None))


def shown(default: object) -> str:
    if default in (None, (), ""):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


# ---- metrics ----


class Noted(NamedTuple):
    """A metric: its kind, name, labels and meaning."""

    kind: str
    name: str
    labels: Sequence[str]
    meaning: str


def noting(kind: str, found: list[Noted]) -> type:
    """Stands for prometheus_client's Counter or Gauge, and notes what is made of it."""

    class Noting:
        def __init__(
            self, *, name: str, documentation: str, labelnames: Sequence[str], **_: object
        ) -> None:
            found.append(Noted(kind, name, labelnames, documentation))

    return Noting


def metrics() -> str:
    from cxlkv.adapters.common import metrics as common
    from cxlkv.adapters.lmcache import metrics as lmcache
    from cxlkv.adapters.sglang import metrics as sglang
    from cxlkv.adapters.vllm import counting as vllm
    from cxlkv.ops.metrics import PoolCollector

    of_pools = [
        Noted(family.type, family.name, vars(family)["_labelnames"], family.documentation)
        for family in PoolCollector().describe()
    ]
    parts = [
        "# Metrics\n\nIn Prometheus' form. [Operations](../how-to/operations.md) says how to serve "
        "them and what to watch, [dashboard.json](../dashboard.json) is a board for Grafana.\n",
        "## Of pools\n\n`cxlkv metrics POOL...` serves them, and `cxlkv.ops.metrics.registry` is "
        f"for a program's own exporter.\n\n{table_of(of_pools)}",
        "`StatsCollector(NAME, stats)` adds a gauge `cxlkv_NAME_KEY` for each key that `stats()` "
        "of an object of the program has.\n",
    ]
    rooms = {"bytes": {**common.STATES, **common.IN_COLD, **common.QUOTA}}
    for title, prefix, counts, room, failures, page in (
        ("vLLM", vllm.PREFIX, vllm.COUNTS, vllm.CAPACITIES, None, "vllm"),
        ("SGLang", sglang.PREFIX, sglang.COUNTS | common.MOVES, rooms, sglang.KINDS, "sglang"),
        ("LMCache", lmcache.PREFIX, lmcache.COUNTS | common.MOVES, rooms, lmcache.KINDS, "lmcache"),
    ):
        found: list[Noted] = []
        types_ = noting("counter", found), noting("gauge", found)
        common.Metrics(*types_, prefix, [], counts, room)
        parts.append(
            f"## Of {title}\n\nAt the engine's own `/metrics`, with the engine's labels and "
            f"these. [{title}](../engines/{page}.md) says what to make of them.\n\n"
            f"{table_of(found)}"
        )
        if failures:
            table = Table("kind", "what it means")
            for kind, meaning in failures.items():
                table.add(f"`{kind}`", meaning)
            parts.append(f"Kinds of `{prefix}failures_total`:\n\n{table}")
    return "\n".join(parts)


def table_of(found: Iterable[Noted]) -> Table:
    table = Table("name", "type, labels", "meaning")
    for one in found:
        name = f"`{one.name}{'_total' * (one.kind == 'counter')}`"
        table.add(name, ", ".join([one.kind, *(f"`{n}`" for n in one.labels)]), one.meaning)
    return table


# ---- errors, variables ----


def errors() -> str:
    from cxlkv import errors as module

    table = Table("error", "what it means", "what to do")
    for name, error in vars(module).items():
        if not inspect.isclass(error) or error is module.CXLKVError:
            continue
        meaning, _, remedy = (inspect.getdoc(error) or "").partition("\n\nRemedy: ")
        if not remedy:
            raise ValueError(f"the docstring of {name} has no `Remedy: ...`")
        also = [f"`{base.__name__}`" for base in error.__bases__ if base is not module.CXLKVError]
        told = re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", escaped(remedy))
        table.add(f"`{name}`<br>{', '.join(also)}", escaped(meaning), told)
    root = escaped(inspect.getdoc(module.CXLKVError) or "")
    return (
        "# Errors\n\nEach is a `CXLKVError` of `cxlkv.errors`, and also the builtin named below "
        "it, so a program may catch either. The text of each names cause and remedy; this table "
        f"has what holds for all of a kind.\n\n{table}\n## `CXLKVError`\n\n{root}\n"
    )


def environment() -> str:
    read = {name for name in variables() if not OF_TESTS.fullmatch(name)}
    if read != set(VARIABLES):
        raise ValueError(f"docs/site/reference.py: VARIABLES differ: {read ^ set(VARIABLES)}")
    table = Table("variable", "what it says")
    for name, meaning in VARIABLES.items():
        table.add(f"`{name}`", meaning)
    return (
        f"# Environment variables\n\n{table}\nThose of the tests and of the C core's build are in "
        "[testing](../project/testing.md) and [packaging](../project/packaging.md).\n"
    )


def variables() -> set[str]:
    """Names of environment variables in the code that ships."""
    name = re.compile(r"(CXLKV|XDG)_[A-Z_]+")
    return {
        node.value
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if "_core" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        if isinstance(node.value, str) and name.fullmatch(node.value)
    } - {"CXLKV_TEST"}


# ---- Python ----


def python_pages() -> dict[str, str]:
    listed = {name for _, _, names in API.values() for name in names}
    missing = [name for name in public_names() if name not in listed]
    if missing:
        raise ValueError(f"docs/site/reference.py: API lacks {', '.join(sorted(missing))}")
    index = "# Python\n\nWhat is here is public; other names may change with any release.\n"
    made = {}
    for page, (title, said, names) in API.items():
        short = ", ".join(f"[`{name.rpartition('.')[2]}`]({page}.md#{name})" for name in names)
        index += f"\n**[{title}]({page}.md).** {said} {short}\n"
        blocks = "\n".join(map(block, names))
        made[f"reference/api/{page}.md"] = f"# {title}\n\n{said}\n\n{blocks}"
    index += "\n**[Errors](../errors.md)**, each with cause and remedy.\n"
    return {"reference/api/index.md": index, **made}


def block(name: str) -> str:
    """What mkdocstrings puts the documentation of a name in the place of."""
    if name.rpartition(".")[2] not in CONSTRUCTED:
        return f"::: {name}\n"
    options = ("merge_init_into_class: true", 'filters: ["!^_(?!_init__)", "!^reset_after_fork$"]')
    return f"::: {name}\n    options:\n" + "".join(f"      {one}\n" for one in options)


def public_names() -> set[str]:
    """Names in `__all__` of modules, each as it is imported."""
    found = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if parts[0] == "cxlkv" else ("cxlkv", *parts)
            module = ".".join(part for part in parts if part != "__init__")
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    found.update(f"{module}.{name}" for name in ast.literal_eval(node.value))
    return found - {"cxlkv.tiers.Tiers", *(f"cxlkv.{name}" for name in ERRORS)}
