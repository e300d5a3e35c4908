"""Reads a pool described in YAML, for CXLPool.from_config, and names what is wrong in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)

from cxlkv import _io_hooks
from cxlkv.errors import BadArgumentError
from cxlkv.layout import KVLayout, LayerGroup, dtype_name, format_bytes, parse_bytes
from cxlkv.machine import numa_mode
from cxlkv.machine.regions import ALL, capacity_bytes_at, parse_place, parse_where

FILE_BYTES_MAX = 64 << 10
NESTING_MAX = 8
VALUE_LETTERS_MAX = 60  # of a wrong value that a message repeats
ALIGNMENT_BYTES = 4 << 20  # a pool is at most this and one extent smaller than its capacity

# What to ask for, by pydantic's word for the mistake.
_WANTED = {
    "int_type": "a whole number is wanted",
    "bool_type": "true or false is wanted",
    "string_type": "text is wanted; in quotes if it looks like a number, a date or yes/no",
    "list_type": "a list is wanted",
    "tuple_type": "a list is wanted",
    "model_type": "keys and values are wanted",
    "model_attributes_type": "keys and values are wanted",
    "union_tag_not_found": "keys and values are wanted",
}

_Place = tuple[str | int, ...]  # ("layout", "layer_groups", 0, "window")


class _Keys(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _where(value: object) -> object:
    if not isinstance(value, str) or value == "anonymous:":
        return value
    if "$" in value:
        raise BadArgumentError(f"{value}: environment variables are not expanded: write the path")
    if ":" not in value and not value.startswith("/"):
        wanted = 'a path from the root is wanted, like /dev/shm/my.pool, or "anonymous:"'
        raise BadArgumentError(f"{_shown(value)}: {wanted}")
    parse_where(value)
    return value


def _emulated(value: object) -> object:
    if isinstance(value, str):
        if numa_mode.is_mode(value):
            numa_mode.parse(value)
        else:
            _io_hooks.plugin().parse(value)
    return value


TIERS = ("local", "cold", "cold_capacity", "compress", "policy", "remote", "remote_secret")
"""Keys of a PoolConfig that are of Tiers."""

_Size = Annotated[int, BeforeValidator(parse_bytes)]
_Capacity = Annotated[int | str, BeforeValidator(lambda v: v if v == ALL else parse_bytes(v))]
_DType = Annotated[str | None, BeforeValidator(lambda v: None if v is None else dtype_name(v))]
_Shard = Annotated[tuple[int, int, int, int], Field(strict=False)]  # YAML has lists only


class _Group(_Keys):
    layers: int
    kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    dtype: _DType = None
    window: int | None = None
    values: Literal["own", "key_prefix"] | None = None

    def make(self) -> LayerGroup:
        return LayerGroup(**self.model_dump(exclude_none=True))


class _Layout(_Keys):
    """What all forms have. None stands for KVLayout's own default."""

    shard: _Shard | None = None
    model_id: str | None = None


class _Objects(_Layout):
    object_bytes: Annotated[int, BeforeValidator(parse_bytes)]

    def make(self) -> KVLayout:
        return KVLayout.objects(**self.model_dump(exclude_none=True))


class _OneShape(_Layout):
    page_tokens: int | None = None
    layers: int
    kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    dtype: _DType = None

    def make(self) -> KVLayout:
        return KVLayout(**self.model_dump(exclude_none=True))


class _Groups(_Layout):
    page_tokens: int | None = None
    layer_groups: list[_Group]
    order: list[int] | None = None

    def make(self) -> KVLayout:
        groups = [group.make() for group in self.layer_groups]
        return KVLayout.of(groups, **self.model_dump(exclude_none=True, exclude={"layer_groups"}))


def _form(value: object) -> str | None:
    """Which of the three forms a layout has."""
    if isinstance(value, _Layout):
        return type(value).__name__
    if not isinstance(value, dict):
        return None
    if "object_bytes" in value:
        return "_Objects"
    return "_Groups" if "layer_groups" in value else "_OneShape"


_AnyLayout = Annotated[
    Annotated[_OneShape, Tag("_OneShape")]
    | Annotated[_Groups, Tag("_Groups")]
    | Annotated[_Objects, Tag("_Objects")],
    Discriminator(_form),
]


class PoolConfig(_Keys):
    """The keys of a pool's configuration; docs/configuration.md explains them.

    layout may be missing where the caller of read_config() has one.
    """

    where: Annotated[str, BeforeValidator(_where)]
    capacity: _Capacity
    layout: _AnyLayout | None = None
    checksum: bool = True
    sketch: bool = True
    sharing: Literal["host", "hw_coherent", "software"] = "host"
    durable: Literal["process", "host"] = "process"
    hosts: int | None = None
    host: int | Literal["auto"] | None = None
    lease_s: float = 2.0
    threads: int | None = None
    huge: Literal["never", "try", "require"] | None = None
    emulate: Annotated[str | None, BeforeValidator(_emulated)] = None
    local: _Size | None = None
    cold: str | None = None
    cold_capacity: _Size | None = None
    compress: Literal["zstd"] | None = None
    policy: Literal["adaptive", "lru", "mass", "s3fifo"] | None = None
    remote: str | list[str] | None = None
    remote_secret: str | None = None
    if_missing: Literal["create", "error"] = "create"
    if_exists: Literal["open", "error", "replace"] = "open"

    def stores_objects(self, layout: KVLayout) -> bool:
        """Of what read_config() returned; also where the pool cannot be made."""
        if self.layout is not None:
            return isinstance(self.layout, _Objects)
        return layout.object_bytes is not None

    def differences(
        self,
        layout: KVLayout,
        there_layout: KVLayout,
        geometry: Mapping[str, int],
        there: Mapping[str, object],
    ) -> list[str]:
        """How a pool that is there differs from the one described, of `layout`, key by key; `there`
        has what it was made with: checksum, sketch, sharing, durable, hosts."""
        found = list(_layout_differences(there_layout, layout))
        for name, value in there.items():
            wanted = getattr(self, name)
            if name == "sketch" and self.stores_objects(layout):
                continue
            if wanted is not None and value != wanted:
                found.append(f"{name} is {_shown(value)} there, {_shown(wanted)} wanted")
        there_bytes = geometry["region_bytes"]
        wanted_bytes = capacity_bytes_at(parse_place(self.where), self.capacity)
        largest_bytes = there_bytes + geometry["extent_bytes"] + ALIGNMENT_BYTES
        if not there_bytes <= wanted_bytes <= largest_bytes:
            size = format_bytes(wanted_bytes)
            found.append(f"capacity is {format_bytes(there_bytes)} there, {size} wanted")
        return found


def _layout_differences(there: KVLayout, wanted: KVLayout) -> Iterator[str]:
    pairs: list[tuple[str, object, object]] = [("layout", there, wanted)]
    if there.object_bytes != wanted.object_bytes:
        yield f"layout is of {_stored(there)} there, of {_stored(wanted)} wanted"
        return
    if len(there.groups) == len(wanted.groups):
        groups = enumerate(zip(there.groups, wanted.groups, strict=True))
        several = len(there.groups) > 1
        pairs += [(f"layer_groups[{i}]" if several else "layout", *two) for i, two in groups]
    elif there.groups != wanted.groups:
        yield f"layout has {len(there.groups)} layer groups there, {len(wanted.groups)} wanted"
    for name, mine, yours in pairs:
        for one in fields(mine):  # type: ignore[arg-type]
            old, new = getattr(mine, one.name), getattr(yours, one.name)
            told = one.name == "groups" or (one.name == "order" and there.groups != wanted.groups)
            if old != new and not told:
                yield f"{name}.{one.name} is {_shown(old)} there, {_shown(new)} wanted"


def _stored(layout: KVLayout) -> str:
    size = layout.object_bytes
    return "K and V" if size is None else f"objects up to {format_bytes(size)}"


def read_config(
    config: str | os.PathLike[str] | Mapping[str, object], layout: KVLayout | None = None
) -> tuple[PoolConfig, KVLayout]:
    """The checked configuration in a YAML file, or in a mapping of the same keys, and its layout.

    layout: where the configuration has none. Raises BadArgumentError, which names the file, the
    line, the key, what is wrong with it and what is allowed, for all mistakes at once.
    """
    if isinstance(config, Mapping):
        return _checked(config, _Source("the configuration", {}), layout)
    if not isinstance(config, (str, os.PathLike)):
        raise BadArgumentError(f"a configuration is a path or a mapping, not {_shown(config)}")
    name = os.fspath(config)
    return _checked(*_parsed(name, _text_of(name)), layout)


def read_yaml(path: str) -> Mapping[str, object]:
    """The keys and values of a plain YAML file, not validated yet. Raises
    BadArgumentError."""
    return _parsed(path, _text_of(path))[0]


@dataclass(frozen=True)
class _Source:
    """Where a configuration came from: its name, and the line of each place in it."""

    name: str
    lines: Mapping[_Place, int]

    def mistake(self, place: _Place, what: str) -> str:
        """`what` is wrong at `place`; the nearest line that is known goes before it."""
        nearest = next((place[:n] for n in range(len(place), 0, -1) if place[:n] in self.lines), ())
        line = f", line {self.lines[nearest]}" if nearest in self.lines else ""
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
        return f"{self.name}{line}: {key.removeprefix('.')}{': ' if key else ''}{what}"


def _text_of(name: str) -> str:
    try:
        if not Path(name).is_file():
            what = "no file" if Path(name).exists() else "nothing there"
            raise BadArgumentError(f"{name}: {what}; the path of a YAML file is wanted")
        with Path(name).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, BadArgumentError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadArgumentError(f"{name[:VALUE_LETTERS_MAX]}: cannot be read: {reason}") from None
    if len(data) > FILE_BYTES_MAX:
        most = format_bytes(FILE_BYTES_MAX)
        raise BadArgumentError(f"{name}: larger than {most}: no pool's configuration")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadArgumentError(f"{name}: not text in UTF-8, so no YAML") from None


def _parsed(name: str, text: str) -> tuple[Mapping[str, object], _Source]:
    """The keys and values in `text`, and where they stand."""
    try:
        _refuse_tricks(name, text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(node, yaml.MappingNode):
            lines = dict(_lines_of(name, node, ()))
            return yaml.safe_load(text), _Source(name, lines)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        hint = "; put text that holds a colon in quotes" if "mapping values" in str(error) else ""
        raise BadArgumentError(f"{name}{line}: no YAML: {error.problem}{hint}") from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise BadArgumentError(f"{name}: no YAML: {reason}") from None
    if node is None or not node.value:
        raise BadArgumentError(f"{name}: empty; where, capacity and layout are wanted")
    raise BadArgumentError(f"{name}: keys and values are wanted, like `capacity: 8GiB`")


def _refuse_tricks(name: str, text: str) -> None:
    """Raises for what YAML can do and a pool's configuration needs not, before it is built: an
    alias repeated a few times makes gigabytes, nesting ends in a RecursionError."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        trick = None
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            trick = "anchors and aliases (&, *) are not read: write the value twice"
        elif getattr(event, "tag", None):
            trick = "tags (!) are not read: leave it out"
        elif depth > NESTING_MAX:
            trick = f"nested more than {NESTING_MAX} deep"
        elif documents > 1:
            trick = "a second document begins (---): one pool to a file"
        if trick:
            raise BadArgumentError(f"{name}, line {line}: {trick}")


def _lines_of(name: str, node: yaml.Node, place: _Place) -> Iterator[tuple[_Place, int]]:
    """Each place below `node` and its line; raises for a key that comes twice, which PyYAML lets
    pass, and for a key that is no word."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*place, index), item.start_mark.line + 1
            yield from _lines_of(name, item, (*place, index))
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(_Source(name, {place: node.start_mark.line + 1}), node, place)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[_Place, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            raise BadArgumentError(f"{name}, line {line}: a key is a word, not {_shown(key.value)}")
        inner = (*place, key.value)
        if inner in first:
            source = _Source(name, {inner: line})
            what = f"the key stands in line {first[inner]} already; leave one of them out"
            raise BadArgumentError(source.mistake(inner, what))
        first[inner] = line
        yield inner, line
        yield from _lines_of(name, value, inner)


def _check_scalar(source: _Source, node: yaml.ScalarNode, place: _Place) -> None:
    """Raises for a date or a number that cannot be, which PyYAML lets through as it comes."""
    try:
        yaml.constructor.SafeConstructor().construct_object(node)
    except (ValueError, OverflowError):
        what = f"{_shown(node.value)} cannot be read; in quotes it is text"
        raise BadArgumentError(source.mistake(place, what)) from None


def _checked(
    data: Mapping[str, object], source: _Source, layout: KVLayout | None
) -> tuple[PoolConfig, KVLayout]:
    for key in data:
        if not isinstance(key, str):
            raise BadArgumentError(f"{source.name}: a key is a word, not {_shown(key)}")
    try:
        config = PoolConfig.model_validate(dict(data))
    except ValidationError as error:
        found = [
            _explained(source, e["type"], e["loc"], e["input"], e["msg"], e.get("ctx") or {})
            for e in error.errors(include_url=False)
        ]
        if layout is None and "layout" not in data:
            found.append(source.mistake(("layout",), "the key is missing"))
        raise BadArgumentError("\n".join(found)) from None
    if (config.layout is None) == (layout is None):
        what = "the key is missing" if layout is None else "the caller has one: leave this out"
        raise BadArgumentError(source.mistake(("layout",), what))
    if config.layout is not None:
        _check_layout(source, config.layout)
        layout = config.layout.make()
    assert layout is not None
    if config.stores_objects(layout) and "sketch" in config.model_fields_set and config.sketch:
        what = "objects have no keys to be sketched: leave this out"
        raise BadArgumentError(source.mistake(("sketch",), what))
    if parse_where(config.where) is None and config.if_missing == "error":
        what = "an anonymous pool is never there before: leave this out, or give a path"
        raise BadArgumentError(source.mistake(("if_missing",), what))
    return config, layout


def _check_layout(source: _Source, layout: _OneShape | _Groups | _Objects) -> None:
    """Raises for numbers that are whole, and still no layout; a message begins with the key."""
    place: _Place = ("layout",)
    try:
        for index, group in enumerate(layout.layer_groups if isinstance(layout, _Groups) else ()):
            place = ("layout", "layer_groups", index)
            group.make()
        place = ("layout",)
        layout.make()
    except BadArgumentError as error:
        key = re.split(r"\W", str(error))[0]
        place = (*place, key) if (*place, key) in source.lines else place
        raise BadArgumentError(source.mistake(place, str(error))) from None


def _explained(
    source: _Source,
    kind: str,
    at: _Place,
    value: object,
    text: str,
    context: Mapping[str, object],
) -> str:
    """One mistake that pydantic found, in our words."""
    form = at[1] if at[:1] == ("layout",) and len(at) > 1 else ""
    place = at[:1] + at[2:] if form else at  # without the name of the form
    if kind == "extra_forbidden":
        return source.mistake(place, _unknown_key(place, str(form)))
    if "shard" in place and kind in ("missing", "too_long"):
        what = "four numbers are wanted: tp rank, tp size, pp rank, pp size"
        return source.mistake(place[:2], what)
    if kind == "missing":
        return source.mistake(place, "the key is missing")
    if kind == "value_error":
        return source.mistake(place, str(context["error"]))
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        return source.mistake(place, f"{_shown(value)}; allowed: {choices}")
    return source.mistake(place, f"{_shown(value)}: {_WANTED.get(kind, text)}")


def _unknown_key(place: _Place, form: str) -> str:
    forms: dict[str, type[_Keys]] = {
        "_OneShape": _OneShape, "_Groups": _Groups, "_Objects": _Objects, "": PoolConfig
    }  # fmt: skip
    model = _Group if "layer_groups" in place else forms[form]
    common = ("page_tokens", *_Layout.model_fields)
    known = sorted(model.model_fields, key=lambda k: common.index(k) if k in common else -1)
    near = get_close_matches(str(place[-1]), known, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    more = ""
    if model is _OneShape:
        more = "; or layer_groups, for layers of several kinds; or object_bytes, for objects"
    return f"unknown key{meant}; allowed here: {', '.join(known)}{more}"


def _shown(value: object) -> str:
    """A value in a message, never long."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", False: "false", True: "true"}[value]
    text = repr(value) if isinstance(value, (str, list, dict)) else str(value)
    return text if len(text) <= VALUE_LETTERS_MAX else text[:VALUE_LETTERS_MAX] + "..."
