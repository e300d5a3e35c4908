"""`python -m tests.authors FOLDER`; docs/methods.md says what it needs, and finds."""

from __future__ import annotations

import argparse
from pathlib import Path

from cxlkv.errors import BadArgumentError
from tests.authors.checkouts import Checkouts
from tests.authors.report import Plan, markdown, result_of, run
from tests.authors.states_report import run_states, states_markdown, states_result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.authors")
    parser.add_argument("folder", type=Path, help="of checkouts, each OWNER+NAME")
    parser.add_argument(
        "--model", type=Path, help="folder of a causal model; else random keys only"
    )
    parser.add_argument(
        "--states", action="store_true", help="methods with a state of the sequence, in their place"
    )
    parser.add_argument("--out", type=Path, help="the result file, JSON")
    given = parser.parse_args()
    folder = Checkouts(given.folder)
    try:
        folder.check()
        if given.states:
            states = run_states(folder, Plan(), given.model)
            result, table = states_result(states), states_markdown(states)
        else:
            found = run(folder, Plan(), given.model)
            result, table = result_of(found), markdown(found)
    except BadArgumentError as error:
        print(error)
        return 2
    print(table)
    for name, holds in result.checks.items():
        if not holds:
            print(f"not as theirs: {name}")
    if given.out:
        result.write(given.out)
    return 0 if result.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
