"""Emulation: links of devices that this machine does not have, faults on purpose."""

from typing import NoReturn

from cxlkv.refusals import no_attribute


def __getattr__(name: str) -> NoReturn:
    no_attribute(__name__, name)
