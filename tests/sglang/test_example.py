"""examples/sglang.sh: its options are the server's own, and its settings make our store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

from .drivers import made
from .hicache import CLASS
from .test_start import host

# isort: split
from sglang.srt.server_args import ServerArgs

SCRIPT = Path(__file__).resolve().parents[2] / "examples/sglang.sh"
SAYS_ITS_WORDS = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"


def test_the_command_is_taken_and_makes_our_store(tmp_path: Path, folder: str) -> None:
    python = tmp_path / "python"
    python.write_text(SAYS_ITS_WORDS)
    python.chmod(0o700)
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = subprocess.check_output(["sh", SCRIPT, "MODEL"], env={**os.environ, "PATH": path})
    launched, *words = json.loads(said)[1:]
    assert launched == "sglang.launch_server"
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(words)
    assert given.enable_hierarchical_cache
    assert given.hicache_storage_backend == "dynamic"
    extra = json.loads(given.hicache_storage_backend_extra_config)
    wanted = {**CLASS, "interface_v1": 1, "hicache_storage_pass_prefix_keys": True}
    assert {**extra, "cxlkv": None} == {**wanted, "cxlkv": None}
    small = {"where": f"{folder}a.pool", "capacity": "64MiB"}
    store = made(host(layout=given.hicache_mem_layout), {**extra["cxlkv"], **small})
    assert Path(f"{folder}a.pool").is_file()
    store.close()
