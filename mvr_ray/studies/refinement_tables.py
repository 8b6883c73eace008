"""Build the tables of refinements: gain and cost, every depth, what moved, when to stop (AOpt table 3, figure 7)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mvr_ray.comparison import difference
from mvr_ray.core.judging.metrics import cluster_interval, paired_test
from mvr_ray.core.refining.refine_policy import ONE_SHOT
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.studies.definition import BM25, WITH_BM25
from mvr_ray.studies.results import BM25_SYSTEM, VariantResult, hits_within, stage_reports
from mvr_ray.studies.tables import (
    Cell,
    Row,
    Table,
    format_cell,
    format_change,
    format_number,
    format_percent,
    make_table,
)
from mvr_ray.types import FloatArray

MANY_ROUNDS = 3
"""Settings with more rounds have a curve."""
KINDS = ("answer", "gold")


class _RoundResult(NamedTuple):
    """A setting after one of its rounds; `round` is its label, with the rule's decision."""

    variant: VariantResult
    label: str
    round: str
    setting: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]
    articles: Mapping[str, Sequence[str]]

    @property
    def head(self) -> Row:
        return {"index": self.variant.name, "setting": self.label, "round": self.round}

    @property
    def method(self) -> str:
        return "before" if self.after["number"] == 0 else str(self.setting["method"])

    def accuracy(self, questions: str) -> dict[str, Any]:
        """Return the accuracy of a question set, with the fields of `refinement_simulator.SetAccuracy`."""
        return next(one for one in self.after["sets"] if one["questions"] == questions)

    def format_top1(self, questions: str) -> str:
        """Format top-1 by answers, with its interval."""
        values_Q = _hits(self.after, questions)
        return format_cell(Cell(float(values_Q.mean()), *cluster_interval(values_Q, self.articles[questions]), 1))

    def format_change(self, questions: str) -> str:
        """Format the change of top-1 by answers since before the first round."""
        return _format_change(self.after, self.before, questions, self.articles[questions])

    def format_ps(self, questions: str, kind: str, ks: Sequence[str]) -> str:
        """Format the p of the paired test against before the first round, at each depth."""
        if self.after is self.before:
            return ""
        articles, ranks = self.articles[questions], f"{kind}_ranks"
        pairs = [[_hits(state, questions, ranks, int(k)) for state in (self.after, self.before)] for k in ks]
        return " / ".join(f"{paired_test(after_Q, before_Q, articles):.2g}" for after_Q, before_Q in pairs)


def _format_change(after: Mapping[str, Any], before: Mapping[str, Any], questions: str, articles: Sequence[str]) -> str:
    """Format the change of top-1 by answers between two rounds; empty for the same round."""
    if after is before:
        return ""
    after_Q, before_Q = (_hits(state, questions) for state in (after, before))
    return format_change(*difference(after_Q, before_Q, articles)[:4])


def _hits(state: Mapping[str, Any], questions: str, ranks: str = "answer_ranks", k: int = 1) -> FloatArray:
    [ranks_Q] = [one[ranks] for one in state["sets"] if one["questions"] == questions]
    return hits_within(ranks_Q, k)


def _rounds(results: Sequence[VariantResult]) -> Iterator[_RoundResult]:
    """Yield every index before its refinements; then every setting after the chosen round and after the last one."""
    for variant, report in stage_reports(results, "refinement_grid"):
        articles = {question_set["questions"]: question_set["articles"] for question_set in report["sets"]}
        first_trial = report["tried"][0]
        start = first_trial["rounds"][0]
        yield _RoundResult(variant, "before", "0", first_trial["setting"] | {"step_size": 0.0}, start, start, articles)
        for trial in report["tried"]:
            rounds, best = trial["rounds"], trial["chosen"]
            last = len(rounds) - 1
            names = {best: f"{best}, kept"} if 0 < best < last else {}
            names[last] = f"{last}, kept" if best == last else str(last) if best else f"{last}, refused"
            for at, name in names.items():
                yield _RoundResult(variant, trial["label"], name, trial["setting"], start, rounds[at], articles)


def _set_sizes(results: Sequence[VariantResult]) -> dict[str, int]:
    """Return the number of questions of each set: the labelled set first, the set of other articles last."""
    for _, report in stage_reports(results, "refinement_grid"):
        return {question_set["questions"]: len(question_set["ids"]) for question_set in report["sets"]}
    return {}


def _first_and_last_sets(results: Sequence[VariantResult]) -> list[str]:
    """Return the labelled question set, and the one of other articles."""
    sets = list(_set_sizes(results))
    return list(dict.fromkeys([*sets[:1], *sets[-1:]]))


def refinement_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate every setting after its chosen and its last round: gain on known questions, cost on others."""
    sizes = _set_sizes(results)
    reports = [report for _, report in stage_reports(results, "refinement_grid")]
    gates = {name for report in reports for name in report["gate"].split(", ")}
    heldout_sets = [name for name in list(sizes)[1:] if name not in gates]
    decays = any(trial["setting"].get("decay", 1.0) != 1.0 for report in reports for trial in report["tried"])
    rows = []
    for state in _rounds(results):
        row = state.head
        for name, size in sizes.items():
            row[f"{name} (n {size}) answer"] = state.format_top1(name)
            row[f"{name} (n {size}) gold"] = format_percent(state.accuracy(name)["gold"]["1"])
        row |= {f"{name} change, p": state.format_change(name) for name in heldout_sets}
        row |= {f"{name} newest answer": format_percent(state.after["newest"]) for name in list(sizes)[:1] if decays}
        rows.append(row)
    note = (
        "Top-1 in percent, by answers (95 % interval, articles resampled) and by gold passages, after the last round "
        "and the kept one: the best on the labelled questions among rounds that cost neither the gate nor them more "
        "than the gate's bound (refused: every round cost more, and nothing would be published). "
        f"{', '.join(list(sizes)[:1])} are the labelled questions themselves (transductive), the others are held out. "
        "The change is that of top-1 by answers, in points, with its interval and the p of the paired test, which "
        "flips whole articles."
        + (" The newest are a quarter of the labelled questions, the last wave of four." if decays else "")
    )
    return make_table("Refinement", note, rows)


def depth_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate every depth, transductive and on articles without labels, beside the paper's figures, BM25 and the
    fusion with it (AOpt table 3)."""
    sets, states = _first_and_last_sets(results), list(_rounds(results))
    if not states:
        return None
    ks = list(states[0].accuracy(sets[0])["answer"])
    columns = {f"{name} {kind}": (name, kind) for name in sets for kind in KINDS}
    baselines: dict[str, Row] = {}
    for variant, report in stage_reports(results, "evaluate"):
        for system in dict.fromkeys(row["system"] for row in report["rows"] if BM25_SYSTEM in row["system"]):
            own = [row for row in report["rows"] if row["system"] == system]
            shares = {(row["questions"], row["metric"]): row["value"] for row in own}
            alone = system == BM25_SYSTEM
            name = BM25 if alone else variant.name + WITH_BM25
            row: Row = {"index": name, "setting": "" if alone else system, "round": "0"}
            row["paper"] = _paper_shares(variant, "BM25" if alone else "hybrid search", ks)
            for column, (questions, kind) in columns.items():
                row[column] = _format_shares([shares.get((questions, f"{kind}/top-{k}")) for k in ks])
            baselines.setdefault(name, row)
    rows = list(baselines.values())
    for state in states:
        paper = _paper_shares(state.variant, state.method, ks)
        row = state.head | {"paper": paper if paper not in [row["paper"] for row in rows] else ""}
        for column, (questions, kind) in columns.items():
            row[column] = _format_shares([state.accuracy(questions)[kind][k] for k in ks])
            row[f"{column}, p"] = state.format_ps(questions, kind, ks)
        rows.append(row)
    sizes = ", ".join(f"{name}: n {n}" for name, n in _set_sizes(results).items() if name in sets)
    note = (
        f"Top-{' / '.join(ks)} in percent; {sizes}. p: the paired test against the same index before, at each depth, "
        "which flips whole articles. Paper: AOpt table 3, NQ test, transductive; it stands beside the first setting of "
        "its method."
    )
    return make_table("Refinement at every depth", note, rows, drop_empty=True)


def _format_shares(shares: Sequence[float | None]) -> str:
    return " / ".join(map(format_percent, shares))


def _paper_shares(variant: VariantResult, method: str, ks: Sequence[str]) -> str:
    """Format the paper's figures of a method, `METHOD: answer/top-K` in the variant's `paper`."""
    figures = [format_percent(variant.paper.get(f"{method}: answer/top-{k}")) for k in ks]
    return " / ".join(figure or "-" for figure in figures) if any(figures) else ""


def motion_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate vectors that a setting moved and skipped, the drift of their norms, and hubs."""
    rows = []
    for state in _rounds(results):
        setting, after = state.setting, state.after
        steps = None if setting["method"] in (*ONE_SHOT, "feedback_views") else setting["step_size"] * after["number"]
        row = state.head | {"step size x rounds": format_number(steps), "moved": after["num_moved"]}
        row |= {"no domain": after["skipped_domain"], "no positive": after["skipped_no_positive"]}
        row |= {"mean norm": format_number(after["norm_mean"]), "largest norm": format_number(after["norm_max"])}
        for name in _first_and_last_sets(results):
            hubs = state.accuracy(name)["hubs"]
            row |= {f"{name} largest hub": hubs["most"], f"{name} hub skewness": format_number(hubs["skewness"])}
        rows.append(row)
    note = (
        "Of that round: moved vectors (for feedback views, passages with new ones); vectors skipped because a sum of "
        "scores lies outside the ratio form's domain, and those labelled without a positive. Norms of moved views over "
        "those at the start. A hub's size is the number of top-10 lists of questions that it does not answer."
    )
    return make_table("What moved", note, rows)


def stopping_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate the best round, where each rule ends, and the loss of further rounds (AOpt figure 7)."""
    sizes = _set_sizes(results)
    rows: list[Row] = []
    for variant, report in stage_reports(results, "refinement_grid"):
        articles = {question_set["questions"]: question_set["articles"] for question_set in report["sets"]}
        for trial in report["tried"]:
            rounds = trial["rounds"]
            if len(rounds) <= MANY_ROUNDS:
                continue
            top1 = [[state["sets"][which]["answer"]["1"] for which in (0, -1)] for state in rounds]
            at = [f"{number}: {_format_shares(shares)}" for number, shares in enumerate(top1)]
            peak = max(range(len(rounds)), key=lambda number: (top1[number][0], -number))
            row: Row = {"index": variant.name, "setting": trial["label"], "peak": at[peak]}
            row |= {"stopped after": trial["stopped"]}
            row |= {"restored": at[trial["restored"]] if trial["restored"] else "nothing"}
            row |= {"lowest loss": at[trial["lowest_loss"]], "last round": at[-1]}
            restored_round = rounds[trial["restored"]]
            for other_round, name in ((rounds[trial["lowest_loss"]], "lowest loss"), (rounds[-1], "last round")):
                for questions in _first_and_last_sets(results):
                    change = _format_change(restored_round, other_round, questions, articles[questions])
                    row[f"{questions}: restored against {name}, p"] = change
            rows.append(row)
    sets = list(sizes) or [""]
    note = (
        f"Round: top-1 on {' / '.join(f'{name} (n {sizes.get(name)})' for name in (sets[0], sets[-1]))}, percent, by "
        "answers. `refine` ends after `refine.patience` rounds without a better one on the labelled questions, and "
        "restores the best one that cost the gate no more than its bound (nothing: round 0). The paper's rule is the "
        "lowest loss. The last columns are differences in points, their intervals, and the p of the paired test, which "
        "flips whole articles."
    )
    return make_table("When to stop", note, rows)


def refinement_ranks(results: Sequence[VariantResult]) -> list[QuestionRanks]:
    """Return the ranks of every question after every round in the tables."""
    ids = {
        question_set["questions"]: question_set["ids"]
        for _, report in stage_reports(results, "refinement_grid")
        for question_set in report["sets"]
    }
    return [
        QuestionRanks(
            f"{state.variant.name}: {state.label}, round {state.after['number']}",
            one["questions"],
            ids[one["questions"]],
            state.articles[one["questions"]],
            one["answer_ranks"],
            one["gold_ranks"],
        )
        for state in _rounds(results)
        for one in state.after["sets"]
    ]
