"""Tables of refinements: gain and cost, every depth, what moved, when to stop (AOpt table 3, figure 7)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mvr_ray.core.judging.metrics import cluster_interval
from mvr_ray.core.refining.refine_policy import ONE_SHOT
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.studies.comparisons import change, difference, hits_within
from mvr_ray.studies.definition import BM25, FUSED
from mvr_ray.studies.tables import Cell, Table, Value, VariantResult, number, percent, spoken

MANY_ROUNDS = 3
"""Settings of more rounds than these have a curve."""


def refinement_table(found: Sequence[VariantResult]) -> Table | None:
    """Every setting after its last round and the one that is kept: gain on known questions, cost on others."""
    sets, newest = _sets(found), _decays(found)
    heldout = [name for name in sets[1:] if name not in _gates(found)]
    rows: list[list[Value]] = []
    for told in _shown_rounds(found):
        row: list[Value] = [told.index, told.label, told.round]
        for name in sets:
            row += [_spoken_top1(told, name), percent(told.results(name)["gold"]["1"])]
        row += [_spoken_change(told, name) for name in heldout]
        rows.append([*row, *([percent(told.after["newest"])] if newest else [])])
    columns = [f"{name} (n {told_n}) {kind}" for name, told_n in _sizes(found).items() for kind in ("answer", "gold")]
    columns += [f"{name} change, p" for name in heldout]
    columns += [f"{name} newest answer" for name in sets[:1] if newest]
    note = (
        "Top-1 in percent, by answers (95 % interval, articles resampled) and by gold passages, after the last round "
        "and the one that is kept: best on the labelled questions, of those that cost neither gate nor them more than "
        "the gate's bound (refused: every round cost more, and nothing would be published). "
        f"{', '.join(sets[:1])} are the labelled questions themselves (transductive), the others are held out. The "
        "change is that by answers from before, in points, with its interval and the p of the paired test, which flips "
        "whole articles."
        + (" The newest are a quarter of the labelled questions, the last wave of four." if newest else "")
    )
    return Table("Refinement", note, ["index", "setting", "round", *columns], rows) if rows else None


def depth_table(found: Sequence[VariantResult]) -> Table | None:
    """The same at every depth, transductive and on the articles that were never labelled, beside the paper's figures
    and beside BM25 and the fusion with it (AOpt table 3)."""
    sets = _sets(found)
    shown = list(dict.fromkeys([*sets[:1], *sets[-1:]]))
    ks = list(next(_shown_rounds(found)).results(shown[0])["answer"]) if shown else []
    rows: list[list[Value]] = []
    for one in found:
        for report in one.reports.get("evaluate", []):
            for system in dict.fromkeys(row["system"] for row in report["rows"] if "bm25" in row["system"]):
                values = {
                    (row["questions"], row["metric"]): row["value"] for row in report["rows"] if row["system"] == system
                }
                name = BM25 if system == "bm25" else one.name + FUSED
                told = [
                    " / ".join(percent(values.get((which, f"{kind}/top-{k}"))) for k in ks)
                    for which in shown
                    for kind in ("answer", "gold")
                ]
                paper = _paper(one, "BM25" if system == "bm25" else "hybrid search", ks)
                if not any(row[0] == name for row in rows):
                    rows.append([name, "" if system == "bm25" else system, "0", paper, *told])
    for told in _shown_rounds(found):
        values = [
            " / ".join(percent(told.results(which)[kind][k]) for k in ks)
            for which in shown
            for kind in ("answer", "gold")
        ]
        paper = _paper(told.variant, told.method, ks)
        shown_once = paper if paper not in (row[3] for row in rows) else ""
        rows.append([told.index, told.label, told.round, shown_once, *values])
    columns = [
        "index",
        "setting",
        "round",
        "paper",
        *(f"{name} {kind}" for name in shown for kind in ("answer", "gold")),
    ]
    sizes = ", ".join(f"{name}: n {n}" for name, n in _sizes(found).items() if name in shown)
    note = (
        f"Top-{' / '.join(ks)} in percent; {sizes}. Paper: AOpt table 3, NQ test, transductive; it stands beside the "
        "first setting of its method."
    )
    kept = [at for at in range(len(columns)) if at != 3 or any(row[3] for row in rows)]
    return (
        Table(
            "Refinement at every depth",
            note,
            [columns[at] for at in kept],
            [[row[at] for at in kept] for row in rows],
        )
        if rows
        else None
    )


def _paper(one: VariantResult, method: str, ks: Sequence[str]) -> str:
    """The paper's figures of a method; `paper` of the variant has them as `METHOD: answer/top-K`."""
    figures = [percent(one.paper.get(f"{method}: answer/top-{k}")) for k in ks]
    return " / ".join(figure or "-" for figure in figures) if any(figures) else ""


def motion_table(found: Sequence[VariantResult]) -> Table | None:
    """What a setting moved, what it skipped, how far norms drifted, and how passages crowd into foreign lists."""
    rows: list[list[Value]] = []
    for told in _shown_rounds(found):
        setting, each = told.setting, told.after
        moved = "" if setting["method"] in (*ONE_SHOT, "feedback_views") else setting["step_size"] * each["number"]
        counts = [each[name] for name in ("num_moved", "skipped_domain", "skipped_no_positive")]
        norms = [number(each[name]) for name in ("norm_mean", "norm_max")]
        hubs = [each["sets"][at]["hubs"] for at in (0, -1)]
        crowds = [value for one in hubs for value in (one["most"], number(one["skewness"]))]
        head = [told.index, told.label, told.round]
        rows.append([*head, moved if isinstance(moved, str) else number(moved), *counts, *norms, *crowds])
    names = [name for at in (0, -1) for name in _sets(found)[at:][:1]]
    columns = ["step size x rounds", "moved", "no domain", "no positive", "mean norm", "largest norm"]
    columns += [f"{name} {what}" for name in names for what in ("largest hub", "hub skewness")]
    note = (
        "Of that round: vectors that moved (of feedback views, passages that got any); vectors left because a sum of "
        "scores lies outside the ratio form's domain, and those labelled without a positive. Norms of moved views over "
        "those at the start. A hub's size is the number of top-10 lists of questions that it does not answer."
    )
    return Table("What moved", note, ["index", "setting", "round", *columns], rows) if rows else None


def stopping_table(found: Sequence[VariantResult]) -> Table | None:
    """Where rounds are best, where each rule ends them, and what is lost by going on (AOpt figure 7)."""
    rows: list[list[Value]] = []
    for one in found:
        for report in one.reports.get("refinement_grid", []):
            for tried in report["tried"]:
                rounds = tried["rounds"]
                if len(rounds) <= MANY_ROUNDS:
                    continue
                peak = max(range(len(rounds)), key=lambda at: (_known_share(rounds[at]), -at))
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


def _known_share(results: Mapping[str, Any]) -> float:
    return float(results["sets"][0]["answer"]["1"])


def _after(rounds: Sequence[Mapping[str, Any]], at: int) -> str:
    return f"{at}: {' / '.join(percent(rounds[at]['sets'][which]['answer']['1']) for which in (0, -1))}"


def _decays(found: Sequence[VariantResult]) -> bool:
    """Whether some setting lets old questions fade, so that the newest wave is worth a column."""
    tried = [one for each in found for report in each.reports.get("refinement_grid", []) for one in report["tried"]]
    return any(one["setting"].get("decay", 1.0) != 1.0 for one in tried)


def _sets(found: Sequence[VariantResult]) -> list[str]:
    """The question sets of a refinement grid: the labelled ones first, those of other articles last."""
    return list(_sizes(found))


def _sizes(found: Sequence[VariantResult]) -> dict[str, int]:
    """How many questions each set has."""
    for one in found:
        for report in one.reports.get("refinement_grid", []):
            return {asked["questions"]: len(asked["ids"]) for asked in report["sets"]}
    return {}


def _gates(found: Sequence[VariantResult]) -> list[str]:
    return [
        name
        for one in found
        for report in one.reports.get("refinement_grid", [])
        for name in report["gate"].split(", ")
    ]


class _ShownRound(NamedTuple):
    """A setting after one round, as a row of a table: index, setting, and which round it is."""

    variant: VariantResult
    index: str
    label: str
    round: str
    setting: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]
    articles: Mapping[str, Sequence[str]]

    @property
    def method(self) -> str:
        return "before" if self.after["number"] == 0 else str(self.setting["method"])

    def results(self, name: str, *, before: bool = False) -> dict[str, Any]:
        sets = (self.before if before else self.after)["sets"]
        return next(one for one in sets if one["questions"] == name)


def _shown_rounds(found: Sequence[VariantResult]) -> Iterator[_ShownRound]:
    for one in found:
        for report in one.reports.get("refinement_grid", []):
            articles = {asked["questions"]: asked["articles"] for asked in report["sets"]}
            first = report["tried"][0]
            start = first["rounds"][0]
            yield _ShownRound(
                one, one.name, "before", "0", first["setting"] | {"step_size": 0.0}, start, start, articles
            )
            for tried in report["tried"]:
                rounds, chosen = tried["rounds"], tried["chosen"]
                last = len(rounds) - 1
                told = [(f"{chosen}, kept", chosen)] if 0 < chosen < last else []
                told.append(
                    (f"{last}, kept" if chosen == last else f"{last}, refused" if not chosen else str(last), last)
                )
                for name, at in told:
                    yield _ShownRound(
                        one, one.name, tried["label"], name, tried["setting"], start, rounds[at], articles
                    )


def ranks_of(found: Sequence[VariantResult]) -> list[QuestionRanks]:
    """What every told round of every setting found for every question."""
    ids = {
        asked["questions"]: asked["ids"]
        for one in found
        for report in one.reports.get("refinement_grid", [])
        for asked in report["sets"]
    }
    return [
        QuestionRanks(
            f"{told.index}: {told.label}, round {told.after['number']}",
            one["questions"],
            ids[one["questions"]],
            told.articles[one["questions"]],
            one["answer_ranks"],
            one["gold_ranks"],
        )
        for told in _shown_rounds(found)
        for one in told.after["sets"]
    ]


def _top1(told: _ShownRound, name: str, *, before: bool = False) -> Any:
    return hits_within(told.results(name, before=before)["answer_ranks"], 1)


def _spoken_top1(told: _ShownRound, name: str) -> str:
    values_Q = _top1(told, name)
    return spoken(Cell(float(values_Q.mean()), *cluster_interval(values_Q, told.articles[name]), 1))


def _spoken_change(told: _ShownRound, name: str) -> str:
    if told.after is told.before:
        return ""
    return change(difference([_top1(told, name)], [_top1(told, name, before=True)], told.articles[name]))
