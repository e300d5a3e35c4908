"""What follows a chunk's bytes in its object: read back as it was written, and nothing else is."""

from __future__ import annotations

from random import Random

import pytest

from cxlkv.adapters.lmcache.form import DIMS_MAX, GROUPS_MAX, Form, bytes_of, decode, encode
from cxlkv.errors import BadArgumentError

ONE = Form("KV_2LTD", ("bfloat16",), ((2, 4, 16, 32),))
TWO = Form("KV_2LTD", ("bfloat16", "float8_e4m3fn"), ((2, 4, 16, 32), (1, 2, 16, 64)))


@pytest.mark.parametrize("form", [ONE, TWO])
def test_a_form_is_read_back(form: Form) -> None:
    """Of the whole object, or of its end."""
    written = encode(form, 100)
    size = 100 + len(written)
    assert len(written) == bytes_of(len(form.shapes))
    assert decode(memoryview(bytes(100) + written), size) == (form, 100)
    assert decode(memoryview(written), size) == (form, 100)


def test_what_is_no_form_is_none() -> None:
    whole = bytes(100) + encode(ONE, 100)
    for size in (len(whole) - 1, len(whole) + 1):  # another payload's
        assert decode(memoryview(whole), size) is None
    for wrong in (whole[:-1], whole[101:], bytes(len(whole)), b""):
        assert decode(memoryview(wrong), len(whole)) is None


def test_random_bytes_raise_nothing() -> None:
    seed = Random().getrandbits(32)
    print("seed", seed)
    random = Random(seed)
    whole = bytearray(bytes(64) + encode(TWO, 64))
    for _ in range(2000):
        changed = bytearray(whole)
        for _ in range(random.randrange(1, 6)):
            changed[random.randrange(64, len(changed))] = random.randrange(256)
        found = decode(memoryview(changed), len(changed))
        assert found is None or found[1] == 64


@pytest.mark.parametrize(
    "form",
    [
        Form("KV_2LTD", (), ()),
        Form("KV_2LTD", ("uint8",) * (GROUPS_MAX + 1), ((1,),) * (GROUPS_MAX + 1)),
        Form("KV_2LTD", ("uint8",), ((1,) * (DIMS_MAX + 1),)),
        Form("KV_2LTD", ("uint8", "uint8"), ((1,), (1, 1))),
        Form("KV_2LTD", ("uint8",), ((1 << 32,),)),
        Form("A_FORMAT_WITH_A_LONG_NAME", ("uint8",), ((1,),)),
    ],
)
def test_what_has_no_room_is_refused(form: Form) -> None:
    with pytest.raises(BadArgumentError, match="are stored"):
        encode(form, 1)
