"""A pool is created, opened, used through sequences, looked after by its operators, and closed."""

from cxlkv.pool.base import Pool as Pool
from cxlkv.pool.pool import CXLPool as CXLPool
