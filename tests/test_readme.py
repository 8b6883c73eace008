"""The five lines of the README give the output that stands below them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


def test_the_five_lines_give_the_output_below_them(tmp_path: Path) -> None:
    (language, program), (_, output), *_ = BLOCKS
    assert language == "python"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    score = re.compile(r"\b0\.\d{4}\b")  # a processor's own rounding shows in its last digit
    assert score.sub("SCORE", process.stdout) == score.sub("SCORE", output)
