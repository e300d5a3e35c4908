"""Scorers of this package; each file has its paper in the class's docstring."""

from __future__ import annotations

from cxlkv.ndp.methods.mean import Mean

SCORERS = (Mean,)
