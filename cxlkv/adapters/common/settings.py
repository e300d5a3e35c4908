"""Settings that all engines' users write: the keys of a pool's YAML, and an engine's own.

Checks and messages are those of cxlkv.config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import AfterValidator, model_validator

from cxlkv.config import PoolKeys, Size, Source, Where, checked, read_yaml
from cxlkv.errors import BadArgumentError
from cxlkv.machine.coherence import AUTO, named_host

if TYPE_CHECKING:
    from typing_extensions import Self


def _in_a_file(where: str) -> str:
    if where == "anonymous:":
        raise BadArgumentError(
            "'anonymous:', but the engine has several processes that must find the pool: give a "
            "folder, or leave it out"
        )
    return where


class PoolSettings(PoolKeys):
    """where: a folder, in which each model (and, where each has its own pool, each rank) gets a
    file, or the path of one pool, as CXLPool.create takes it. capacity: of what an engine's ranks
    store together, if it is to be made; None: a share of the memory that this container may use.
    sharing, hosts, host, lease_s, huge: as in CXLPool.create, where engines on several hosts use
    the pool; all processes of an engine on one machine are one host. encoding: what the pool keeps
    the engine's keys and values as, "int8", or of each, "int8,int4"; the engine's own stay as they
    are.

    cold: where pages go that make room: a folder on a disk of this machine, in which each pool gets
    a file, the path of one file, or "mooncake://HOST:PORT". cold_capacity: of all ranks' files
    together, or what each process lends the store. compress, policy: as in Tiers.

    remote: pools that other machines serve, where prefixes are looked for that the pool and the
    cold tier lack: tcp://HOST:PORT of one, or of each of an engine's ranks. remote_secret: a file.

    identity: what the user calls these weights, where they are no .safetensors or .gguf on a disk:
    engines that call theirs the same share pages. salt: keeps tenants apart. quota: bytes that what
    this engine has published may take, of all its ranks together. config: the path of a YAML file
    with any of these, for what is not written beside it.
    """

    where: Annotated[Where, AfterValidator(_in_a_file)] = "/dev/shm/"
    huge: Literal["never", "try", "require"] = "try"
    identity: str = ""
    salt: str = ""
    quota: Size | None = None
    config: str | None = None

    @property
    def as_host(self) -> int | str | None:
        """The number to open the pool with; "auto" for a shared pool if no number was given."""
        named = named_host(self.host)
        return AUTO if named is None and self.sharing != "host" else named


UNSHARED = PoolSettings()
"""Settings of pools that one host uses."""


OF_OBJECTS = ("none", "int8", "int4", "fp8_e4m3")
"""Encodings of engines' blocks."""


class ObjectSettings(PoolSettings):
    """Settings of engines that keep whole blocks as objects, which no server hands out."""

    @model_validator(mode="after")
    def _only_for_rows(self) -> Self:
        if self.remote:
            raise BadArgumentError(
                "{remote} is for vLLM: this engine keeps its blocks as objects, and a pool of "
                "objects is not served to other machines. Leave it out, or share the pool "
                "({sharing}) or a store ({cold}: mooncake://HOST:PORT)"
            )
        if self.encoding not in OF_OBJECTS:
            raise BadArgumentError(
                f"{{encoding}} is {self.encoding!r}: this engine keeps its blocks as objects, K "
                f"and V alike, and whole. One of {', '.join(OF_OBJECTS)}"
            )
        return self


Settings = TypeVar("Settings", bound=PoolSettings)


def read(
    kind: type[Settings], given: Mapping[str, object], place: str, prefix: str = ""
) -> Settings:
    """place: where the engine's user writes them, each with the prefix before its name. Raises
    BadArgumentError, which names each wrong key, and what is right."""
    written = {str(name).removeprefix(prefix): str(name) for name in given}
    mine = dict(zip(written, given.values(), strict=True))
    source = Source(place, prefix=prefix, written=written)
    if isinstance(path := mine.get("config"), str):
        inside, file = read_yaml(path)
        if "config" in inside:
            raise BadArgumentError(
                file.mistake(("config",), " is not for a file: it names no other")
            )
        lines = {at: line for at, line in file.lines.items() if at[0] not in mine}
        source = replace(source, file=path, lines=lines)
        mine = {**inside, **mine}
    return checked(kind, mine, source)
