"""The tiers folder moves pages between a pool, copies of hot ones above it and records below it."""

from cxlkv.tiers.tiers import Tiers

__all__ = ["Tiers"]
