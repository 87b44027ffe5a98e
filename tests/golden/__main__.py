"""Write the values that `test_golden` compares with: `python -m tests.golden`, after a change that is meant to be one.

Prints what is different from before. Names of runs, such as `python -m tests.golden sweep`, write only those.
"""

import json
import logging
import re
import sys

import torch

from tests.golden.runs import RUNS, VALUES, describe_arithmetic, differences, read_values, run


def main():
    torch.set_num_threads(1)  # as in the tests
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    before = read_values() if VALUES.exists() else {"arithmetic": {}, "runs": {}}
    names = sys.argv[1:] or list(RUNS)
    arithmetic = describe_arithmetic()
    if set(names) != set(RUNS) and arithmetic != before["arithmetic"]:
        sys.exit(f"The other values are of {before['arithmetic']}, not of {arithmetic}: write all of them.")
    runs = {name: run(name) if name in names else before["runs"][name] for name in RUNS}
    text = json.dumps({"arithmetic": arithmetic, "runs": runs}, indent=1)
    text = re.sub(r"\[[^][{}]*\]", lambda row: re.sub(r"\s+", " ", row[0]), text)  # a row of numbers on a line
    VALUES.write_text(f"{text}\n", encoding="utf-8")
    after = read_values()["runs"]
    for name in names:
        for difference in differences(after[name], before["runs"].get(name, {}), tolerance=0):
            sys.stdout.write(f"{name}: {difference[:300]}\n")


if __name__ == "__main__":
    main()
