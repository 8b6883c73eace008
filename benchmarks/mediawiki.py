"""Measure how fast one core reads the articles of a MediaWiki dump, and extrapolate to a whole wiki.

    python benchmarks/mediawiki.py                        # an excerpt of the English Wikipedia, 206 pages
    python benchmarks/mediawiki.py enwiki.xml.bz2 --rounds 1

Steps are cumulative: decompress; also read the XML; also parse the wikitext; and all of `prepare`, with chunks of 100
words. Each is one process on one thread, timed by processor time, so that other load on the machine does not count.
Results: results/mediawiki.md and .json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import RESULTS, ROOT, hardware
from squad_files import DATA

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.store.files import Store
from mvr_ray.store.formats.mediawiki import read_pages
from mvr_ray.store.formats.records import PassageRecord
from mvr_ray.store.formats.sources import read_source
from mvr_ray.store.formats.text_files import open_bytes
from mvr_ray.store.prepare import prepare

EXCERPT = DATA / "wikipedia_dump" / "enwiki-pages-articles-shortened.xml.bz2"
READ_BYTES = 1 << 20
WHOLE_GB = 105
"""Assumed size of the English dump as XML, some 25 GB as bzip2: the order of size that the page below gives."""
WHOLE_SOURCE = "https://en.wikipedia.org/wiki/Wikipedia:Database_download"
STEPS = ("bzip2", "bzip2 and XML", "bzip2, XML and wikitext", "prepare")
MEMORY = """
import sys
from machine import forget_peak, peak_bytes
from mvr_ray.config import SourceConfig
from mvr_ray.store.formats.sources import read_source
before = peak_bytes()
for record in read_source(SourceConfig(path=sys.argv[1], format="mediawiki")):
    pass
print(peak_bytes() - before)
"""


def decompress(path: Path) -> int:
    """Read the file and return its bytes when decompressed."""
    num_bytes = 0
    with open_bytes(path) as file:
        while data := file.read(READ_BYTES):
            num_bytes += len(data)
    return num_bytes


def prepare_corpus(source: SourceConfig) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return prepare(PrepareConfig(sources=[source], chunk_words=100), Store(folder)).passages_written


def cpu_seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def measure(path: Path, rounds: int) -> dict[str, Any]:
    """Time every step in every round; all steps run before any runs again."""
    source = SourceConfig(path=str(path), format="mediawiki")
    cases: tuple[Callable[[], Any], ...] = (
        lambda: decompress(path),
        lambda: sum(1 for _ in read_pages(path)),
        lambda: sum(1 for _ in read_source(source)),
        lambda: prepare_corpus(source),
    )
    samples: dict[str, list[float]] = {step: [] for step in STEPS}
    for _ in range(rounds):
        for step, run in zip(STEPS, cases):
            samples[step].append(cpu_seconds(run))
    memory = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)], cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True
    )
    return {
        "file": path.name,
        "megabytes": decompress(path) / 1e6,
        "pages": sum(1 for _ in read_pages(path)),
        "articles": sum(isinstance(record, PassageRecord) for record in read_source(source)),
        "passages": prepare_corpus(source),
        "cpu_seconds": samples,
        "reader_bytes": int(memory.stdout),
        "hardware": hardware(),
    }


def markdown(report: dict[str, Any]) -> str:
    medians = {step: statistics.median(seconds) for step, seconds in report["cpu_seconds"].items()}
    megabytes, passages = report["megabytes"], report["passages"]
    total = medians["prepare"]
    lines = [
        "# Reading a MediaWiki dump",
        "",
        f"`{report['file']}`: {megabytes:.2f} MB of XML, {report['pages']:,} pages, {report['articles']:,} articles, "
        f"{passages:,} passages of up to 100 words. Seconds of one core (processor time), steps cumulative, median of "
        f"{len(report['cpu_seconds'][STEPS[0]])} rounds; command: `python benchmarks/mediawiki.py`.",
        "",
        "| step | seconds | least..most | its own share of prepare | MB of XML/s | passages/s |",
        "|---|---|---|---|---|---|",
    ]
    before = 0.0
    for step, seconds in medians.items():
        samples = report["cpu_seconds"][step]
        lines.append(
            f"| {step} | {seconds:.3g} | {min(samples):.3g}..{max(samples):.3g} | {(seconds - before) / total:.0%} | "
            f"{megabytes / seconds:.3g} | {passages / seconds:,.0f} |"
        )
        before = seconds
    hours = WHOLE_GB * 1000 / megabytes * total / 3600
    machine = report["hardware"]
    lines += [
        "",
        f"- The whole English Wikipedia at this rate: {hours:.0f} hours on one core, and no less on more, since "
        f"`prepare` is one process. Assumed are {WHOLE_GB} GB of XML ({WHOLE_SOURCE}), all of them like this file; "
        "templates, modules, categories and project pages, which the reader passes over unparsed, make it less.",
        f"- The reader's memory beyond that of the loaded modules: {report['reader_bytes'] / 1e6:.0f} MB at most.",
        f"- measured {machine['date']} at commit {machine['commit']}, one of {machine['cores']} cores of "
        f"{machine['processor']}, Python {machine['python']}",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path, nargs="?", default=EXCERPT)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    report = measure(args.dump, args.rounds)
    (RESULTS / "mediawiki.json").write_text(json.dumps(report, indent=2) + "\n")
    (RESULTS / "mediawiki.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
