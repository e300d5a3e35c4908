"""The GPU suite: builds, tests and measures from a bare checkout, without network, into a folder.

    python3 tests/gpu_suite/suite.py OUT [--wheels FOLDER] [--quick] [--minutes N]

It needs Python >= 3.10 with torch, triton, numpy and pytest, CMake and a C compiler; wheels of what
else is missing lie in FOLDER. Only the standard library is imported here: each step is a process of
its own with a time of its own, and what it found is in OUT as soon as it ends. Without a GPU all
steps come to their end, too: what needs one is skipped and says why, and the cases run tiny, to see
that they are right.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
MINUTES = 8.0  # by default; of which each step may take this share at most:
SHARES = {
    "environment": 0.12,
    "build": 0.25,
    "tests": 0.45,
    "gather": 0.20,
    "attend": 0.20,
    "decode": 0.30,
    "blocks": 0.15,
}
CASES = ("gather", "attend", "decode", "blocks")
TAIL_CHARACTERS = 6000  # of a step's output, kept in the index
STOP_S = 10.0  # before its end a case is told to come to one itself
MODULES = {
    "cffi": "the build",
    "pycparser": "the build",
    "numpy": "everything",
    "ml_dtypes": "the pool",
    "prometheus_client": "the pool's metrics",
    "pydantic": "the pool's configuration",
    "pydantic_core": "the pool's configuration",
    "annotated_types": "the pool's configuration",
    "typing_inspection": "the pool's configuration",
    "typing_extensions": "the pool's configuration",
    "yaml": "the pool's configuration",
    "rich": "tables",
    "typer": "the command line",
    "torch": "the kernels",
    "triton": "the kernels",
    "pytest": "the tests",
    "hypothesis": "the tests",
}
NEEDED = (
    *("cffi", "pycparser", "numpy", "ml_dtypes", "torch"),
    *("pydantic", "pydantic_core", "annotated_types", "typing_inspection"),
)

LOOK = """
import json, platform
found = {"python": platform.python_version(), "gpu": None}
for name in ("numpy", "torch", "triton"):
    try:
        found[name] = str(__import__(name).__version__)
    except Exception as error:
        found[name] = f"not here: {error}"
try:
    import torch
    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        of = torch.cuda.get_device_properties(0)
        found["gpu"] = of.name
        found["gpu_memory_bytes"] = of.total_memory
        found["multiprocessors"] = of.multi_processor_count
        found["l2_bytes"] = of.L2_cache_size
        found["capability"] = f"{of.major}.{of.minor}"
    elif torch.version.cuda is None:
        found["no_gpu"] = f"torch {torch.__version__} is built without CUDA"
    else:
        torch.cuda.init()
except Exception as error:
    found["no_gpu"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(found))
"""
LINK = (
    "name driver_version memory.total pcie.link.gen.current pcie.link.gen.max "
    "pcie.link.width.current pcie.link.width.max clocks.max.sm clocks.max.memory"
).split()

Details = dict[str, object]


@dataclass
class Step:
    """state: "passed", "failed" or "skipped"; the latter two have a reason."""

    name: str
    state: str
    reason: str = ""
    seconds: float = 0.0
    tail: str = ""
    details: Details = field(default_factory=dict)


@dataclass
class Ran:
    """How a command ended: its exit status, None when its time was over; all that it said."""

    status: int | None
    text: str

    @property
    def fault(self) -> str:
        """Why it counts as failed, in a line; "" when it does not."""
        if self.status == 0:
            return ""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        said = lines[-1][:300] if lines else "it said nothing"
        return f"{'out of time' if self.status is None else f'exit status {self.status}'}: {said}"


def run(
    command: Sequence[str | Path],
    env: Mapping[str, str],
    timeout_s: float,
    *,
    folder: Path = CHECKOUT,
    say: Callable[[str], None] | None = None,
) -> Ran:
    """Run it in a process group, which is killed at the end of its time; `say` gets its lines."""
    words = [str(word) for word in command]
    end = time.monotonic() + max(1.0, timeout_s)
    with tempfile.TemporaryFile() as log:
        if sys.version_info >= (3, 11):  # not a session of its own: who ends us should find it
            process = subprocess.Popen(
                words, cwd=folder, env=env, stdout=log, stderr=log, process_group=0
            )
        else:
            process = subprocess.Popen(
                words, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
            )
        shown = 0
        try:
            while process.poll() is None and time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                shown += pass_on(log.fileno(), shown, say)
            status = process.poll()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        pass_on(log.fileno(), shown, say)
        text = os.pread(log.fileno(), 16 << 20, 0).decode(errors="replace")
    return Ran(status, text)


def pass_on(log: int, shown: int, say: Callable[[str], None] | None) -> int:
    """Tells the whole lines behind the first `shown` bytes of a log; returns how many bytes."""
    fresh = os.pread(log, 1 << 20, shown) if say else b""
    lines = fresh[: fresh.rfind(b"\n") + 1]
    for line in lines.decode(errors="replace").splitlines():
        if say is not None:
            say(line)
    return len(lines)


class Suite:
    """One run: the folder for what is found, the steps so far, and the time that is left."""

    def __init__(self, out: Path, work: Path, wheels: Path | None, quick: bool, minutes: float):
        self.out, self.work, self.wheels = out, work, wheels
        self.quick, self.seconds = quick, 60 * minutes
        self.began_s = time.monotonic()
        self.steps: list[Step] = []
        self.failures: list[str] = []  # of tests
        self.environment: Details = {}
        self.site = work / "site"
        paths = [str(self.site), str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
        self.env = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join(path for path in paths if path),
            PYTHONUNBUFFERED="1",
        )
        self.began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def left_s(self, name: str) -> float:
        """How long this step may take: its share, or less when the whole is nearly over."""
        end = self.began_s + self.seconds
        return min(SHARES.get(name, 1.0) * self.seconds, end - time.monotonic())

    def say(self, line: str) -> None:
        """Prints it with the seconds since the beginning."""
        print(f"[{time.monotonic() - self.began_s:6.1f} s] {line}", flush=True)

    @property
    def no_gpu(self) -> str:
        """Why there is none; "" when there is one."""
        if self.environment.get("gpu"):
            return ""
        return str(self.environment.get("no_gpu", "no GPU was found"))

    def do(self, name: str) -> None:
        """One step, its end written down whatever happens in it."""
        began = time.monotonic()
        self.say(f"{name} ...")
        if self.left_s(name) < 5.0:
            step = Step(name, "skipped", f"the {self.seconds / 60:g} minutes are over")
        else:
            try:
                step = STEPS[name](self)
            except Exception as error:  # the next steps have a right to run
                step = Step(name, "failed", f"{type(error).__name__}: {error}")
        step.seconds = round(time.monotonic() - began, 1)
        step.tail = step.tail[-TAIL_CHARACTERS:]
        self.steps.append(step)
        self.say(f"{name}: {step.state}{': ' if step.reason else ''}{step.reason}")
        self.write()

    def write(self) -> None:
        """The index and the page, whole or not at all."""
        index: Details = {
            "began": self.began,
            "commit": commit(),
            "quick": self.quick,
            "minutes": self.seconds / 60,
            "environment": self.environment,
            "steps": [asdict(step) for step in self.steps],
            "results": [f"{case}.json" for case in CASES if self.result(case)],
        }
        texts = {"index.json": json.dumps(index, indent=2) + "\n", "summary.md": summary(self)}
        for name, text in texts.items():
            (self.out / f".{name}").write_text(self.without_paths(text))
            (self.out / f".{name}").replace(self.out / name)

    def without_paths(self, text: str) -> str:
        """Folders of this machine by what they are: the files are committed."""
        folders = {str(self.work): "WORK", str(CHECKOUT): ".", sys.prefix: "PYTHON"}
        folders |= {sys.base_prefix: "PYTHON", str(Path.home()): "~"}
        for folder, name in folders.items():
            if len(folder) > 1:
                text = text.replace(f"{folder}/", f"{name}/")
        return re.sub(r"/(work|root|opt|home)/", "/.../", text)

    def result(self, case: str) -> Details:
        """What a case has written so far; empty when it has not."""
        try:
            found = json.loads((self.out / f"{case}.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def commit() -> str:
    """What CXLKV_COMMIT says, for a copy of the checkout; else the checkout's own commit."""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40"]
    given = os.environ.get("CXLKV_COMMIT", "")
    if given or not (CHECKOUT / ".git").exists():
        return given or "unknown"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


# ---- what is there ----


def environment(suite: Suite) -> Step:
    """Wheels unpacked, versions, the GPU and its link, the memory; missing modules by name."""
    notes = install(suite)
    ran = run([sys.executable, "-c", LOOK], suite.env, suite.left_s("environment"))
    try:
        suite.environment |= json.loads(ran.text.splitlines()[-1])
    except (ValueError, IndexError):
        suite.environment["no_gpu"] = f"torch could not be asked: {ran.fault}"
    suite.environment |= {"link": link(), **host()}
    missing = {name: of for name, of in MODULES.items() if not is_there(name, suite.site)}
    suite.environment["missing"] = missing
    for name, of in missing.items():
        suite.say(f"missing: {name}, for {of}: put its wheel into --wheels FOLDER")
    faults = [name for name in NEEDED if name in missing]
    gpu = suite.environment["gpu"] if not suite.no_gpu else f"no GPU: {suite.no_gpu}"
    versions = ", ".join(f"{n} {suite.environment.get(n)}" for n in ("torch", "triton", "numpy"))
    suite.say(f"Python {suite.environment.get('python')}, {versions}; {gpu}")
    step = Step("environment", "passed", details={"wheels": notes})
    if faults:
        step.state = "failed"
        step.reason = f"missing here and in --wheels: wheels of {', '.join(faults)}"
    return step


def install(suite: Suite) -> list[str]:
    """Each wheel into a folder of this run; says which could not be."""
    suite.site.mkdir(exist_ok=True)
    notes = []
    wheels = sorted(suite.wheels.glob("*.whl")) if suite.wheels else []
    pip = f"{sys.executable} -m pip install -q --no-index --no-deps --no-compile --target"
    for wheel in wheels:  # one by one: one for another Python does not keep the others out
        ran = run([*pip.split(), suite.site, wheel], suite.env, 60)
        notes.append(f"{wheel.name}: {ran.fault or 'installed'}")
        if ran.fault:
            suite.say(notes[-1])
    return notes


def is_there(module: str, site: Path) -> bool:
    return (
        (site / module).is_dir()
        or any(site.glob(f"{module}.*"))
        or importlib.util.find_spec(module) is not None
    )


def link() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; empty where it does not run."""
    command = ["nvidia-smi", f"--query-gpu={','.join(LINK)}", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(LINK, (word.strip() for word in done.stdout.split(",")), strict=False))


def host() -> Details:
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": 1024 * int(memory[1]) if memory else None,
        "shm_free_bytes": shm.free if shm else None,
        "memlock_bytes": None if limit == resource.RLIM_INFINITY else limit,
        "kernel": os.uname().release,
    }


# ---- the C core ----


EXTENSIONS = ("_native", "_measure")


def build(suite: Suite) -> Step:
    """The core that is there, where it is newer than its sources; else it is compiled as pip would,
    and put beside the package, where git does not look."""
    sources = [
        path
        for name in ("src", "measure", "include")
        for path in (CHECKOUT / "native" / name).rglob("*.[ch]")
    ]
    found = "import cxlkv._measure, cxlkv._native as n; print(n.__file__)"
    ran = run([sys.executable, "-c", found], suite.env, suite.left_s("build"))
    if not ran.fault:
        core = Path(ran.text.splitlines()[-1])
        if core.stat().st_mtime >= max(path.stat().st_mtime for path in sources):
            return Step("build", "passed", "the core that is there is newer than its sources")
    return compile_core(suite, CHECKOUT)


def compile_core(suite: Suite, checkout: Path) -> Step:
    """CMake's own target, with what scikit-build-core would tell it."""
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    folder = suite.work / "build"
    soabi = suffix.strip(".").rpartition(".")[0]
    configure: list[str | Path] = [cmake, "-S", checkout / "native", "-B", folder, *ninja]
    configure += ["-DSKBUILD=ON", f"-DSKBUILD_SOABI={soabi}", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    compile_all: list[str | Path] = [cmake, "--build", folder, "--target", *EXTENSIONS]
    compile_all += ["--parallel", str(len(os.sched_getaffinity(0)))]
    text = ""
    for command in (configure, compile_all):
        ran = run(command, suite.env, suite.left_s("build"), folder=checkout)
        text += ran.text
        if ran.fault:
            return Step("build", "failed", ran.fault, tail=text)
    for name in EXTENSIONS:
        core = checkout / "cxlkv" / f"{name}{suffix}"
        shutil.copyfile(folder / core.name, core.with_name(f".{core.name}"))
        core.with_name(f".{core.name}").replace(core)
    check = "import cxlkv._core as c; print(c.__file__, c.version(), c.isa())"
    env = dict(suite.env, PYTHONPATH=os.pathsep.join([str(suite.site), str(checkout)]))
    ran = run([sys.executable, "-c", check], env, 60, folder=checkout)
    if ran.fault:
        return Step("build", "failed", f"the core that was built: {ran.fault}", tail=ran.text)
    return Step("build", "passed", f"compiled: {ran.text.split(maxsplit=1)[1].strip()}")


# ---- tests ----


def tests(suite: Suite) -> Step:
    """Each test file in a process of its own: a fault on the GPU spoils what comes after it."""
    if suite.no_gpu:
        return Step("tests", "skipped", f"no GPU: {suite.no_gpu}")
    if suite.quick:
        return Step("tests", "skipped", "--quick leaves them out")
    whole_steps = "tests/adapters/test_transformers_graph.py"
    patterns = (whole_steps, "tests/kernels/test_*.py", "tests/gpu/test_*.py")
    files = sorted(path for p in patterns for path in glob.glob(p, root_dir=CHECKOUT))
    end = time.monotonic() + suite.left_s("tests")
    workers = max(1, min(6, len(os.sched_getaffinity(0)) // 2))

    def one(name: str) -> TestFile:
        # Plugins and versions are not ours there: no options that need one, warnings are shown.
        report = suite.work / f"{Path(name).stem}.xml"
        flags = "-q -rs -W default -p no:cacheprovider --import-mode=importlib -o addopts="
        command = [sys.executable, "-m", "pytest", *flags.split(), "-m", "gpu and not nightly"]
        command += [f"--junitxml={report}", name]
        ran = run(command, suite.env, end - time.monotonic(), folder=CHECKOUT)
        found = counted(name, report, ran)
        failed, skipped = len(found.failures), len(found.skips)
        suite.say(f"tests: {name}: {found.passed} passed, {failed} failed, {skipped} skipped")
        return found

    with ThreadPoolExecutor(workers) as team:
        done = list(team.map(one, files))
    suite.failures = failures = [line for found in done for line in found.failures]
    passed = sum(found.passed for found in done)
    skips = Counter(reason for found in done for reason in found.skips)
    details: Details = {"files": [asdict(found) for found in done], "skips": dict(skips)}
    if failures:
        reason = f"{len(failures)} failed, {passed} passed; the first: {failures[0][:200]}"
        return Step("tests", "failed", reason, details=details)
    if not passed:
        return Step("tests", "skipped", "no test ran", details=details)
    reason = f"{passed} passed, {sum(skips.values())} skipped"
    return Step("tests", "passed", reason, details=details)


@dataclass
class TestFile:
    """What became of a file's tests."""

    file: str
    passed: int
    failures: list[str]
    skips: list[str]
    tail: str


def counted(name: str, report: Path, ran: Ran) -> TestFile:
    """A file's tests, out of its JUnit file: how many passed, and why the others did not."""
    cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    failures, skips = [], []
    for case in cases:
        for kind in ("failure", "error"):
            failures += [
                f"{name}::{case.get('name')}: {' '.join((found.get('message') or '').split())}"
                for found in case.findall(kind)
            ]
        skips += [found.get("message") or "" for found in case.findall("skipped")]
    if ran.status not in (0, 1, 5):  # 1: a test failed; 5: none is for a GPU
        failures.append(f"{name}: {ran.fault}")
    passed = max(0, len(cases) - len({line.split(": ")[0] for line in failures}) - len(skips))
    return TestFile(name, passed, failures, skips, ran.text[-TAIL_CHARACTERS:] if failures else "")


# ---- cases ----


def case(suite: Suite, name: str) -> Step:
    """One case; its file has what it had measured even when its time was over."""
    if not any(step.name == "build" and step.state == "passed" for step in suite.steps):
        return Step(name, "skipped", "the C core was not built")
    seconds = suite.left_s(name)
    command: list[str | Path] = [sys.executable, "-m", "tests.gpu_suite.case", name, suite.out]
    command += ["--seconds", f"{max(5.0, seconds - STOP_S):.0f}"]
    if suite.quick or suite.no_gpu:
        command.append("--tiny")
    ran = run(command, suite.env, seconds, say=lambda line: suite.say(f"{name}: {line}"))
    found = suite.result(name)
    checks = found.get("checks")
    broken = [n for n, held in checks.items() if not held] if isinstance(checks, dict) else []
    if ran.status == 77:
        lines = ran.text.strip().splitlines()
        return Step(name, "skipped", lines[-1] if lines else "")
    if broken:
        return Step(name, "failed", f"does not hold: {', '.join(broken)}", tail=ran.text)
    if ran.fault:
        return Step(name, "failed", ran.fault, tail=ran.text)
    held = len(checks) if isinstance(checks, dict) else 0
    why = f"no GPU: no figures ({suite.no_gpu})" if suite.no_gpu else ""
    why = why or ("--quick: no figures" if suite.quick else "")
    return Step(name, "passed", f"{held} checks hold{'; ' if why else ''}{why}")


STEPS: dict[str, Callable[[Suite], Step]] = {
    "environment": environment,
    "build": build,
    "tests": tests,
    "gather": lambda suite: case(suite, "gather"),
    "attend": lambda suite: case(suite, "attend"),
    "decode": lambda suite: case(suite, "decode"),
    "blocks": lambda suite: case(suite, "blocks"),
}


# ---- the page ----

WANTED = {
    "gather_4k_to_h2d": 0.85,
    "gather_64k_to_h2d": 0.85,
    "kernel_below_break_even_to_dma": 1.0,
    "dispatcher_to_better": 0.95,
    "fragments_128_to_beluga": 1.0,
    "attend_to_hbm": 0.8,
    "attend_10_32k_x1_to_sdpa": 1.0,
    "attend_10_64k_x1_to_sdpa": 1.0,
    "attend_10_128k_x1_to_sdpa": 1.0,
    "selected_32k_to_full": 1.5,
    "selected_128k_to_full": 3.0,
    "hit_to_h2d": 0.8,
    "step_beside_save_to_step": 0.97,
    "step_beside_load_to_step": 0.97,
}
"""What the ratios of the cases should reach; dispatcher_to_better: never slower, less its noise."""


def summary(suite: Suite) -> str:
    """The steps, then each case's ratios with what they should reach, then its notes."""
    link = suite.environment.get("link")
    said = ", ".join(f"{k} {v}" for k, v in link.items()) if isinstance(link, dict) else ""
    lines = [
        "# GPU suite",
        "",
        f"{suite.began}, commit {commit()}.",
        f"GPU: {suite.environment.get('gpu') or 'none: ' + suite.no_gpu}. {said}",
        "",
        "| step | state | s | |",
        "|---|---|---|---|",
    ]
    lines += [f"| {s.name} | {s.state} | {s.seconds:g} | {s.reason} |" for s in suite.steps]
    for name in CASES:
        found = suite.result(name)
        ratios, notes = found.get("ratios"), found.get("notes")
        if isinstance(ratios, dict) and ratios:
            lines += ["", f"## {name}", "", "| ratio | is | wanted |", "|---|---|---|"]
            for ratio, value in ratios.items():
                wanted = WANTED.get(ratio)
                aim = f"{wanted:g}{'' if value >= wanted else ': not reached'}" if wanted else ""
                lines.append(f"| {ratio} | {value:.3g} | {aim} |")
        if isinstance(notes, list) and notes:
            lines += ["", f"Notes of {name}:", "", *(f"- {note}" for note in notes)]
    if suite.failures:
        lines += ["", "## Tests that failed", "", *(f"- {line[:500]}" for line in suite.failures)]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build, test and measure the GPU path.")
    parser.add_argument("out", type=Path, help="the folder for JSON files and summary.md")
    parser.add_argument("--wheels", type=Path, help="a folder with wheels of what is missing here")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, no tests: does it run?")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it (8)")
    given = parser.parse_args(words)
    if given.wheels is not None and not given.wheels.is_dir():
        parser.error(f"--wheels {given.wheels}: no such folder")
    if not given.minutes > 0:
        parser.error(f"--minutes {given.minutes}: a number above 0 is wanted")
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("index.json", "summary.md", *(f"{case}.json" for case in CASES)):
        (out / name).unlink(missing_ok=True)  # of an earlier run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children end with us
    with tempfile.TemporaryDirectory(prefix="cxlkv-gpu-suite-") as work:
        suite = Suite(out, Path(work), given.wheels, given.quick, given.minutes)
        for name in STEPS:
            suite.do(name)
    suite.say(f"written: {out / 'summary.md'}")
    return 1 if any(step.state == "failed" for step in suite.steps) else 0


if __name__ == "__main__":
    sys.exit(main())
