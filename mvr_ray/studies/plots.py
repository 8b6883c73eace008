"""Draw the reports of a study's steps as PNG plots, which the HTML page includes."""

import io
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from mvr_ray.studies.definition import BM25, Study
from mvr_ray.studies.refinement_tables import MANY_ROUNDS
from mvr_ray.studies.results import Report, VariantResult, stage_reports
from mvr_ray.studies.tables import Cell

_HELD_OUT = "unseen"
_GRID_FIELDS = ("method", "beta", "gamma", "keep_length")


class Plot(NamedTuple):
    """A PNG plot. `name` is the file name without its extension; `title` describes the plot."""

    name: str
    title: str
    png: bytes


def draw_plots(study: Study, results: Sequence[VariantResult]) -> list[Plot]:
    """Draw every plot for which the study has values, each under a name of its own: of equal ones, the second and
    further ones end in a number."""
    plots = [*_bars(study, results), *_learning_curves(study, results), *_budget(results)]
    for result in results:
        for _, report in stage_reports([result], "analyze", first_seed=True):
            if report["attention_kl_table"]:
                plots.append(_attention(result.name, report["attention_kl_table"]))
        for _, report in stage_reports([result], "refinement_grid"):
            plots += [*_grids(result.name, report), *_curves(result.name, report)]
    plots += _trade_off(results)
    names: set[str] = set()
    for at, plot in enumerate(plots):
        numbered_names = itertools.chain([plot.name], (f"{plot.name}-{number}" for number in itertools.count(2)))
        plots[at] = plot._replace(name=next(name for name in numbered_names if name not in names))
        names.add(plots[at].name)
    return plots


def _percents(cells: Iterable[Cell]) -> np.ndarray:
    """Return values, lower and upper ends of cells in percent, [3, cells]."""
    return 100 * np.array([[cell.value, cell.low, cell.high] for cell in cells]).T


def _bars(study: Study, results: Sequence[VariantResult]) -> Iterator[Plot]:
    metric = study.config.metrics[0]
    cells = {result.name: result.cells[metric] for result in results if metric in result.cells}
    if len(cells) < 2:
        return
    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.35 * len(cells)))
    value_C, low_C, high_C = _percents(cells.values())
    errors = np.maximum([value_C - low_C, high_C - value_C], 0)
    axes.barh(list(cells), value_C, xerr=errors, capsize=3, color="#4878a8")
    axes.invert_yaxis()
    axes.set(xlim=(max(0.0, low_C.min() - 3), None), xlabel=f"{metric}, percent, with 95 % interval")
    yield _plot(figure, "retrieval", f"{metric} of every variant")


def _learning_curves(study: Study, results: Sequence[VariantResult]) -> Iterator[Plot]:
    """Draw the first metric over training steps with its interval, and BM25 as a line."""
    metric = study.config.metrics[0]
    figure, axes = plt.subplots(figsize=(10, 5))
    ticks: set[int] = set()
    for result in (result for result in results if metric in result.cells):
        points = {at: point.cells[metric] for at, point in result.curve.items() if metric in point.cells}
        ends = [report["epochs"][-1]["step"] for report in result.reports.get("train", [])[-1:] if report.get("epochs")]
        if points:
            points |= dict.fromkeys(ends, result.cells[metric])
            steps = sorted(points)
            value_C, low_C, high_C = _percents(points[step] for step in steps)
            [line] = axes.plot(steps, value_C, marker="o", label=result.name)
            axes.fill_between(steps, low_C, high_C, color=line.get_color(), alpha=0.08)
            ticks |= {*steps}
    if not axes.lines:
        plt.close(figure)
        return
    for result in results:
        if result.name == BM25 and metric in result.cells:
            axes.axhline(100 * result.cells[metric].value, linestyle=":", color="grey", label=BM25)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [f"{step:,}" for step in sorted(ticks)])
    axes.set(xlabel="training steps", ylabel=f"{metric}, percent")
    best_first = sorted(axes.lines, key=lambda line: -np.asarray(line.get_ydata(), float)[-1])
    axes.legend(handles=best_first, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    yield _plot(figure, "curve", f"{metric} over the training budget, with 95 % intervals over articles")


def _budget(results: Sequence[VariantResult]) -> Iterator[Plot]:
    """Draw dev accuracy over training steps, for variants with several measurements."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for result, report in stage_reports(results, "train", first_seed=True):
        epochs = [epoch for epoch in report.get("epochs", []) if epoch["dev_top1"] is not None]
        if len(epochs) > 1:
            accuracies = [100 * epoch["dev_top1"] for epoch in epochs]
            axes.plot([epoch["step"] for epoch in epochs], accuracies, marker="o", label=result.name)
    if not axes.lines:
        plt.close(figure)
        return
    axes.set(xlabel="training steps", ylabel="dev top-1 among dev passages, percent")
    axes.legend(fontsize=7)
    yield _plot(figure, "budget", "Accuracy over the training budget (first seed)")


def _attention(name: str, table: list[list[float | None]]) -> Plot:
    values_VV = np.array(table, np.float64)  # None is nan
    np.fill_diagonal(values_VV, 0.0)  # up to rounding, the divergence of a view from itself
    figure, axes = plt.subplots(figsize=(4.6, 4))
    views = [str(view) for view in range(len(table))]
    _heat(axes, values_VV, views, views, "%.2g")
    axes.set(xlabel="view j", ylabel="view i")
    title = f"{name}: D(i, j) = KL(attention of view j || of view i) in nats (CAMVR eq. 14)"
    return _plot(figure, f"attention-kl-{_slug(name)}", title)


def _heat(axes: Axes, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], form: str) -> None:
    image = axes.imshow(values, cmap="viridis")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    middle = np.nanmean(values) if np.isfinite(values).any() else 0.0
    for row, column in np.argwhere(np.isfinite(values)):
        color = "white" if values[row, column] < middle else "black"
        axes.text(column, row, form % values[row, column], ha="center", va="center", fontsize=6, color=color)
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, shrink=0.8)


def _grids(name: str, report: Report) -> Iterator[Plot]:
    """Draw heat maps of the linear form over beta and gamma (AOpt figure 6), one figure for every question set, length,
    and value of the other fields, of the first four depths."""
    groups: dict[tuple[bool, tuple[tuple[str, Any], ...]], dict[tuple[float, float], list[Report]]] = {}
    for trial in (trial for trial in report["tried"] if trial["setting"]["method"] == "linear"):
        setting = trial["setting"]
        others = tuple((field, value) for field, value in setting.items() if field not in _GRID_FIELDS)
        own = groups.setdefault((setting["keep_length"], others), {})
        own[setting["beta"], setting["gamma"]] = trial["rounds"][-1]["sets"]
    for (keeps_length, others), last_rounds in sorted(groups.items(), key=lambda group: not group[0][0]):
        length = "length kept" if keeps_length else "raw"
        differences = {field: value for field, value in others if any((field, value) not in own for _, own in groups)}
        betas = sorted({beta for beta, _ in last_rounds})
        gammas = sorted({gamma for _, gamma in last_rounds}, reverse=True)
        if len(betas) < 2 or len(gammas) < 2:
            continue
        for number, accuracy in enumerate(next(iter(last_rounds.values()))):
            figure, grid = plt.subplots(2, 2, figsize=(11, 9.5))
            depths = list(accuracy["answer"])[: grid.size]
            for axes in grid.flat[len(depths) :]:
                axes.set_axis_off()
            for axes, depth in zip(grid.flat, depths):
                values = np.full((len(betas), len(gammas)), np.nan)
                for (beta, gamma), sets in last_rounds.items():
                    values[betas.index(beta), gammas.index(gamma)] = 100 * sets[number]["answer"][depth]
                _heat(axes, values, [f"{b:g}" for b in betas], [f"{g:g}" for g in gammas], "%.1f")
                axes.set(xlabel="gamma", ylabel="beta", title=f"top-{depth}, percent")
            form = ", ".join([length, *(f"{field} {value}" for field, value in differences.items())])
            title = f"{name}: linear form, {form}, on {accuracy['questions']} (answer-bearing)"
            yield _plot(figure, f"linear-{_slug(length)}-{_slug(name)}-{_slug(accuracy['questions'])}", title)


def _curves(name: str, report: Report) -> Iterator[Plot]:
    """Draw accuracy and loss over rounds (AOpt figure 7), norms and hubs; a dot marks the chosen round."""
    for trial in report["tried"]:
        rounds = trial["rounds"]
        if len(rounds) <= MANY_ROUNDS:
            continue
        names = [accuracy["questions"] for accuracy in rounds[0]["sets"]]
        figure, (accuracy_axes, loss_axes, hub_axes) = plt.subplots(1, 3, figsize=(14, 3.6))
        for number, questions in enumerate(names):
            for kind, style in (("answer", "-"), ("gold", "--")):
                values = [100 * state["sets"][number][kind]["1"] for state in rounds]
                accuracy_axes.plot(values, style, label=f"{questions} {kind}", color=f"C{number}")
                accuracy_axes.plot(trial["chosen"], values[trial["chosen"]], "o", color=f"C{number}")
        accuracy_axes.legend(fontsize=6)
        # the loss of a round is that of the state before it
        loss_axes.plot([np.nan if state["loss"] is None else state["loss"] for state in rounds[1:]])
        loss_axes.axvline(trial["lowest_loss"], linestyle=":", color="grey")
        for at in (0, -1):
            largest = [state["sets"][at]["hubs"]["most"] for state in rounds]
            hub_axes.plot(largest, label=f"largest hub, {names[at]}", color=f"C{at % 4}")
        hub_axes.set_ylim(bottom=0)
        accuracy_axes.set(xlabel="round", ylabel="top-1, percent")
        loss_axes.set(xlabel="round", ylabel="loss (dotted: where it is lowest)")
        hub_axes.set(xlabel="round", ylabel="foreign top-10 lists of one passage")
        norms = hub_axes.twinx()
        norms.plot([state["norm_mean"] for state in rounds], "k--", label="mean norm of moved views")
        norms.ticklabel_format(useOffset=False)
        hub_axes.legend(handles=[*hub_axes.get_lines(), *norms.get_lines()], fontsize=6)
        title = f"{name}, {trial['label']}: what rounds do"
        yield _plot(figure, f"rounds-{_slug(name)}-{_slug(trial['label'])}", title)


def _trade_off(results: Sequence[VariantResult]) -> Iterator[Plot]:
    """Draw gain on the labelled questions against the cost on unseen articles, a point for every setting and round."""
    points: dict[str, list[tuple[float, float]]] = {}
    for result, report in stage_reports(results, "refinement_grid"):
        names = [accuracy["questions"] for accuracy in report["tried"][0]["rounds"][0]["sets"]]
        unseen_at = next((at for at, name in enumerate(names) if name.endswith(_HELD_OUT)), None)
        if unseen_at is None:
            continue
        for trial in report["tried"]:
            method = trial["setting"]["method"] + (", raw" if not trial["setting"]["keep_length"] else "")
            label = f"{result.name}: {method}" if len(results) > 1 else method
            top1 = [[state["sets"][at]["answer"]["1"] for at in (unseen_at, 0)] for state in trial["rounds"]]
            for shares in top1[1:]:
                cost, gain = (100 * (after - before) for after, before in zip(shares, top1[0]))
                points.setdefault(label, []).append((cost, gain))
    if not points:
        return
    figure, axes = plt.subplots(figsize=(8, 5.5))
    styles = itertools.cycle((f"C{color}", marker) for marker in "osv^D*" for color in range(10))
    for (label, pairs), (color, marker) in zip(points.items(), styles):
        axes.scatter(*zip(*pairs), s=14, alpha=0.7, label=label, color=color, marker=marker)
    axes.axvline(-1, linestyle=":", color="grey")
    axes.set(
        xlabel="change on unseen articles, points of top-1 (dotted: one point lost)",
        ylabel="gain on the labelled questions, points of top-1",
    )
    axes.legend(fontsize=7)
    yield _plot(figure, "trade-off", "What refinement gains on known questions, and what unseen articles pay")


def _plot(figure: Figure, name: str, title: str) -> Plot:
    figure.suptitle(textwrap.fill(title, int(11 * figure.get_figwidth())), fontsize=10)
    figure.tight_layout()
    colours, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(colours, format="png", dpi=100)
    plt.close(figure)
    # a palette takes a third of the bytes, and a page holds dozens of plots
    Image.open(colours).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    return Plot(name, title, buffer.getvalue())


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60]
