"""Checks what users write, in YAML or in an engine's settings, and names what is wrong in it.

Each kind of it is a model whose fields are the keys. What a pool's YAML (CXLPool.from_config) and
settings of engines (cxlkv.adapters) both have is declared once, in PoolKeys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from cxlkv.errors import SHOWN_LETTERS_MAX, BadArgumentError, shown
from cxlkv.layout import (
    KVLayout,
    LayerGroup,
    States,
    differences,
    dtype_name,
    encodings_of,
    format_bytes,
    parse_bytes,
)
from cxlkv.machine.coherence import AUTO, HOSTS_MAX, LEASE_MAX_S, LEASE_S
from cxlkv.machine.regions import ALL, capacity_bytes_at, meant_by, parse_place, parse_where
from cxlkv.refusals import SETTINGS, refusal

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from typing_extensions import Self

FILE_BYTES_MAX = 64 << 10
NESTING_MAX = 8
ALIGNMENT_BYTES = 4 << 20  # a pool is at most this and one extent smaller than its capacity

# What to ask for, by pydantic's word for the mistake, where the key has no description of its own.
_WANTED = {
    "int_type": "a whole number is wanted",
    "float_type": "a number is wanted",
    "bool_type": "true or false is wanted",
    "string_type": "text is wanted; in quotes if it looks like a number, a date or yes/no",
    "list_type": "a list is wanted",
    "tuple_type": "a list is wanted",
    "model_type": "keys and values are wanted",
    "model_attributes_type": "keys and values are wanted",
    "union_tag_not_found": "keys and values are wanted",
}

_Place = tuple[str | int, ...]  # ("layout", "layer_groups", 0, "window")


class Keys(BaseModel):
    """The message about a wrong value ends with the description of its field."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


Model = TypeVar("Model", bound=Keys)


def _rooted(value: str) -> str:
    if "$" in value:
        raise BadArgumentError(f"{value}: environment variables are not expanded: write the path")
    if ":" not in value and not value.startswith("/"):
        like = meant_by(value) or f"/dev/shm/{os.path.basename(value) or 'my.pool'}"
        raise BadArgumentError(f"{shown(value)}: a path from the root is wanted: write {like}")
    return value


def _parsable(value: str) -> str:
    parse_where(value)
    return value


def _listed(value: object) -> object:
    """One, or a list of them, that has some."""
    if isinstance(value, list) and value:
        return tuple(value)
    return (value,) if isinstance(value, str) else value


TIERS = ("local", "cold", "cold_capacity", "compress", "policy", "remote", "remote_secret")
"""Keys of a PoolConfig that are of Tiers."""

Size = Annotated[int, BeforeValidator(parse_bytes)]
Where = Annotated[str, AfterValidator(_rooted)]
_Capacity = Annotated[int | str, BeforeValidator(lambda v: v if v == ALL else parse_bytes(v))]
_DType = Annotated[str | None, BeforeValidator(lambda v: None if v is None else dtype_name(v))]
_Encodings = Annotated[str, AfterValidator(lambda v: ",".join(dict.fromkeys(encodings_of(v))))]
_Shard = Annotated[tuple[int, int, int, int], Field(strict=False)]  # YAML has lists only


class _Group(Keys):
    """Layers of one shape; groups of one pool differ in layers and window only.

    layers: how many. kv_heads: heads of K and V. head_dim: channels of a key. value_head_dim: of a
    value, if it has another number. dtype: of K and V, bfloat16 if not given. window: tokens that a
    layer of a sliding window sees. values: "key_prefix": they are the first channels of the keys,
    as in MLA.
    """

    layers: int
    kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    dtype: _DType = None
    window: int | None = None
    values: Literal["own", "key_prefix"] | None = None

    def make(self) -> LayerGroup:
        return LayerGroup(**self.model_dump(exclude_none=True))


class _States(Keys):
    """bytes: of one state checkpoint. digest: of what is in it."""

    bytes: Size
    digest: int


def _states(given: _States | None) -> States | None:
    return None if given is None else States(**given.model_dump())


class _Layout(Keys):
    """What all forms have. None stands for KVLayout's own default.

    shard: [tp rank, tp size, pp rank, pp size]. model_id: text that tells pools of two models
    apart.
    """

    shard: _Shard | None = None
    model_id: str | None = None


class _Objects(_Layout):
    """A pool of whole objects. object_bytes: the most that one may have. slot: what it takes as
    many of as it needs; without it each takes one of object_bytes."""

    object_bytes: Size
    slot: Size | None = None

    def make(self) -> KVLayout:
        return KVLayout.objects(**self.model_dump(exclude_none=True))


class _OneShape(_Layout):
    """All layers are alike.

    page_tokens: tokens of a page, 16 if not given. layers: how many. kv_heads: heads of K and V.
    head_dim: channels of a key. value_head_dim: of a value, if it has another number. dtype: of K
    and V, bfloat16 if not given. states: of the model's state checkpoints, as cxlkv.States has it.
    """

    page_tokens: int | None = None
    layers: int
    kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    dtype: _DType = None
    states: _States | None = None

    def make(self) -> KVLayout:
        keys = self.model_dump(exclude_none=True, exclude={"states"})
        return KVLayout(**keys, states=_states(self.states))


class _Groups(_Layout):
    """Some layers see a sliding window.

    page_tokens: tokens of a page, 16 if not given. layer_groups: a list of groups. order: which
    group each layer of the model belongs to, from 0; if not given, the groups follow one another.
    states: as in a layout of one shape.
    """

    page_tokens: int | None = None
    layer_groups: list[_Group]
    order: list[int] | None = None
    states: _States | None = None

    def make(self) -> KVLayout:
        groups = [group.make() for group in self.layer_groups]
        keys = self.model_dump(exclude_none=True, exclude={"layer_groups", "states"})
        return KVLayout.of(groups, **keys, states=_states(self.states))


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

_REMOTE = r"^(tcp://[^/?]+:\d+/?|rdma://[^/?]+:\d+/?\?device=[^/?]+)$"
_FOR_HOSTS = (
    " is for a pool that hosts share: add {sharing}, software, or hw_coherent where the hardware "
    "keeps their caches coherent"
)
_BOTH = ": the address of a `cxlkv serve`, and the file with its secret, of mode 0600"


class PoolKeys(Keys):
    """What a pool's YAML and engines' settings both have; see docs/reference/configuration.md.

    where: the pool's file or device, a path from the root. capacity: of the pool, if it is to be
    made; "all" of a device, or of a file that is there. sharing: "host": one host uses the pool;
    "software": several whose caches do not see each other; "hw_coherent": several whose caches the
    hardware keeps coherent. hosts: how many may share it, 8 if not given. host: which one this is;
    CXLKV_HOST in the environment if not given. lease_s: a host that gives no sign for so many
    seconds is suspected by the others. cold: the file for pages that make room, or
    mooncake://HOST:PORT. cold_capacity: its size. compress: records in the file are made smaller.
    policy: which pages make room. remote: pools of other machines, where prefixes are looked for
    that neither the pool nor cold has. remote_secret: the file with the secret by which they are
    served. encoding: what keys and values are kept as, none, int8, int4, fp8_e4m3 or progressive;
    or two, of keys and of values: int8,int4. huge: all of the memory comes into place before the
    call returns, by huge pages (require), where the kernel makes such (try), or by small ones
    (never); as it is used if not given.

    A message on keys that do not go together has them in braces, the wrong one first.
    """

    where: Where
    capacity: _Capacity | None = None
    sharing: Literal["host", "hw_coherent", "software"] = "host"
    hosts: Annotated[int, Field(ge=1, le=HOSTS_MAX)] | None = Field(
        None, description=f"a whole number from 1 to {HOSTS_MAX}"
    )
    host: Annotated[int, Field(ge=0, lt=HOSTS_MAX)] | Literal["auto"] | None = Field(
        None,
        description=f'a whole number from 0 to {HOSTS_MAX - 1}, or "{AUTO}": one that no other '
        "machine has",
    )
    lease_s: float = Field(
        LEASE_S, ge=0.01, le=LEASE_MAX_S, description=f"a number from 0.01 to {LEASE_MAX_S}"
    )
    cold: str | None = None
    cold_capacity: Size | None = None
    compress: Literal["zstd"] | None = None
    policy: Literal["adaptive", "lru"] = "adaptive"
    remote: Annotated[
        tuple[Annotated[str, Field(pattern=_REMOTE)], ...], BeforeValidator(_listed)
    ] = Field(
        (),
        description="tcp://HOST:PORT of a `cxlkv serve`, or rdma://HOST:PORT?device=NAME, the "
        "device being this machine's; or a list of such",
    )
    remote_secret: str | None = None
    encoding: _Encodings = "none"
    huge: Literal["never", "try", "require"] | None = None

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        alone, cold = self.sharing == "host", self.cold is not None
        file = cold and not str(self.cold).startswith("mooncake://")
        for wrong, what in (
            (alone and self.hosts not in (None, 1), "{hosts}" + _FOR_HOSTS),
            (alone and self.host is not None, "{host}" + _FOR_HOSTS),
            (
                file and self.cold_capacity is None,
                "{cold} needs {cold_capacity}, of its files together, like 200GiB: they are "
                "reserved on the disk at the start",
            ),
            (not cold and self.cold_capacity, "{cold_capacity} goes with {cold}: add it"),
            (not cold and self.compress, "{compress} goes with {cold}: add it"),
            (cold and not file and self.compress, "{compress} goes with files, not mooncake://"),
            (self.remote and not self.remote_secret, "{remote} needs {remote_secret}" + _BOTH),
            (self.remote_secret and not self.remote, "{remote_secret} needs {remote}" + _BOTH),
        ):
            if wrong:
                raise BadArgumentError(what)
        return self


class PoolConfig(PoolKeys):
    """A pool's YAML. layout may be missing where the caller of read_config() has one.

    layout: what the pool stores. sketch: keys are also kept in 2 bits a channel, for
    select(method="two_stage"); if not given, where they are not encoded. durable: what was
    published outlives its process, or its host. threads: that scan and copy in this process; the
    CPUs that it may use if not given. local: memory of this process for copies of hot pages.
    """

    where: Annotated[Where, AfterValidator(_parsable)]
    capacity: _Capacity
    layout: _AnyLayout | None = None
    sketch: bool | None = None
    durable: Literal["process", "host"] = "process"
    threads: int | None = None
    local: Size | None = None

    def of_tiers(self) -> list[str]:
        """Keys that were given, and that are of Tiers."""
        return [k for k in TIERS if k in self.model_fields_set and getattr(self, k) is not None]

    def stores_objects(self, layout: KVLayout) -> bool:
        """True if the settings that read_config() returned describe objects, even where the pool
        cannot be made.
        """
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
        has what it was made with: sketch, sharing, durable, hosts."""
        found = list(differences(there_layout, layout))
        for name, value in there.items():
            wanted = getattr(self, name)
            if wanted is not None and value != wanted:
                found.append(f"{name} is {shown(value)} there, {shown(wanted)} wanted")
        there_bytes = geometry["region_bytes"]
        wanted_bytes = capacity_bytes_at(parse_place(self.where), self.capacity)
        largest_bytes = there_bytes + geometry["extent_bytes"] + ALIGNMENT_BYTES
        if not there_bytes <= wanted_bytes <= largest_bytes:
            size = format_bytes(wanted_bytes)
            found.append(f"capacity is {format_bytes(there_bytes)} there, {size} wanted")
        return found


class _WholeConfig(PoolConfig):
    layout: _AnyLayout


def read_config(
    config: str | os.PathLike[str] | Mapping[str, object], layout: KVLayout | None = None
) -> tuple[PoolConfig, KVLayout]:
    """The checked configuration in a YAML file, or in a mapping of the same keys, and its layout.

    layout: where the configuration has none. Raises BadArgumentError, which names the file, the
    line, the key, what is wrong with it and what is allowed, for all mistakes at once.
    """
    if isinstance(config, Mapping):
        return _checked_pool(config, Source("the configuration"), layout)
    if not isinstance(config, (str, os.PathLike)):
        raise BadArgumentError(f"a configuration is a path or a mapping, not {shown(config)}")
    return _checked_pool(*read_yaml(os.fspath(config)), layout)


def read_layout(name: str, text: str) -> KVLayout:
    """The layout of these keys in YAML: {layers: 32, kv_heads: 8, head_dim: 128}."""
    keys, _ = _parsed(name, text)
    whole = {"where": "anonymous:", "capacity": 1, "layout": dict(keys)}
    return _checked_pool(whole, Source(name), None)[1]


def for_call(name: str, layout: KVLayout, *, where: object, **given: object) -> PoolConfig:
    """The same for the arguments of a call, which may name a path from where it runs."""
    if not isinstance(layout, KVLayout):
        raise BadArgumentError(f"layout is a KVLayout, not {type(layout).__name__}")
    if isinstance(where, str) and where and ":" not in where and not meant_by(where):
        where = os.path.abspath(where)
    if layout.object_bytes is not None:
        given.pop("sketch", None)  # as create() does
    return _checked_pool({"where": where, **given}, Source(name), layout)[0]


@dataclass(frozen=True)
class Source:
    """Where keys were written: in a file, those with a line, the others in the place `name`, each
    with the prefix before it. written: what was there in full, where that is another."""

    name: str
    file: str = ""
    lines: Mapping[_Place, int] = field(default_factory=dict)
    prefix: str = ""
    written: Mapping[str, str] = field(default_factory=dict)

    def mistake(self, place: _Place, what: str) -> str:
        """`what` is wrong at `place`; the nearest line that is known goes before it."""
        nearest = next((place[:n] for n in range(len(place), 0, -1) if place[:n] in self.lines), ())
        where = f"{self.file}, line {self.lines[nearest]}" if nearest else self.name
        key = self.written.get(str(place[0]), f"{self.prefix_at(place)}{place[0]}")
        inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place[1:])
        return f"{where}: {key}{inner}{what}"

    def prefix_at(self, place: _Place) -> str:
        return "" if place[:1] in self.lines else self.prefix

    def mistake_of_several(self, what: str) -> str:
        """A sentence that begins with the wrong key, with all keys in braces."""
        key, rest = what.split("}", 1)
        place = (key.removeprefix("{"),)
        return self.mistake(place, re.sub(r"{(\w+)}", rf"{self.prefix_at(place)}\1", rest))


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
        raise BadArgumentError(f"{name[:SHOWN_LETTERS_MAX]}: cannot be read: {reason}") from None
    if len(data) > FILE_BYTES_MAX:
        most = format_bytes(FILE_BYTES_MAX)
        raise BadArgumentError(f"{name}: larger than {most}: no pool's configuration")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadArgumentError(f"{name}: not text in UTF-8, so no YAML") from None


def read_yaml(name: str) -> tuple[Mapping[str, object], Source]:
    """The keys and values in a plain YAML file, not checked yet, and where they stand. Raises
    BadArgumentError."""
    return _parsed(name, _text_of(name))


def _parsed(name: str, text: str) -> tuple[Mapping[str, object], Source]:
    try:
        _refuse_tricks(name, text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(node, yaml.MappingNode):
            lines = dict(_lines_of(name, node, ()))
            return yaml.safe_load(text), Source(name, name, lines)
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
        _check_scalar(Source(name, name, {place: node.start_mark.line + 1}), node, place)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[_Place, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            raise BadArgumentError(f"{name}, line {line}: a key is a word, not {shown(key.value)}")
        inner = (*place, key.value)
        if inner in first:
            source = Source(name, name, {inner: line})
            what = f" stands in line {first[inner]} already; leave one of them out"
            raise BadArgumentError(source.mistake(inner, what))
        first[inner] = line
        yield inner, line
        yield from _lines_of(name, value, inner)


def _check_scalar(source: Source, node: yaml.ScalarNode, place: _Place) -> None:
    """Raises for a date or a number that cannot be, which PyYAML lets through as it comes."""
    try:
        yaml.constructor.SafeConstructor().construct_object(node)
    except (ValueError, OverflowError):
        what = f" is {shown(node.value)}, which cannot be read; in quotes it is text"
        raise BadArgumentError(source.mistake(place, what)) from None


def checked(kind: type[Model], data: Mapping[str, object], source: Source) -> Model:
    """What was written; raises BadArgumentError for all mistakes at once."""
    for key in data:
        if not isinstance(key, str):
            raise BadArgumentError(f"{source.name}: a key is a word, not {shown(key)}")
    try:
        return kind.model_validate(dict(data))
    except ValidationError as error:
        found = [_explained(kind, source, one) for one in error.errors(include_url=False)]
        raise BadArgumentError("\n".join(dict.fromkeys(found))) from None


def _checked_pool(
    data: Mapping[str, object], source: Source, layout: KVLayout | None
) -> tuple[PoolConfig, KVLayout]:
    config = checked(PoolConfig if layout is not None else _WholeConfig, data, source)
    if config.layout is not None:
        if layout is not None:
            what = " is here, and the caller has one, too: leave this out"
            raise BadArgumentError(source.mistake(("layout",), what))
        _check_layout(source, config.layout)
        layout = config.layout.make()
    assert layout is not None
    layout = _encoded(source, config, layout)
    if config.stores_objects(layout) and "sketch" in config.model_fields_set and config.sketch:
        what = " is true, and objects have no keys to be sketched: leave this out"
        raise BadArgumentError(source.mistake(("sketch",), what))
    return config.model_copy(update={"sketch": layout.sketches(config.sketch)}), layout


def _encoded(source: Source, config: PoolConfig, layout: KVLayout) -> KVLayout:
    """Layout with `encoding`, where it is set."""
    if "encoding" not in config.model_fields_set:
        return layout
    if any((group.k_encoding, group.v_encoding) != ("none", "none") for group in layout.groups):
        what = " is here, and the caller's layout has one, too: leave one of them out"
        raise BadArgumentError(source.mistake(("encoding",), what))
    try:
        return layout.encoded(config.encoding)
    except BadArgumentError as error:
        raise BadArgumentError(source.mistake(("encoding",), f": {error}")) from None


def _check_layout(source: Source, layout: _OneShape | _Groups | _Objects) -> None:
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
        raise BadArgumentError(source.mistake(place, f": {error}")) from None


def _explained(kind: type[Keys], source: Source, error: ErrorDetails) -> str:
    """One mistake that pydantic found, in our words."""
    at, what, value = error["loc"], error["type"], shown(error["input"])
    form = str(at[1]) if at[:1] == ("layout",) and len(at) > 1 else ""
    place = at[:1] + at[2:] if form else at  # without the name of the form
    if what == "value_error":
        said = str(error["ctx"]["error"])
        return source.mistake(place, f": {said}") if place else source.mistake_of_several(said)
    if what == "extra_forbidden":
        if text := refusal(SETTINGS, str(place[-1])):
            return source.mistake(place, text.removeprefix(str(place[-1])))
        return source.mistake(place, _unknown_key(kind, source, place, form))
    if text := refusal(SETTINGS, f"{place[-1]}: {error['input']}" if place else ""):
        return source.mistake(place, text.removeprefix(str(place[-1])))
    if "shard" in place and what in ("missing", "too_long"):
        numbers = "tp rank, tp size, pp rank, pp size"
        return source.mistake(place[:2], f": four numbers are wanted: {numbers}")
    if what == "missing":
        return source.mistake(place, " is missing")
    if wanted := kind.model_fields[str(at[0])].description:
        place = at[:1]
    elif what == "literal_error":
        wanted = "one of " + error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
    return source.mistake(place, f" is {value}: {wanted or _WANTED.get(what, error['msg'])}")


def _unknown_key(kind: type[Keys], source: Source, place: _Place, form: str) -> str:
    forms: dict[str, type[Keys]] = {
        "_OneShape": _OneShape, "_Groups": _Groups, "_Objects": _Objects, "": kind
    }  # fmt: skip
    model = _Group if "layer_groups" in place else forms[form]
    common = ("page_tokens", *_Layout.model_fields)
    known = sorted(model.model_fields, key=lambda k: common.index(k) if k in common else -1)
    if not form:
        known = [source.prefix_at(place) + key for key in known]
    written = source.written.get(str(place[-1]), str(place[-1]))
    near = get_close_matches(written.lower(), known, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    more = ""
    if model is _OneShape:
        more = "; or layer_groups, for layers of several kinds; or object_bytes, for objects"
    return f" is not one of {', '.join(known)}{more}{meant}"
