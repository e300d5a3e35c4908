"""The seam to the CUDA driver, on a driver that the test made: calls, versions, errors."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from cxlkv.errors import BadArgumentError, GpuError, GpuMemoryError, UnsupportedError
from cxlkv.gpu import driver as driver_module
from cxlkv.gpu.driver import Driver, driver_of, index_of

from ..support.fake_driver import INVALID_VALUE, OUT_OF_MEMORY, STREAM, FakeCuda


@pytest.fixture(params=[0, 1, 2], ids=["12.4", "12.8", "13.0"])
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path, request.param)


def queue(
    driver: Driver, targets: list[int], sources: list[int], sizes: list[int], stream: int = STREAM
) -> None:
    """In one call, where the driver has it."""
    arrays = [np.array(row, np.int64) for row in (targets, sources, sizes)]
    copy = driver.copy_batch if driver.has_batched_copies else driver.copy
    copy(arrays[0], arrays[1], arrays[2], stream)


def test_versions_and_what_they_have(fake: FakeCuda) -> None:
    driver = fake.driver()
    assert driver.version() in ((12, 4), (12, 8), (13, 0))
    assert driver.has_batched_copies == (driver.version() >= (12, 8))
    assert driver.device_count() == 2


def test_copies(fake: FakeCuda) -> None:
    driver = fake.driver()
    source = np.arange(300, dtype=np.uint8)
    target = np.zeros(300, np.uint8)
    at, to = source.ctypes.data, target.ctypes.data
    with driver.current(0):
        queue(driver, [to, to + 100], [at + 200, at], [50, 7])
    assert target[:50].tolist() == source[200:250].tolist()
    assert target[100:107].tolist() == source[:7].tolist()
    assert target[50:100].any() == target[107:].any() == False  # noqa: E712
    if driver.has_batched_copies:
        assert fake.calls("batch") == [("batch", 2, STREAM, 1)]
    else:
        assert [row[1] for row in fake.calls("cuMemcpyAsync")] == [50, 7]


def test_the_context_is_torchs_own_and_only_for_the_length_of_a_call(fake: FakeCuda) -> None:
    driver = fake.driver()
    for device in (0, 1, 1, 0):
        with driver.current(device):
            driver.synchronize()
    retained = [row[1] for row in fake.calls("cuDevicePrimaryCtxRetain")]
    assert retained == [100, 101]
    assert [row[1] for row in fake.calls("cuCtxSynchronize")] == [100, 101, 101, 100]
    with pytest.raises(GpuError, match=r"cuCtxSynchronize: CUDA_ERROR_INVALID_CONTEXT \(as"):
        driver.synchronize()


def test_another_thread_has_a_context_of_its_own(fake: FakeCuda) -> None:
    driver = fake.driver()
    failed: list[Exception] = []

    def work() -> None:
        try:
            with driver.current(1):
                driver.synchronize()
        except GpuError as error:
            failed.append(error)

    with driver.current(0):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        driver.synchronize()
    assert not failed
    assert [row[1] for row in fake.calls("cuCtxSynchronize")] == [101, 100]


def test_nested_devices(fake: FakeCuda) -> None:
    driver = fake.driver()
    with driver.current(0):
        with driver.current(0), driver.current(1):
            driver.synchronize()
        driver.synchronize()
    assert [row[1] for row in fake.calls("cuCtxSynchronize")] == [101, 100]


def test_a_copy_that_fails_is_named(fake: FakeCuda) -> None:
    driver = fake.driver()
    memory = np.zeros(64, np.uint8)
    at = memory.ctypes.data
    name = "batch" if driver.has_batched_copies else "cuMemcpyAsync"
    fake.fail(name, OUT_OF_MEMORY)
    with driver.current(0):
        with pytest.raises(GpuMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            queue(driver, [at], [at + 32], [8])
        fake.fail(name, 9999)
        with pytest.raises(GpuError, match="error 9999"):
            queue(driver, [at], [at + 32], [8])
        if not driver.has_batched_copies:
            return
        with pytest.raises(GpuError, match="CUDA_ERROR_INVALID_VALUE"):
            queue(driver, [at], [at + 32], [8], 0)  # the default stream
        with pytest.raises(BadArgumentError):
            queue(driver, [at], [at + 32, at], [8])


def test_which_copy_of_a_batch_failed(tmp_path: Path) -> None:
    fake = FakeCuda(tmp_path, 1)
    driver = fake.driver()
    memory = np.zeros(8192, np.uint8)
    at = memory.ctypes.data
    with driver.current(0):
        assert driver.register(at + 4096, 4096, 3) == 0
        with pytest.raises(GpuError, match=r"\(copy 1 of 2\): CUDA_ERROR_INVALID_VALUE"):
            queue(driver, [at, at], [at + 8, at + 4090], [8, 8])


def test_a_driver_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"no CUDA driver.*--gpus all"):
        Driver(str(tmp_path / "nothing.so.1"))
    other = Path(np.__file__).parent / "_core"
    library = next(other.glob("_multiarray_umath*.so"))
    with pytest.raises(UnsupportedError, match="no CUDA driver of"):
        Driver(str(library))
    fake = FakeCuda(tmp_path)
    fake.fail("cuInit", INVALID_VALUE)
    with pytest.raises(UnsupportedError, match="does not start: CUDA_ERROR_INVALID_VALUE"):
        fake.driver()
    fake.devices(0)
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        fake.driver()


def test_the_driver_of_a_device() -> None:
    with pytest.raises(BadArgumentError, match="cpu is no CUDA device"):
        driver_of(torch.device("cpu"))
    if torch.version.cuda is None:
        with pytest.raises(UnsupportedError, match="without CUDA"):
            driver_of(torch.device("cuda"))


def test_a_torch_with_cuda_and_a_machine_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(driver_module, "_driver", [])
    monkeypatch.setattr(Driver.__init__, "__defaults__", (str(tmp_path / "libcuda.so.1"),))
    with pytest.raises(UnsupportedError, match="no CUDA driver"):
        driver_of(torch.device("cuda"))
    fake = FakeCuda(tmp_path)
    monkeypatch.setattr(Driver.__init__, "__defaults__", (str(fake.path),))
    made = driver_of(torch.device("cuda", 1))
    assert driver_of(torch.device("cuda")) is made


def test_the_number_of_a_device() -> None:
    assert index_of(torch.device("cuda:3")) == 3
    if not torch.cuda.is_available():
        assert index_of(torch.device("cuda")) == 0
