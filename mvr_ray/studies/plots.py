"""The reports of a study's steps, as plots: PNG files that also stand in the page."""

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from mvr_ray.studies.definition import Study
from mvr_ray.studies.refinement_tables import MANY_ROUNDS
from mvr_ray.studies.tables import VariantResult

_DEPTHS = ("1", "5", "20", "100")
_HELD_OUT = "unseen"
Tried = dict[str, Any]


class Plot(NamedTuple):
    """`name` is the file's, without its ending; `title` says what is to be seen."""

    name: str
    title: str
    png: bytes


def plots_of(study: Study, found: Sequence[VariantResult]) -> list[Plot]:
    """Every plot that the steps of the study give rise to."""
    made = [plot for plot in (_bars(study, found), _budget(found)) if plot]
    for one in found:
        for report in one.reports.get("analyze", [])[:1]:
            if report["attention_kl_table"]:
                made.append(_attention(one.name, report["attention_kl_table"]))
        for report in one.reports.get("refinement_grid", []):
            made += _grids(one.name, report)
            made += _curves(one.name, report)
    trade = _trade_off(found)
    return [*made, *([trade] if trade else [])]


def _bars(study: Study, found: Sequence[VariantResult]) -> Plot | None:
    metric = study.config.metrics[0]
    shown = [(one.name, one.cells[metric]) for one in found if metric in one.cells]
    if len(shown) < 2:
        return None
    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.35 * len(shown)))
    values = np.array([100 * cell.value for _, cell in shown])
    errors = np.array([[100 * (cell.value - cell.low), 100 * (cell.high - cell.value)] for _, cell in shown]).T
    axes.barh([name for name, _ in shown], values, xerr=np.maximum(errors, 0), capsize=3, color="#4878a8")
    axes.invert_yaxis()
    axes.set_xlim(left=max(0.0, float((values - errors[0]).min()) - 3))
    axes.set_xlabel(f"{metric}, percent, with 95 % interval")
    return _plot(figure, "retrieval", f"{metric} of every variant")


def _budget(found: Sequence[VariantResult]) -> Plot | None:
    """Dev accuracy over training steps, where variants were measured at several."""
    curves = {
        one.name: [
            (epoch["step"], epoch["dev_top1"]) for epoch in report.get("epochs", []) if epoch["dev_top1"] is not None
        ]
        for one in found
        for report in one.reports.get("train", [])[:1]
    }
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    if not curves:
        return None
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, points in curves.items():
        axes.plot(*zip(*((step, 100 * value) for step, value in points)), marker="o", label=name)
    axes.set_xlabel("training steps")
    axes.set_ylabel("dev top-1 among dev passages, percent")
    axes.legend(fontsize=7)
    return _plot(figure, "budget", "Accuracy over the training budget (first seed)")


def _attention(name: str, table: list[list[float | None]]) -> Plot:
    values_VV = np.array([[np.nan if value is None else value for value in row] for row in table])
    np.fill_diagonal(values_VV, 0.0)  # up to rounding, what a view has to itself
    figure, axes = plt.subplots(figsize=(4.6, 4))
    _heat(
        axes, values_VV, [str(view + 1) for view in range(len(table))], [str(v + 1) for v in range(len(table))], "%.2g"
    )
    axes.set_xlabel("view j")
    axes.set_ylabel("view i")
    title = f"{name}: D(i, j) = KL(attention of view j || of view i) in nats (CAMVR eq. 14)"
    return _plot(figure, f"attention-kl-{_slug(name)}", title)


def _heat(axes: Axes, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], form: str) -> None:
    image = axes.imshow(values, cmap="viridis")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    middle = np.nanmean(values) if np.isfinite(values).any() else 0.0
    for row, column in np.ndindex(*values.shape):
        if np.isfinite(values[row, column]):
            color = "white" if values[row, column] < middle else "black"
            axes.text(column, row, form % values[row, column], ha="center", va="center", fontsize=6, color=color)
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, shrink=0.8)


def _grids(name: str, report: dict[str, Any]) -> Iterator[Plot]:
    """Heat maps of the linear form over beta and gamma (AOpt figure 6), a figure for every question set and length."""
    for keeps_length in (True, False):
        tried = [
            one
            for one in report["tried"]
            if one["setting"]["method"] == "linear" and one["setting"]["keep_length"] == keeps_length
        ]
        betas = sorted({one["setting"]["beta"] for one in tried})
        gammas = sorted({one["setting"]["gamma"] for one in tried}, reverse=True)
        if len(betas) < 2 or len(gammas) < 2:
            continue
        length = "length kept" if keeps_length else "raw"
        for number, results in enumerate(tried[0]["rounds"][0]["sets"]):
            figure, grid = plt.subplots(2, 2, figsize=(11, 9.5))
            for axes, depth in zip(grid.flat, _DEPTHS):
                values = np.full((len(betas), len(gammas)), np.nan)
                for one in tried:
                    at = betas.index(one["setting"]["beta"]), gammas.index(one["setting"]["gamma"])
                    values[at] = 100 * one["rounds"][-1]["sets"][number]["answer"][depth]
                _heat(axes, values, [f"{b:g}" for b in betas], [f"{g:g}" for g in gammas], "%.1f")
                axes.set_ylabel("beta")
                axes.set_xlabel("gamma")
                axes.set_title(f"top-{depth}, percent")
            title = f"{name}: linear form, {length}, on {results['questions']} (answer-bearing)"
            yield _plot(figure, f"linear-{_slug(length)}-{_slug(name)}-{_slug(results['questions'])}", title)


def _curves(name: str, report: dict[str, Any]) -> Iterator[Plot]:
    """Accuracy and loss over rounds (AOpt figure 7), norms and hubs; a dot marks the round that is kept."""
    tried = [one for one in report["tried"] if len(one["rounds"]) > MANY_ROUNDS]
    for one in tried:
        figure, (left, right, drift) = plt.subplots(1, 3, figsize=(14, 3.6))
        rounds = one["rounds"]
        for number, results in enumerate(rounds[0]["sets"]):
            for kind, style in (("answer", "-"), ("gold", "--")):
                values = [100 * each["sets"][number][kind]["1"] for each in rounds]
                [line] = left.plot(values, style, label=f"{results['questions']} {kind}", color=f"C{number}")
                left.plot(one["chosen"], values[one["chosen"]], "o", color=line.get_color())
        left.set_xlabel("round")
        left.set_ylabel("top-1, percent")
        left.legend(fontsize=6)
        right.plot([np.nan if each["loss"] is None else each["loss"] for each in rounds])
        right.axvline(one["lowest_loss"], linestyle=":", color="grey")
        right.set_xlabel("round")
        right.set_ylabel("loss (dotted: where it is lowest)")
        for at in (0, -1):
            largest = [each["sets"][at]["hubs"]["most"] for each in rounds]
            drift.plot(largest, label=f"largest hub, {rounds[0]['sets'][at]['questions']}", color=f"C{at % 4}")
        drift.set_xlabel("round")
        drift.set_ylabel("foreign top-10 lists of one passage")
        drift.set_ylim(bottom=0)
        norms = drift.twinx()
        norms.plot([each["norm_mean"] for each in rounds], "k--", label="mean norm of moved views")
        norms.ticklabel_format(useOffset=False)
        drift.legend(handles=[*drift.get_lines(), *norms.get_lines()], fontsize=6)
        title = f"{name}, {one['label']}: what rounds do"
        yield _plot(figure, f"rounds-{_slug(name)}-{_slug(one['label'])}", title)


def _trade_off(found: Sequence[VariantResult]) -> Plot | None:
    """Gain on the labelled questions against what unseen articles pay, every setting and round a point."""
    points: dict[str, list[tuple[float, float]]] = {}
    for one in found:
        for report in one.reports.get("refinement_grid", []):
            names = [results["questions"] for results in report["tried"][0]["rounds"][0]["sets"]]
            held = next((at for at, name in enumerate(names) if name.endswith(_HELD_OUT)), None)
            if held is None:
                continue
            for tried in report["tried"]:
                before = tried["rounds"][0]["sets"]
                method = tried["setting"]["method"] + (", raw" if not tried["setting"]["keep_length"] else "")
                label = f"{one.name}: {method}" if len(found) > 1 else method
                for each in tried["rounds"][1:]:
                    gain, cost = (
                        100 * (each["sets"][at]["answer"]["1"] - before[at]["answer"]["1"]) for at in (0, held)
                    )
                    points.setdefault(label, []).append((cost, gain))
    if not points:
        return None
    figure, axes = plt.subplots(figsize=(8, 5.5))
    for number, (label, some) in enumerate(points.items()):
        cost, gain = zip(*some)
        axes.scatter(cost, gain, s=14, alpha=0.7, label=label, color=f"C{number % 10}", marker="osv^D*"[number // 10])
    axes.axvline(-1, linestyle=":", color="grey")
    axes.set_xlabel("change on unseen articles, points of top-1 (dotted: one point lost)")
    axes.set_ylabel("gain on the labelled questions, points of top-1")
    axes.legend(fontsize=7)
    return _plot(figure, "trade-off", "What refinement gains on known questions, and what unseen articles pay")


def _plot(figure: Figure, name: str, title: str) -> Plot:
    figure.suptitle(textwrap.fill(title, int(11 * figure.get_figwidth())), fontsize=10)
    figure.tight_layout()
    drawn, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    plt.close(figure)
    # a palette takes a third of the bytes of true colours, and a page holds dozens of plots
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    return Plot(name, title, buffer.getvalue())


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60]
