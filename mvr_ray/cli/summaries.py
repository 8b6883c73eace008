"""Summarize the report of a stage: the main figures, a verdict, and the next command.

Everything fits a terminal of 80 columns. `--verbose` prints what a summary leaves out, such as digests and settings,
and report.json has it.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from mvr_ray.cli.tables import cell, report_tables, size, table

Report = Mapping[str, Any]
NUM_NAMED = 3


class Summary(NamedTuple):
    """`verdict` is the outcome of the stage in a line or two; `next` is a command without `mvr-ray`, or empty."""

    tables: list[Table]
    verdict: str
    next: str


def summarize(stage: str, report: Report, words: Sequence[str]) -> Summary | None:
    """Summarize a plain report; None for a stage without a summary.

    `words` are CONFIG and the overrides of the command, which the next command shares.
    """
    summary = _SUMMARIES.get(stage)
    return summary(report, shlex.join(words)) if summary else None


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def count(number: int, what: str) -> str:
    """`1 passage`, `2,000 passages`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _facts(rows: Mapping[str, Any], title: str = "") -> list[Table]:
    """Return a table of labels and values without those that are zero or empty; no table if none is left."""
    lines = [(label, cell(value)) for label, value in rows.items() if value not in (None, 0, "", [], {})]
    return [table(title, ("", ""), lines)] if lines else []


def _prepare(report: Report, words: str) -> Summary:
    drop_counts = report["dropped_by_reason"]
    bad = report["bad_rows"]
    facts = {
        "passages read": report["passages_read"],
        "chunks gained": report["chunks_gained"],
        "passages not drawn": report["passages_not_drawn"],
        "duplicates": report["duplicates"],
        "bad rows": f"{len(bad):,}, first: {bad[0]['where']}: {bad[0]['reason']}" if bad else 0,
        "rows left out": ", ".join(f"{number:,} ({reason})" for reason, number in drop_counts.items()),
        "questions not drawn": report["questions_not_drawn"],
        "hard negatives dropped": report["hard_negatives_dropped"],
        "fields": ", ".join(f"{name} ({kind})" for name, kind in report["fields"].items()),
        "question sets": "\n".join(f"{name} {cell(number)}" for name, number in report["questions"].items()),
    }
    num = report["passages_written"]
    return Summary(_facts(facts), f"prepared: {count(num, 'passage')}", f"index {words}" if num else "")


def _train(report: Report, words: str) -> Summary:
    epochs = report["epochs"]
    names = [name for name in ("epoch", "step", "loss", "lv", "dev_top1", "collapsed") if epochs and name in epochs[0]]
    rows = [[epoch[name] for name in names] for epoch in epochs]
    tables = [table("epochs", [name.replace("_", " ") for name in names], rows)] if rows else []
    verdict = f"trained: {report['name']}/{report['fingerprint']}"
    if epochs and epochs[-1].get("collapsed"):
        verdict += "; its views are all alike (collapsed): see docs/math.md"
    next_commands = {"readers": f"read {words} ranking=FILE", "cross_encoders": f"mine {words}"}
    return Summary(tables, verdict, next_commands.get(str(report["folder"]).partition("/")[0], f"index {words}"))


def _mine(report: Report, words: str) -> Summary:
    facts = {
        "hits": report["hits"],
        "dropped as gold": report["dropped_gold"],
        "dropped as answers": report["dropped_answer_bearing"],
        "dropped by the cross-encoder": report["dropped_by_cross_encoder"],
        "questions with fewer": report["short"],
        "questions without any": report["without"],
    }
    negatives = f"{count(report['negatives'], 'hard negative')} for {count(report['questions'], 'question')}"
    verdict = f"mined: {negatives}, as question set {report['output']}"
    return Summary(_facts(facts), verdict, f"train {words} train.hard_negatives={report['output']}")


def _index_facts(report: Report) -> dict[str, Any]:
    shards, metrics = report["shards"], report["metrics"]
    vectors = sum(shard["num_vectors"] for shard in shards)
    num_bytes = sum(file["num_bytes"] for shard in shards for file in shard["files"].values())
    return {
        "encoder": report["encoder_name"],
        "kind": report["index_params"].get("kind"),
        "shards": len(shards),
        "vectors": f"{vectors:,} of {report['dimension']} ({report['dtype']}), {size(num_bytes)}",
        "passages encoded": metrics.get("encoded"),
        "passages kept": metrics.get("carried_over"),
        "passages deleted": metrics.get("deleted"),
        "recall": report["recall"],
        "view pair cosine": metrics.get("view_pair_cosine"),
    }


def _index(report: Report, words: str) -> Summary:
    passages = sum(shard["num_passages"] for shard in report["shards"])
    verdict = f"live: version {report['version']} of index {report['index']}, {count(passages, 'passage')}"
    if report["metrics"].get("collapsed"):
        verdict += "; its views are all alike (collapsed): see docs/math.md"
    return Summary(_facts(_index_facts(report)), verdict, f'search {words} "your question"')


def _refine(report: Report, words: str) -> Summary:
    columns = ("group", "protocol", "questions", "top-1", "top-5")
    rows = [
        (row["group"], row["protocol"], row["num_questions"], _change(row, "top_1"), _change(row, "top_5"))
        for row in report["accuracy"]
    ]
    manifest = report["published"]
    if manifest is None:
        verdict = f"not published: {report['reason']}; version {report['base_version']} stays live"
        return Summary([table("accuracy, in percent", columns, rows)], verdict, f"analyze {words}")
    verdict = (
        f"live: version {manifest['version']} of index {manifest['index']}, "
        f"{percent(report['dirty_share'])} % of passages changed ({report['reason']})"
    )
    return Summary([table("accuracy, in percent", columns, rows)], verdict, f"evaluate {words}")


def _change(row: Report, name: str) -> str:
    return f"{percent(row[f'{name}_before'])} to {percent(row[f'{name}_after'])}"


def _accuracy_tables(rows: Sequence[Report], system: str) -> list[Table]:
    """Return a table a question set and kind of metric: systems down, metrics across, in percent."""
    tables: list[Table] = []
    groups = dict.fromkeys((row["questions"], row["metric"].partition("/")[0]) for row in rows)
    for questions, kind in groups:
        own = [row for row in rows if (row["questions"], row["metric"].partition("/")[0]) == (questions, kind)]
        metrics = list(dict.fromkeys(row["metric"].partition("/")[2] for row in own))
        systems = list(dict.fromkeys(row["system"] for row in own))
        values = {(row["system"], row["metric"].partition("/")[2]): row["value"] for row in own}
        lines = [[name, *(percent(values.get((name, metric))) for metric in metrics)] for name in systems]
        title = f"{questions}: {count(own[0]['n'], 'question')}, in percent, by {kind}"
        tables.append(table(title, [system, *metrics], lines))
    return tables


def _evaluate(report: Report, words: str) -> Summary:
    rows = report["rows"]
    verdict = (
        f"evaluated: version {report['version']} of index {report['index']}, {count(report['passages'], 'passage')}"
    )
    firsts = {row["questions"]: row for row in reversed(rows) if row["system"] == report["index"]}
    main_rows = list(reversed(firsts.values()))[:NUM_NAMED]
    for row in main_rows:
        interval = f"{percent(row['low'])} to {percent(row['high'])}"
        verdict += f"\n  {row['questions']}: {row['metric'].partition('/')[2]} {percent(row['value'])} % ({interval})"
    return Summary(_accuracy_tables(rows, "system"), verdict, f"serve {words}")


def _analyze(report: Report, words: str) -> Summary:
    shares = ", ".join(percent(share) for share in report["win_shares"])
    facts = {
        "best view of the own passage, %": shares,
        "PPL": report["ppl"],
        "LV": report["lv"],
        "view pair cosine": report["view_pair_cosine"],
        "attention KL": report["attention_kl"],
    }
    ppl = report["ppl"]
    questions = count(report["num_questions"], "question")
    verdict = f"analyzed: version {report['version']} of index {report['index']}, {questions}"
    if ppl is not None:
        verdict += f"\n  of {len(report['win_shares'])} views, {ppl:.2f} answer the questions of a passage (PPL)"
    return Summary(
        [*_facts(facts), *_accuracy_tables(report["rows"], "view")], verdict, f'explain {words} "your question"'
    )


def _retrieve(report: Report, words: str) -> Summary:
    verdict = (
        f"retrieved: {report['k']} passages for each of {count(report['questions'], 'question')}, "
        f"from version {report['version']} of index {report['index']}\n  {report['output']} ({report['format']})"
    )
    command = f"read {words} ranking={shlex.quote(report['output'])}" if report["format"] in ("dpr", "jsonl") else ""
    return Summary([], verdict, command)


def _read(report: Report, words: str) -> Summary:
    rows = report["rows"]
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    values = {(row["passages"], row["metric"]): row["value"] for row in rows}
    lines = [
        [k, *(percent(values[k, metric]) for metric in metrics)] for k in dict.fromkeys(row["passages"] for row in rows)
    ]
    tables = (
        [table("answers, in percent", ["passages", *(m.replace("_", " ") for m in metrics)], lines)] if lines else []
    )
    verdict = f"read: {count(report['questions'], 'question')} by {report['reader']}"
    if report["unread"]:
        verdict += f", {report['unread']:,} of them without any text"
    if report["output"]:
        verdict += f"\n  {report['output']}"
    return Summary(tables, verdict, "")


def _update(report: Report, words: str) -> Summary:
    names = ("added", "replaced", "deleted", "unchanged", "absent", "questions_dropped")
    facts = {name.replace("_", " "): report[name] for name in names}
    num_changes = report["added"] + report["replaced"] + report["deleted"]
    verdict = f"updated: {count(report['passages'], 'passage')} in corpus {report['corpus']}, {num_changes:,} changed"
    return Summary(_facts(facts), verdict, f"index {words}")


def _compact(report: Report, words: str) -> Summary:
    if report["version"] == report["base_version"]:
        return Summary([], f"nothing to do: version {report['version']} has no changes beside its shards", "")
    verdict = (
        f"live: version {report['version']} of index {report['index']}, {count(report['shards_written'], 'shard')} "
        f"written whole, {size(report['bytes_before'])} before, {size(report['bytes'])} now"
    )
    return Summary([], verdict, f"versions {words.partition(' ')[0]} list")


def _reshard(report: Report, words: str) -> Summary:
    if report["version"] == report["base_version"]:
        return Summary([], f"nothing to do: version {report['version']} has {count(report['shards'], 'shard')}", "")
    verdict = (
        f"live: version {report['version']} of index {report['index']}, {count(report['passages'], 'passage')} "
        f"in {count(report['shards'], 'shard')} ({report['shards_before']:,} before)"
    )
    return Summary([], verdict, f"versions {words.partition(' ')[0]} list")


def versions_tables(index: str, action: str, report: Any, *, verbose: bool) -> list[Table]:
    """Return the tables of an action on versions; `report` is its plain result."""
    if verbose or action not in ("list", "show"):
        return report_tables(f"index {index}", {"versions": report} if isinstance(report, list) else report)
    if action == "show":
        title = f"version {report['version']} of index {index}, by {report['operation']}"
        return _facts(_index_facts(report), title)
    names = ("version", "parent", "operation")
    rows = [
        (*(row[name] for name in names), row["created"][:16].replace("T", " "), row["passages"], "live" * row["live"])
        for row in report
    ]
    return [table(f"index {index}", ("version", "parent", "operation", "created", "passages", ""), rows)]


_SUMMARIES: dict[str, Callable[[Report, str], Summary]] = {
    "prepare": _prepare,
    "train": _train,
    "mine": _mine,
    "index": _index,
    "refine": _refine,
    "evaluate": _evaluate,
    "analyze": _analyze,
    "retrieve": _retrieve,
    "read": _read,
    "update": _update,
    "compact": _compact,
    "reshard": _reshard,
}
