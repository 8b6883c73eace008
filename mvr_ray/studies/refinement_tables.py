"""What a study tells of refinements: gain and cost, every depth, what moved, when to stop (AOpt table 3, figure 7)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mvr_ray.studies.tables import Measured, Table, Value, number, percent

MANY_ROUNDS = 3
"""Settings of more rounds than these have a curve."""


def refinement_table(found: Sequence[Measured]) -> Table | None:
    """Every setting after its last round and the one that is kept: gain on known questions, cost on others."""
    names, newest = _sets(found), _decays(found)
    rows: list[list[Value]] = [
        [*told, *_accuracies(each), *([percent(each["newest"])] if newest else [])]
        for *told, _, each in _told_rounds(found)
    ]
    columns = [f"{name} {kind}" for name in names for kind in ("answer", "gold")]
    columns += [f"{name} newest answer" for name in names[:1] if newest]
    note = (
        "Top-1 in percent, by answers and by gold passages, after the last round and the one that is kept: best on the "
        "labelled questions, of those that cost neither gate nor them more than the gate's bound (refused: every round "
        "cost more, and nothing would be published). "
        f"{', '.join(names[:1])} are the labelled questions themselves (transductive), the others are held out."
        + (" The newest are a quarter of the labelled questions, the last wave of four." if newest else "")
    )
    return Table("Refinement", note, ["index", "setting", "round", *columns], rows) if rows else None


def depth_table(found: Sequence[Measured]) -> Table | None:
    """The same at every depth, transductive and on the articles that were never labelled (AOpt table 3)."""
    shown = sorted({0, len(_sets(found)) - 1})
    rows: list[list[Value]] = []
    ks: list[str] = []
    for *told, _, each in _told_rounds(found):
        sets = [each["sets"][at] for at in shown]
        ks = list(sets[0]["answer"])
        rows.append(
            [*told, *(" / ".join(percent(one[kind][k]) for k in ks) for one in sets for kind in ("answer", "gold"))]
        )
    columns = [f"{name} {kind}" for at, name in enumerate(_sets(found)) if at in shown for kind in ("answer", "gold")]
    note = f"Top-{' / '.join(ks)} in percent."
    return Table("Refinement at every depth", note, ["index", "setting", "round", *columns], rows) if rows else None


def motion_table(found: Sequence[Measured]) -> Table | None:
    """What a setting moved, what it skipped, how far norms drifted, and how passages crowd into foreign lists."""
    rows: list[list[Value]] = []
    for *told, setting, each in _told_rounds(found):
        moved = "" if setting["method"] in ("linear", "feedback_views") else setting["step_size"] * each["number"]
        counts = [each[name] for name in ("num_moved", "skipped_domain", "skipped_no_positive")]
        norms = [number(each[name]) for name in ("norm_mean", "norm_max")]
        hubs = [each["sets"][at]["hubs"] for at in (0, -1)]
        crowds = [value for one in hubs for value in (one["most"], number(one["skewness"]))]
        rows.append([*told, moved if isinstance(moved, str) else number(moved), *counts, *norms, *crowds])
    names = [name for at in (0, -1) for name in _sets(found)[at:][:1]]
    columns = ["step size x rounds", "moved", "no domain", "no positive", "mean norm", "largest norm"]
    columns += [f"{name} {what}" for name in names for what in ("largest hub", "hub skewness")]
    note = (
        "Of that round: vectors that moved (of feedback views, passages that got any); vectors left because a sum of "
        "scores lies outside the ratio form's domain, and those labelled without a positive. Norms of moved views over "
        "those at the start. A hub's size is the number of top-10 lists of questions that it does not answer."
    )
    return Table("What moved", note, ["index", "setting", "round", *columns], rows) if rows else None


def stopping_table(found: Sequence[Measured]) -> Table | None:
    """Where rounds are best, where each rule ends them, and what is lost by going on (AOpt figure 7)."""
    rows: list[list[Value]] = []
    for one in found:
        for report in one.reports.get("refinement_grid", []):
            for tried in report["tried"]:
                rounds = tried["rounds"]
                if len(rounds) <= MANY_ROUNDS:
                    continue
                peak = max(range(len(rounds)), key=lambda at: (_known(rounds[at]), -at))
                restored = _after(rounds, tried["restored"]) if tried["restored"] else "nothing"
                told = [_after(rounds, peak), tried["stopped"], restored]
                told += [_after(rounds, tried["lowest_loss"]), _after(rounds, len(rounds) - 1)]
                rows.append([one.name, tried["label"], *told])
    names = _sets(found)
    columns = ["index", "setting", "peak", "stopped after", "restored", "lowest loss", "last round"]
    note = (
        f"Round: top-1 on {' / '.join((names or [''])[at] for at in (0, -1))}, percent, by answers. `refine` ends when "
        "for `refine.patience` rounds none was better on the labelled questions, and restores the best one that cost "
        "the gate no more than its bound. The paper's rule is the lowest loss."
    )
    return Table("When to stop", note, columns, rows) if rows else None


def _known(measured: Mapping[str, Any]) -> float:
    return float(measured["sets"][0]["answer"]["1"])


def _after(rounds: Sequence[Mapping[str, Any]], at: int) -> str:
    return f"{at}: {' / '.join(percent(rounds[at]['sets'][which]['answer']['1']) for which in (0, -1))}"


def _decays(found: Sequence[Measured]) -> bool:
    """Whether some setting lets old questions fade, so that the newest wave is worth a column."""
    tried = [one for each in found for report in each.reports.get("refinement_grid", []) for one in report["tried"]]
    return any(one["setting"].get("decay", 1.0) != 1.0 for one in tried)


def _sets(found: Sequence[Measured]) -> list[str]:
    """The question sets of a refinement grid: the labelled ones first, those of other articles last."""
    for one in found:
        for report in one.reports.get("refinement_grid", []):
            return [measured["questions"] for measured in report["tried"][0]["rounds"][0]["sets"]]
    return []


def _told_rounds(found: Sequence[Measured]) -> Iterator[tuple[str, str, str, dict[str, Any], dict[str, Any]]]:
    """Index, setting, which round and why it is told, the setting's fields, and what was measured after that round."""
    for one in found:
        for report in one.reports.get("refinement_grid", []):
            tried = report["tried"][0]
            yield one.name, "before", "0", tried["setting"] | {"step_size": 0.0}, tried["rounds"][0]
            for tried in report["tried"]:
                rounds, chosen = tried["rounds"], tried["chosen"]
                last = len(rounds) - 1
                if 0 < chosen < last:
                    yield one.name, tried["label"], f"{chosen}, kept", tried["setting"], rounds[chosen]
                told = f"{last}, kept" if chosen == last else f"{last}, refused" if not chosen else str(last)
                yield one.name, tried["label"], told, tried["setting"], rounds[last]


def _accuracies(each: Mapping[str, Any]) -> list[Value]:
    return [percent(measured[kind]["1"]) for measured in each["sets"] for kind in ("answer", "gold")]
