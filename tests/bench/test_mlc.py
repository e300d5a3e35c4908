"""Intel MLC's output: each of its tables is read, whatever is cut off or between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlkv.bench import mlc
from cxlkv.errors import BadArgumentError

# Made by hand, in the form of version 3.11.
MLC = """\
Intel(R) Memory Latency Checker - v3.11b
Measuring idle latencies for sequential access (in ns)...
\t\tNuma node
Numa node\t     0\t     1
       0\t  96.3\t 151.2
       1\t 150.9\t  95.8

Measuring Peak Injection Memory Bandwidths for the system
Bandwidths are in MB/sec (1 MB/sec = 1,000,000 Bytes/sec)
Using all the threads from each core if Hyper-threading is enabled
Using traffic with the following read-write ratios
ALL Reads        :\t41210.5
3:1 Reads-Writes :\t38655.0
2:1 Reads-Writes :\t37342.1
1:1 Reads-Writes :\t34355.9
Stream-triad like:\t33158.2

Measuring Memory Bandwidths between nodes within system
Bandwidths are in MB/sec (1 MB/sec = 1,000,000 Bytes/sec)
Using all the threads from each core if Hyper-threading is enabled
Using Read-only traffic type
\t\tNuma node
Numa node\t     0\t     1
       0\t21210.3\t11393.1
       1\t11385.5\t     -

Measuring Loaded Latencies for the system
Using all the threads from each core if Hyper-threading is enabled
Using Read-only traffic type
Inject\tLatency\tBandwidth
Delay\t(ns)\tMB/sec
==========================
 00000\t329.26\t  41154.0
 00300\t127.88\t  32998.9
 20000\t 97.30\t   1932.1

Measuring cache-to-cache transfer latency (in ns)...
Local Socket L2->L2 HIT  latency\t49.5
Remote Socket L2->L2 HITM latency (data address homed in writer socket)
\t\t\tReader Numa Node
Writer Numa Node     0\t     1
            0\t     -\t 115.2
            1\t 114.9\t     -
"""


def test_the_whole_of_it() -> None:
    found = mlc.parse(MLC, "mlc.txt")
    assert (found.name, found.version) == ("mlc.txt", "v3.11b")
    assert found.latency == {(0, 0): 96.3, (0, 1): 151.2, (1, 0): 150.9, (1, 1): 95.8}
    assert found.idle() == 95.8
    assert found.peak == {
        "ALL Reads": pytest.approx(41.2105),
        "3:1 Reads-Writes": pytest.approx(38.655),
        "2:1 Reads-Writes": pytest.approx(37.3421),
        "1:1 Reads-Writes": pytest.approx(34.3559),
        "Stream-triad like": pytest.approx(33.1582),
    }
    assert set(found.bandwidth) == {(0, 0), (0, 1), (1, 0)}
    assert found.bandwidth[0, 1] == pytest.approx(11.3931)
    (points,) = found.curves.values()
    assert list(found.curves) == ["reads only"]
    assert points[0] == pytest.approx((1.9321, 97.3))
    assert points[-1] == pytest.approx((41.154, 329.26))


def test_the_parts_that_it_prints_alone() -> None:
    idle = "Using buffer size of 2000.000MiB\nEach iteration took 335.8 base frequency clocks (\t"
    assert mlc.parse(f"{idle}146.0\tns)\n", "").idle() == 146
    assert mlc.parse(f"{idle}1.5 us)\n", "").idle() == 1500
    matrix = MLC[MLC.index("\t\tNuma node") : MLC.index("Measuring Peak")]
    assert mlc.parse(matrix, "").idle() == 95.8
    loaded = MLC[MLC.index("Measuring Loaded") :].replace(
        "Using Read-only traffic type", "Using 2:1 reads-writes traffic type"
    )
    assert list(mlc.parse(loaded, "").curves) == ["2:1 reads and writes"]


def test_what_is_cut_off_anywhere_is_read_as_far_as_it_goes() -> None:
    whole = mlc.parse(MLC, "")
    for end in range(len(MLC)):
        part = mlc.parse(MLC[:end], "")
        assert set(part.latency) <= set(whole.latency)
        assert len(part.peak) <= len(whole.peak)


def test_what_is_no_output_of_mlc_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mlc.txt"
    for text in ("", "Numa node\n", "ALL Reads : fast\n", "\0\xff" * 100):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(BadArgumentError, match="no table of Intel MLC in it"):
            mlc.read(path)
    with pytest.raises(BadArgumentError, match="cannot be read: No such file"):
        mlc.read(tmp_path / "absent.txt")
    path.write_text(MLC)
    assert mlc.read(path) == mlc.parse(MLC, "mlc.txt")
