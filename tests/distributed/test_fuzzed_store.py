"""Whatever happens to one file of a store, a reader gives the same answers or an error that names it.

`MVR_RAY_FUZZ_SEED` is the seed of the slow test; the same seed and number are the same cases.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sweep

FUZZER = Path(__file__).with_name("store_fuzzer.py")
FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "store-baa77f8"
MEMORY_BYTES = 2 * 10**9


def fuzz(folder: Path, seed: int, cases: int) -> tuple[list[dict[str, str]], int]:
    """The outcome of each case, and the peak memory."""
    command = [sys.executable, str(FUZZER), str(FIXTURE), str(folder), str(seed), str(cases)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert process.returncode == 0, f"seed {seed}: {process.returncode} in {lines[-1:]}: {process.stderr[-2000:]}"
    results = [line for line in lines if "outcome" in line]
    assert len(results) == cases
    return results, lines[-1]["peak_bytes"]


def require_laws(results: list[dict[str, str]], peak_bytes: int, seed: int) -> None:
    wrong = [one for one in results if one["outcome"] not in ("equal", "refused")]
    assert not wrong, f"seed {seed}, {len(wrong)} of {len(results)}: " + "\n".join(map(json.dumps, wrong[:10]))
    assert peak_bytes < MEMORY_BYTES


def test_a_changed_file_of_any_kind_gives_the_same_answers_or_an_error_that_names_it(tmp_path) -> None:
    results, peak_bytes = fuzz(tmp_path, seed=1, cases=120)
    require_laws(results, peak_bytes, 1)
    assert len({one["kind"] for one in results}) > 25


@pytest.mark.slow
@pytest.mark.chaos("one file of a store is flipped, cut, extended or replaced, 2,000 cases", "named, or harmless")
def test_two_thousand_changed_files_give_the_same_answers_or_errors_that_name_them(tmp_path, record_property) -> None:
    seed = int(os.environ.get("MVR_RAY_FUZZ_SEED", "2"))
    results, peak_bytes = fuzz(tmp_path, seed, len(sweep.take(range(2000))))
    counts = ", ".join(
        f"{number} {name}" for name, number in sorted(Counter(one["outcome"] for one in results).items())
    )
    record_property("figures", f"seed {seed}: {counts}; {peak_bytes / 1e6:.0f} MB at most")
    require_laws(results, peak_bytes, seed)
