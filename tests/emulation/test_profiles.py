"""Profiles of devices: what they say, what is refused, what a user's own files may hold."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from cxlkv.emulation import profiles
from cxlkv.emulation.profiles import OURS, Profile, named, read
from cxlkv.errors import BadArgumentError

GOOD = {
    "what": "a card",
    "source": "this test",
    "standing": "assumed",
    "latency_ns": 100,
    "read_gb_per_s": 20,
}


def one(**more: object) -> Profile:
    return Profile.model_validate({**GOOD, **more})


@pytest.mark.parametrize("name", read(OURS))
def test_every_profile_of_ours_goes_through_its_points(name: str) -> None:
    profile = named(name)[1]
    assert profile.source
    assert profile.latency_ns_at(0) == profile.latency_ns
    for load, latency in profile.loaded:
        assert profile.latency_ns_at(load) == pytest.approx(latency, rel=1e-12)
    loads = [profile.read_gb_per_s * step / 50 for step in range(60)]
    curve = [profile.latency_ns_at(load) for load in loads]
    assert all(later >= before for before, later in pairwise(curve))
    assert math.isfinite(curve[-1])
    many = 100  # so that no limit for each device binds
    assert profile.gb_per_s(0.0, many) == pytest.approx(profile.read_gb_per_s)
    assert profile.gb_per_s(1 / 3, many) == pytest.approx(profile.mixed)
    assert profile.gb_per_s(1.0, many) == pytest.approx(profile.write)


def test_beyond_the_last_point_the_wait_grows_as_in_a_queue() -> None:
    profile = one(loaded=[[10, 150]])
    assert profile.latency_ns_at(5) == 125
    # u / (1 - u) is 1 at half of the bandwidth, 9 at nine tenths.
    assert profile.latency_ns_at(18) == pytest.approx(100 + 9 * 50)
    assert profile.latency_ns_at(1000) == profile.latency_ns_at(20)
    without = one()
    assert without.latency_ns_at(18) == pytest.approx(100 * (1 + 0.1 * 9))


def test_limits_of_devices_and_switch_and_what_is_not_said() -> None:
    profile = one(per_device_gb_per_s=6, per_switch_gb_per_s=15)
    assert [profile.gb_per_s(0, devices) for devices in (1, 2, 3, 9)] == [6, 12, 15, 15]
    assert one().write == 20
    assert one(write_gb_per_s=5).mixed == pytest.approx(10)  # 2 bytes in 0.1 ns, 1 in 0.2


def test_slowed() -> None:
    profile = named("astera-a1000")[1]
    slow = profile.slowed(8)
    assert slow.latency_ns == 8 * profile.latency_ns
    assert slow.gb_per_s(0.5) == pytest.approx(profile.gb_per_s(0.5) / 8)
    assert slow.latency_ns_at(36.5 / 8) == pytest.approx(8 * 355)
    for factor in (0, -1, math.inf, math.nan):
        with pytest.raises(BadArgumentError, match="slow="):
            profile.slowed(factor)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "one key, profiles"),
        ("profiles: {}", "one key, profiles"),
        ("profiles: 7", "one key, profiles"),
        ("more: 1\nprofiles: {a: {}}", "one key, profiles"),
        ("profiles: [", "no YAML"),
        ("profiles: &a {x: *a}", "aliases"),
        ("profiles: {a: {}}", "profiles.a.latency_ns: Field required"),
        ("profiles: {a: 3}", "profiles.a: "),
        ("profiles: {a:b: {}}", "no profile's name"),
        ("profiles: {7: {}}", "no profile's name"),
        ("profiles: {a: {latency: 3}}", "profiles.a.latency: unknown key; known are what, source"),
        ("latency_ns: 0", "profiles.a.latency_ns: Input should be greater than 0, not 0"),
        ("latency_ns: .nan", "profiles.a.latency_ns"),
        ("latency_ns: fast", "profiles.a.latency_ns: Input should be a valid number, not fast"),
        ("read_gb_per_s: -4", "profiles.a.read_gb_per_s"),
        ("read_gb_per_s: .inf", "profiles.a.read_gb_per_s"),
        ("standing: sure", "profiles.a.standing"),
        ("loaded: [[5, 120], [5, 130]]", "5 GB/s comes after 5: rising loads"),
        ("loaded: [[5, 90]]", "90 ns at 5 GB/s is less than 100 ns at 0 GB/s"),
        ("loaded: [[50, 190]]", "50 GB/s is more than the link gives"),
        ("loaded: [5, 6]", "profiles.a.loaded.0"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    if text and not text.startswith(("profiles", "more")):
        key, _, value = text.partition(": ")
        rows = {**GOOD, key: value}
        text = "profiles:\n  a:\n" + "".join(f"    {k}: {v}\n" for k, v in rows.items())
    path.write_text(text)
    with pytest.raises(BadArgumentError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(BadArgumentError, match=r"no profile 'astera-a100' \(did you mean astera-a"):
        named("astera-a100")
    with pytest.raises(BadArgumentError, match="No such file"):
        named(f"{tmp_path}/none.yaml:x")
    profiles.write(profiles.own_path(), "mine", one())
    profiles.write(profiles.own_path(), "other", one(latency_ns=7, loaded=[[3, 9]]))
    assert named("mine") == ("mine", one())
    assert named(f"{profiles.own_path()}:other")[1].loaded == ((3.0, 9.0),)
    with pytest.raises(BadArgumentError, match=r"which profile\? .*: mine, other"):
        named(str(profiles.own_path()))
    with pytest.raises(BadArgumentError, match="one of the project's"):
        profiles.write(profiles.own_path(), "pond-pool", one())
    profiles.own_path().write_bytes(b"\xff")
    with pytest.raises(BadArgumentError, match="UTF-8"):
        named("mine")
