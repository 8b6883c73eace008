"""Checks that the benchmark of the dump reader counts what the dump holds, and that its shares are those of a whole."""

import bz2
import re
from pathlib import Path

import mediawiki
import pytest


def test_a_small_dump_is_counted_and_its_shares_are_of_one_whole(tmp_path: Path):
    article = "<page><title>T{0}</title><ns>{1}</ns><id>{0}</id><revision><id>9</id><text>{2}</text></revision></page>"
    pages = [article.format(number, number % 2, "word [[link]] " * 75) for number in range(40)]
    xml = f"<mediawiki>{''.join(pages)}</mediawiki>"
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(bz2.compress(xml.encode()))
    report = mediawiki.measure(path, rounds=1)
    assert report["megabytes"] == len(xml) / 1e6
    assert (report["pages"], report["articles"], report["passages"]) == (40, 20, 40)
    assert all(len(samples) == 1 for samples in report["cpu_seconds"].values())
    shares = [int(share) for share in re.findall(r" (-?\d+)% \|", mediawiki.markdown(report))]
    assert len(shares) == len(mediawiki.STEPS)
    assert sum(shares) == pytest.approx(100, abs=len(shares))
