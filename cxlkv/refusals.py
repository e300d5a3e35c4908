"""The one table of names that were taken out, with what to say instead of each.

A line stays for one release. Whoever takes a name out adds its line; each door looks its own table
up before it says that a name is unknown: config.py SETTINGS, ops/cli.py COMMANDS and OPTIONS,
bench/registry.py REMOVED_CASES, and modules and classes NAMES and ARGUMENTS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

from cxlkv.errors import BadArgumentError

SETTINGS: dict[str, str] = {
    "checksum": "every piece has one; CXLPool.create(checksum=False) makes a pool without",
    "emulate": "say it in the environment: CXLKV_EMULATE=numa:1, or the profile of a link",
    "if_exists": "a pool that is there is opened; to make another, `cxlkv pool remove PATH` first",
    "if_missing": "a missing pool is made; CXLPool.open() only opens",
    **dict.fromkeys(
        ("k_encoding", "v_encoding"), "say encoding: int8,int4 beside layout: of keys and of values"
    ),
    "rotary": "give layout=layout_of(model), which knows it, or KVLayout(rotary=) in Python",
    "policy: mass": "leave it out: adaptive, the default, mostly has more hits",
    "policy: s3fifo": "leave it out: adaptive, the default, mostly has more hits",
}
"""A key of YAML or of an engine's settings, "key", or a value of one, "key: value"."""

COMMANDS: dict[str, str] = {
    "bench list": "say cxlkv bench",
    "pool hosts": "say cxlkv pool inspect",
}
"""A command's words behind cxlkv: "pool watch"."""

_SHAPE = "say --layout '{layers: 32, kv_heads: 8, head_dim: 128, page_tokens: 16, dtype: bf16}'"
_HOST = "say CXLKV_HOST=N before the command"

OPTIONS: dict[str, str] = {
    **{
        f"{command} --{name}": _SHAPE
        for command in ("advise", "pool create")
        for name in ("layers", "kv-heads", "head-dim", "page-tokens", "dtype")
    },
    "advise --config": "say --layout: it takes a pool's YAML file, too",
    "advise --decode-tokens": "128 are decoded behind each hit",
    "advise --link-gb-per-s": "the link is measured where there is a GPU",
    **{
        f"advise --{name}": "say --prefill-tokens-per-s, as your engine's log has it"
        for name in ("parameters", "q-heads", "tflops")
    },
    "bench compare --threshold": "10 % is let pass; --json has each change",
    "bench report --mlc": "the page has our figures; mlc prints its own",
    **{
        f"bench run --{name}": "replay judges policies alone"
        for name in ("near", "far", "local", "cold", "pool", "policy")
    },
    "bench run --csv": "--json has all figures",
    "bench run --minutes": "give --trace a file with that much of the trace",
    "demo --dense-layers": "Budget(dense_layers=) does it in Python",
    "demo --handover": "hand_over() and take_over() are in docs/engines/handover.md",
    "demo --picture": "it is drawn into cxlkv-demo.png, or beside the file of --json",
    "demo --tiny": "leave it out: SmolLM2 answers, offline once it is installed",
    "doctor --port": "an engine's own port is tried",
    "info --root": "it is about this machine",
    "lab encodings --encodings": "say --forms",
    "lab run --steps": "--texts and --quick measure less",
    **{f"metrics --{name}": "say --listen HOST:PORT" for name in ("address", "port")},
    "ndp-worker --pool": "say cxlkv ndp-worker PATH",
    "ndp-worker --slots": "8 processes are served",
    **{
        f"{command} --host": _HOST
        for command in (
            *("pool create", "pool inspect", "pool check", "pool fence", "serve", "ndp-worker"),
        )
    },
    "pool create --object-bytes": "say --layout '{object_bytes: 2MiB}'",
    **{
        f"pool create --{name}": "say --capacity, which cxlkv size MODEL knows"
        for name in ("tokens", "requests")
    },
    **{f"pool {name} --json": "its one line is the result" for name in ("fence", "upgrade")},
    "pool gc --dry-run": "it asks before it removes; --json without --yes only lists",
    "serve --connections": "32 peers are served; cxlkv.transport.Server takes another number",
    "serve --port": "say --listen HOST:PORT",
    **{
        f"size --{name}": "pages have 16 tokens of the model's type; KVLayout takes others"
        for name in ("page-tokens", "dtype")
    },
    "tune --threads": "all CPUs that it may use measure",
}
"""An option behind its command, "pool create --option", or with a value, "demo --option value"."""

REMOVED_CASES: dict[str, str] = {
    **dict.fromkeys(("latency", "bandwidth", "copy"), "say memory"),
    **{
        name: f"say foundation/{name}" for name in ("calls", "pages", "transfer", "gather", "paged")
    },
    **{f"decode-{name}": f"say decode/{name}" for name in ("shapes", "attention", "steps")},
    **{
        name: f"say tiers/{name}"
        for name in ("hotness", "policy", "prefix", "moves", "residency", "cold", "compression")
    },
    **dict.fromkeys(("alloc", "allocating"), "say foundation/pages"),
    "copying": "say foundation/transfer",
    "publish": "say coherence",
    "calling": "say foundation/calls",
    **dict.fromkeys(("selecting", "selection"), "say ndp"),
    "grouping": "say windows",
    "working": "say worker",
    "deciding": "say tiers/policy",
    "matching": "say tiers/prefix",
    "moving": "say tiers/moves",
    "decoding": "say tiers/residency",
    "packing": "say tiers/compression",
    "peers": "say store",
}
"""A case of `cxlkv bench`."""

NAMES: dict[str, str] = {
    "cxlkv.admin": "say cxlkv.pool.admin",
    "cxlkv.rotary": "say cxlkv.Rotary",
    "cxlkv.sizes": "say cxlkv.machine.sizes",
    **{f"cxlkv.{name}": f"say cxlkv.machine.{name}" for name in ("certificate", "costs")},
    **{f"cxlkv.{name}": f"say cxlkv.ops.{name}" for name in ("cli", "metrics")},
    **{
        f"cxlkv.{name}": f"say cxlkv.tiers.{name}"
        for name in ("cold", "cold_mooncake", "cold_store", "policy", "prefetch")
    },
    "cxlkv.emulation.incoherent": "say python -m tests.native.incoherent in a checkout",
    "cxlkv.near": "say cxlkv.tiers.local",
    "cxlkv.tenants": "say cxlkv.tiers.quota",
    "cxlkv.stats.look": "say cxlkv.stats.inspect",
    **{
        f"Pool.{name}": f"say pool.admin.{name}"
        for name in (
            *("audit", "check", "fence", "hosts", "overview", "pin", "prefault", "scrub", "unpin"),
        )
    },
    "Tiers.near": "say Tiers.local",
}
"""A module, what stands in one, or an attribute, "Class.name"."""

ARGUMENTS: dict[str, str] = {
    "CXLCache(near=)": 'say attention="pool" for near=True, attention="gpu" for near=False',
    "CXLCache(attention='device')": 'say attention="gpu"; on_choice, and pools that keep keys and '
    'values in other encodings than int8 and int4, have attention="pool"',
    "CXLCache(dense_layers=)": "say budget=Budget(dense_layers=)",
    "Tiers(near=)": "say local=",
}
"""A keyword argument, "Callable(name=)", or a value of one, "Callable(name='value')"."""


def refusal(table: Mapping[str, str], name: str) -> str | None:
    """What to tell somebody who says `name`; None where it was not taken out."""
    return f"{name} was taken out: {table[name]}" if name in table else None


def refused_words(words: Sequence[str]) -> str | None:
    """What to tell somebody who gives these words of a command line, behind cxlkv."""
    for name in COMMANDS:
        if " ".join(words[: len(name.split())]) == name:
            return refusal(COMMANDS, name)
    for name in OPTIONS:
        command, _, option = name.partition(" --")
        rest = words[len(command.split()) :]
        said = f" {' '.join(rest)} ".replace("=", " ")
        if [*words] == [*command.split(), *rest] and f" --{option} " in said:
            return refusal(OPTIONS, name)
    return None


def no_attribute(module: str, name: str) -> NoReturn:
    """For a module's __getattr__. Raises AttributeError, which hasattr() expects."""
    raise AttributeError(
        refusal(NAMES, f"{module}.{name}") or f"module {module!r} has no attribute {name!r}"
    )


def refuse_arguments(callee: str, given: Mapping[str, object]) -> None:
    """Raises BadArgumentError for an argument that was taken out, TypeError for any other."""
    for name in given:
        if text := refusal(ARGUMENTS, f"{callee}({name}=)"):
            raise BadArgumentError(text)
        raise TypeError(f"{callee}() got an unexpected keyword argument {name!r}")


def refuse_value(callee: str, name: str, value: object) -> None:
    """Raises BadArgumentError for a value that was taken out."""
    if text := refusal(ARGUMENTS, f"{callee}({name}={value!r})"):
        raise BadArgumentError(text)


class _Refused:
    """An attribute that can neither be read nor set."""

    def __init__(self, text: str):
        self.text = text

    def __get__(self, instance: object, owner: type) -> object:
        if instance is None:
            return self
        raise AttributeError(self.text)

    def __set__(self, instance: object, value: object) -> NoReturn:
        raise AttributeError(self.text)


Kind = TypeVar("Kind", bound=type)


def refusing(kind: Kind) -> Kind:
    """Decorates a class that had names of NAMES.

    Not by __getattr__: all attributes of a class that has one are slower.
    """
    for name in attributes_of(kind.__name__):
        setattr(kind, name, _Refused(str(refusal(NAMES, f"{kind.__name__}.{name}"))))
    return kind


def attributes_of(kind: str) -> Iterator[str]:
    """What was taken out of the class of this name."""
    return (name.removeprefix(f"{kind}.") for name in NAMES if name.startswith(f"{kind}."))
