"""The report's table of accuracy by entity frequency (AOpt table 1)."""

from collections.abc import Mapping, Sequence
from typing import Any

from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.studies.definition import BM25, Study
from mvr_ray.studies.tables import Cell, Table, Value, VariantResult, spoken


def entity_table(study: Study, found: Sequence[VariantResult]) -> Table | None:
    """BM25 and every variant (of its first seed) in every bucket, with the difference between them (AOpt table 1)."""
    lines: dict[tuple[str, str], list[list[Value]]] = {}
    ks: list[int] = []
    for one in found:
        for report in one.reports.get("entity_frequency", [])[:1]:
            for asked in report["sets"]:
                ks = sorted({row["k"] for row in asked["rows"]})
                for system in dict.fromkeys(row["system"] for row in asked["rows"]):
                    key = asked["questions"], BM25 if system == BM25 else one.name
                    lines.setdefault(key, _lines([row for row in asked["rows"] if row["system"] == system], ks))
    rows: list[list[Value]] = [[name, asked, *line] for (asked, name), own in lines.items() for line in own]
    heads = [f"top-{k}" for k in ks] + [f"top-{k} over BM25, p" for k in ks]
    note = (
        "Percent of the questions with an answer-bearing passage among the first, with 95 % intervals over articles; "
        "the difference from BM25 in points, with its interval and the p of the paired test, which flips whole "
        "articles. A question's entity is its longest run of capitalised words; the buckets are the quartiles of the "
        f"number of passages whose text contains it. The paper's table: {study.config.paper}"
    )
    columns = ["system", "questions", "bucket", "n", "articles", *heads]
    return Table("Accuracy by entity frequency", note, columns, rows) if rows else None


def ranks_of(found: Sequence[VariantResult]) -> list[QuestionRanks]:
    """What every variant (of its first seed) and, once, BM25 found for every question."""
    ranks: dict[tuple[str, str], QuestionRanks] = {}
    for one in found:
        for report in one.reports.get("entity_frequency", [])[:1]:
            for fields in report["ranks"]:
                name = BM25 if fields["system"] == "bm25" else one.name
                ranks.setdefault(
                    (name, fields["questions"]),
                    QuestionRanks(name, *(fields[part] for part in QuestionRanks._fields[1:])),
                )
    return list(ranks.values())


def _lines(rows: Sequence[Mapping[str, Any]], ks: Sequence[int]) -> list[list[Value]]:
    """One system's buckets: name, n, articles, accuracy at every depth, gain over BM25 at every depth."""
    lines: list[list[Value]] = []
    for bucket in dict.fromkeys(row["bucket"] for row in rows):
        at = {row["k"]: row for row in rows if row["bucket"] == bucket}
        first = at[ks[0]]
        shares = [spoken(Cell(at[k]["value"], at[k]["low"], at[k]["high"], 1, first["n"])) for k in ks]
        lines.append([bucket, first["n"], first["articles"], *shares, *(_gain(at[k]["over_bm25"]) for k in ks)])
    return lines


def _gain(gain: Mapping[str, float] | None) -> str:
    if gain is None:
        return ""
    points = 100 * gain["value"], 100 * gain["low"], 100 * gain["high"]
    return "{:+.1f} ({:+.1f} to {:+.1f}), {:.2g}".format(*points, gain["p"])
