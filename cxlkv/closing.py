"""Base classes of objects that a `with` statement closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

Whole = TypeVar("Whole", bound="Closing")


class Closing(ABC):
    """Has a close(); a second one does nothing."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: Whole) -> Whole:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
