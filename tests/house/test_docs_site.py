"""The documentation builds as a site: no page, link, anchor or public name is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [
        Path(sys.executable).with_name("mkdocs"),
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        tmp_path / "site",
    ]
    process = subprocess.run(
        command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0 and not process.stderr, process.stdout + process.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("index.html")}
    assert {"index.html", "guide/index.html", "api/index.html", "configuration/index.html"} <= pages
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert all(name in api for name in ("Index", "build", "upsert", "refine", "Encoder", "embed_passages", "Client"))
    decisions = (tmp_path / "site" / "decisions" / "index.html").read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "decisions").glob("*.md"):
        assert path.stem in decisions
