"""The five lines of the README give the output that stands below them."""

import logging
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


def test_the_five_lines_give_the_output_below_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    without_ray: None,
) -> None:
    """In this process. That a new one says nothing else either is a law of `test_install.py`."""
    (language, program), (_, output), *_ = BLOCKS
    assert language == "python"
    (tmp_path / "five_lines.py").write_text(program, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("five_lines.py")
    out, errors = capfd.readouterr()
    assert errors == ""
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    score = re.compile(r"\b0\.\d{4}\b")  # a processor's own rounding shows in its last digit
    assert score.sub("SCORE", out) == score.sub("SCORE", output)
