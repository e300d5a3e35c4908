"""Measures what this machine costs, for `cxlkv tune` and `cxlkv advise`."""
