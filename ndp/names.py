"""Names of methods: who may have which, what packages offer, and what is left out and why."""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TypeVar, cast

from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.ndp.engine import METHODS_TAKEN
from cxlkv.ndp.kinds import AnyChooser, Chooser, Scorer

log = logging.getLogger(__name__)
Method = TypeVar("Method")
SCORER_GROUP = "cxlkv.scorers"
"""Entry points of packages that have some."""
CHOOSER_GROUP = "cxlkv.choosers"
left_out: dict[str, str] = {}
"""Why, by the names of entry points. Nothing is chosen by such a name, whatever else has it: what
is asked for may be what was left out."""


def is_built_in(method: object) -> bool:
    return type(method).__module__.startswith("cxlkv.ndp.methods.")


@cache
def built_in() -> dict[str, str]:
    """Names of this package's scorers or choosers. Raises ImportError without numba."""
    from cxlkv.ndp.methods import CHOOSERS, SCORERS

    kinds = {each.name: "scorer" for each in SCORERS}
    return kinds | {each.name: "chooser" for each in CHOOSERS}


def source_of(method: object) -> str:
    """A digest of the modules that a method's class and its bases are of, those of this interface
    left out: a worker that was begun before they changed has another one. "" of what was typed in.
    """
    names = dict.fromkeys(each.__module__ for each in type(method).__mro__)
    for interface in ("cxlkv.ndp.kinds", "typing", "builtins"):
        names.pop(interface, None)
    return _digest_of(tuple(map(sys.modules.get, names)))


@cache
def _digest_of(modules: tuple[ModuleType | None, ...]) -> str:
    digest = hashlib.sha256()
    for module in modules:
        try:
            digest.update(inspect.getsource(module).encode())  # type: ignore[arg-type]
        except (OSError, TypeError):
            return ""
    return digest.hexdigest()[:12]


def check(method: object, kind: type, others: Collection[str]) -> str:
    """The name of a method that is to be of a kind, Scorer or Chooser. others: names that it may
    not have. Raises BadArgumentError."""
    word = kind.__name__.lower()
    if not isinstance(method, kind):
        given, instead = type(method).__name__, "an instance of a subclass"
        if isinstance(method, type):
            given, instead = f"the class {method.__name__}", f"{method.__name__}()"
        raise BadArgumentError(f"{given} is no {word}: {instead} is wanted")
    name: object = getattr(method, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise BadArgumentError(
            f"a {word} cannot be called {name!r}: {type(method).__name__} needs a name, such as "
            'name = "corner": letters, digits and _'
        )
    if name in METHODS_TAKEN:
        whose = "one of the core's names"
    elif name in built_in() and not (is_built_in(method) and built_in()[name] == word):
        whose = f"a built-in {built_in()[name]}'s name"
    elif name in others:
        whose = "the name of another method here"
    else:
        return name
    raise BadArgumentError(f"a {word} cannot be called {name!r}, {whose}: rename yours")


def offered(group: str, kind: type[Method], others: Collection[str]) -> dict[str, Method]:
    """What packages offer as entry points of a group, by names; what cannot be used is left out."""
    found: dict[str, Method] = {}
    for entry in entry_points(group=group):
        try:
            made = entry.load()()
            name = check(made, kind, {*others, *found})
            if name != entry.name:
                raise BadArgumentError(
                    f"it is called {name!r} and its entry point {entry.name!r}: both must be the "
                    "same"
                )
            found[name] = made
        except Exception as error:  # of anyone's code
            leave_out(entry, error)
    return found


def leave_out(entry: EntryPoint, error: Exception) -> None:
    """Log why, and keep the reason for those who ask for the method."""
    log.warning("method %s of %s is left out: %s", entry.name, entry.value, error)
    said = str(error) if isinstance(error, BadArgumentError) else f"{type(error).__name__}: {error}"
    left_out.setdefault(entry.name, f"{entry.value}: {said}")


def refusal(name: str) -> BadArgumentError:
    """Error for a name that is left out."""
    return BadArgumentError(f"method {name!r} is installed, but cannot be used: {left_out[name]}")


# ---- what this process knows ----


@cache
def scorers() -> dict[str, Scorer]:
    """By their names. One that a package offers and that cannot be used is left out."""
    try:
        from cxlkv.ndp.methods import SCORERS
    except ImportError as error:
        raise UnsupportedError(
            "methods beside the core's are compiled by numba, which is not installed: "
            "pip install 'cxlkv[methods]'"
        ) from error
    found: dict[str, Scorer] = {made.name: made for made in (each() for each in SCORERS)}
    return found | offered(SCORER_GROUP, Scorer, found)


@cache
def installed_choosers() -> dict[str, AnyChooser]:
    try:
        from cxlkv.ndp.methods import CHOOSERS
    except ImportError:  # no numba: scorers say so
        return {}
    found = {kind.name: cast(AnyChooser, kind()) for kind in CHOOSERS}
    return found | offered(CHOOSER_GROUP, Chooser, {*found, *known(scorers())})


@cache
def choosers() -> dict[str, AnyChooser]:
    """Those that are installed, and what this process added."""
    return dict(installed_choosers())


def known(found: Mapping[str, object]) -> tuple[str, ...]:
    """Names of scorers() or choosers() that are not left out."""
    return tuple(name for name in found if name not in left_out)


def chooser_of(name: str) -> AnyChooser | None:
    """None for a name that no chooser has. Raises BadArgumentError for one that is left out."""
    found = choosers().get(name)
    if name in left_out:
        raise refusal(name)
    return found
