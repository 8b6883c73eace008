"""Build the tables of refinements: gain and cost, every depth, what moved, when to stop (AOpt table 3, figure 7)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mvr_ray.comparison import Difference, difference
from mvr_ray.core.judging.metrics import hit_within, paired_test, share_interval
from mvr_ray.core.refining.refine_policy import ONE_SHOT
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.studies.results import BM25_SYSTEM, Report, VariantResult, stage_reports, system_name
from mvr_ray.studies.tables import P_NOTE, Cell, Row, Table, make_table, percent
from mvr_ray.types import FloatArray

MANY_ROUNDS = 3
"""Settings with more rounds have a curve."""
KINDS = ("answer", "gold")
Accuracies = Mapping[str, Report]
"""By question set, the fields of `refinement_simulator.SetAccuracy`."""


class _RoundResult(NamedTuple):
    """A setting after one of its rounds. `head` names both, `state` has the fields of `refinement_simulator.Round`."""

    variant: VariantResult
    head: Row
    setting: dict[str, Any]
    state: Report
    before: Accuracies
    after: Accuracies
    articles: Mapping[str, Sequence[str]]
    seed: int


def _rounds(results: Sequence[VariantResult]) -> Iterator[_RoundResult]:
    """Yield every index before its refinements; then every setting after the chosen round and after the last one."""
    for variant, report in stage_reports(results, "refinement_grid"):
        first_trial = report["tried"][0]
        start = first_trial["rounds"][0]
        states = [("before", "0", first_trial["setting"] | {"step_size": 0.0}, start)]
        for trial in report["tried"]:
            rounds, best = trial["rounds"], trial["chosen"]
            last = len(rounds) - 1
            names = {best: f"{best}, kept"} if 0 < best < last else {}
            names[last] = f"{last}, kept" if best == last else str(last) if best else f"{last}, refused"
            states += [(trial["label"], name, trial["setting"], rounds[at]) for at, name in names.items()]
        for label, name, setting, state in states:
            head: Row = {"index": variant.name, "setting": label, "round": name}
            sets = _by_set(start), _by_set(state), _articles(report)
            yield _RoundResult(variant, head, setting, state, *sets, report["seed"])


def _articles(report: Report) -> dict[str, Sequence[str]]:
    """Return the articles of each question set: the labelled set first, the set of other articles last."""
    return {question_set["questions"]: question_set["articles"] for question_set in report["sets"]}


def _by_set(state: Report) -> Accuracies:
    return {accuracy["questions"]: accuracy for accuracy in state["sets"]}


def _hits(accuracy: Report, kind: str = "answer", k: int = 1) -> FloatArray:
    """Return whether the first k hits hold one, of the questions with labels of this kind."""
    return hit_within(np.array([rank for rank in accuracy[f"{kind}_ranks"] if rank is not None], np.int64), k)


def _labelled_articles(accuracy: Report, articles: Sequence[str], kind: str = "answer") -> list[str]:
    """Return the articles of the questions of `_hits`."""
    return [article for article, rank in zip(articles, accuracy[f"{kind}_ranks"], strict=True) if rank is not None]


def _change(after: Report, before: Report, articles: Sequence[str]) -> Difference | None:
    """Compute the change of a set's top-1 by answers between two rounds; None of a round and itself."""
    own_articles = _labelled_articles(after, articles)
    return None if after is before or not own_articles else difference(_hits(after), _hits(before), own_articles)


def _set_sizes(results: Sequence[VariantResult]) -> dict[str, int]:
    """Return the number of questions with answers of each set, in the order of `_articles`."""
    for _, report in stage_reports(results, "refinement_grid"):
        start = _by_set(report["tried"][0]["rounds"][0])
        return {name: len(_hits(start[name])) for name in _articles(report)}
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
    for result in _rounds(results):
        row = dict(result.head)
        for name, size in sizes.items():
            hits_Q, head = _hits(result.after[name]), f"{name} (n {size})"
            own_articles = _labelled_articles(result.after[name], result.articles[name])
            cell = Cell(float(hits_Q.mean()), *share_interval(hits_Q, own_articles)) if own_articles else None
            row |= {f"{head} answer": cell}
            row |= {f"{head} gold": percent(result.after[name]["gold"]["1"])}
        for name in heldout_sets:
            row[f"{name} change, p"] = _change(result.after[name], result.before[name], result.articles[name])
        row |= {f"{name} newest answer": percent(result.state["newest"]) for name in list(sizes)[:1] if decays}
        rows.append(row)
    note = (
        "Top-1 in percent, by answers (95 % interval, articles resampled) and by gold passages, after the last round "
        "and the kept one: the best on the labelled questions among rounds that cost neither the gate nor them more "
        "than the gate's bound (refused: every round cost more, and nothing would be published). "
        f"{', '.join(list(sizes)[:1])} are the labelled questions themselves (transductive), the others are held out. "
        f"The change is that of top-1 by answers, in points, with its interval and p. {P_NOTE}"
        + (" The newest are a quarter of the labelled questions, the last wave of four." if decays else "")
    )
    return make_table("Refinement", note, rows)


def depth_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate every depth, transductive and on articles without labels, beside the paper's figures, BM25 and the
    fusion with it (AOpt table 3)."""
    sets, rounds = _first_and_last_sets(results), list(_rounds(results))
    if not rounds:
        return None
    ks = list(rounds[0].after[sets[0]]["answer"])
    columns = {f"{name} {kind}": (name, kind) for name in sets for kind in KINDS}
    baselines: dict[str, Row] = {}
    for variant, report in stage_reports(results, "evaluate"):
        for system in dict.fromkeys(row["system"] for row in report["rows"] if BM25_SYSTEM in row["system"]):
            own = [row for row in report["rows"] if row["system"] == system]
            shares = {(row["questions"], row["metric"]): row["value"] for row in own}
            name, is_alone = system_name(variant.name, system), system == BM25_SYSTEM
            row: Row = {"index": name, "setting": "" if is_alone else system, "round": "0"}
            row["paper"] = _paper_shares(variant, "BM25" if is_alone else "hybrid search", ks)
            for column, (questions, kind) in columns.items():
                row[column] = _shares([shares.get((questions, f"{kind}/top-{k}")) for k in ks])
            baselines.setdefault(name, row)
    rows = list(baselines.values())
    raw_methods = {result.setting["method"] for result in rounds if not result.setting.get("keep_length", True)}
    for result in rounds:
        method = result.setting["method"] if result.state["number"] else "before"
        has_figures = method == "before" or method not in raw_methods or not result.setting.get("keep_length", True)
        paper = _paper_shares(result.variant, method, ks) if has_figures else ""
        row = result.head | {"paper": paper if paper not in [row["paper"] for row in rows] else ""}
        for column, (questions, kind) in columns.items():
            after, before = result.after[questions], result.before[questions]
            row[column] = _shares([after[kind][k] for k in ks])
            articles = _labelled_articles(after, result.articles[questions], kind)
            has_test = after is not before and articles
            pairs = [[_hits(one, kind, int(k)) for one in (after, before)] for k in ks if has_test]
            ps = [paired_test(after_Q, before_Q, articles) for after_Q, before_Q in pairs]
            row[f"{column}, p"] = " / ".join(f"{p:.2g}" for p in ps)
        rows.append(row)
    sizes = ", ".join(f"{name}: n {n}" for name, n in _set_sizes(results).items() if name in sets)
    note = (
        f"Top-{' / '.join(ks)} in percent; {sizes}. p: against the same index before, at each depth. {P_NOTE} "
        "Paper: AOpt table 3, NQ test, transductive; it stands beside the first setting of its method, and of those "
        "with keep_length False, the paper's form, where there are any."
    )
    return make_table("Refinement at every depth", note, rows, drop_empty=True)


def _shares(shares: Sequence[float | None]) -> str:
    return " / ".join(map(percent, shares))


def _paper_shares(variant: VariantResult, method: str, ks: Sequence[str]) -> str:
    """Format the paper's figures of a method, `METHOD: answer/top-K` in the variant's `paper`."""
    figures = [percent(variant.paper.get(f"{method}: answer/top-{k}")) for k in ks]
    return " / ".join(figure or "-" for figure in figures) if any(figures) else ""


def motion_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate vectors that a setting moved and skipped, the drift of their norms, and hubs."""
    rows = []
    for result in _rounds(results):
        setting, state = result.setting, result.state
        has_steps = setting["method"] not in (*ONE_SHOT, "feedback_views")
        row = result.head | {"step size x rounds": setting["step_size"] * state["number"] if has_steps else None}
        row |= {"moved": state["num_moved"], "no domain": state["skipped_domain"]}
        row |= {"no positive": state["skipped_no_positive"]}
        row |= {"mean norm": state["norm_mean"], "largest norm": state["norm_max"]}
        for name in _first_and_last_sets(results):
            hubs = result.after[name]["hubs"]
            row |= {f"{name} largest hub": hubs["most"], f"{name} hub skewness": hubs["skewness"]}
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
        articles = _articles(report)
        for trial in report["tried"]:
            rounds, final = trial["rounds"], trial["restored"]
            if len(rounds) <= MANY_ROUNDS:
                continue
            top1 = [[state["sets"][which]["answer"]["1"] for which in (0, -1)] for state in rounds]
            at = [f"{number}: {_shares(shares)}" for number, shares in enumerate(top1)]
            peak = max(range(len(rounds)), key=lambda number: (top1[number][0], -number))
            row: Row = {"index": variant.name, "setting": trial["label"], "peak": at[peak]}
            row |= {"stopped after": trial["stopped"], "restored": at[final] if final else "nothing"}
            ends = {"lowest loss": trial["lowest_loss"], "last round": len(rounds) - 1}
            row |= {name: at[end] for name, end in ends.items()}
            for name, end in ends.items():
                own, other = _by_set(rounds[final]), _by_set(rounds[end])
                for questions in _first_and_last_sets(results):
                    change = _change(own[questions], other[questions], articles[questions])
                    row[f"{questions}: restored against {name}, p"] = change
            rows.append(row)
    sets = list(sizes) or [""]
    note = (
        f"Round: top-1 on {' / '.join(f'{name} (n {sizes.get(name)})' for name in (sets[0], sets[-1]))}, percent, by "
        "answers. `refine` ends after `refine.patience` rounds without a better one on the labelled questions, and "
        "restores the best one that cost the gate no more than its bound (nothing: round 0). The paper's rule is the "
        f"lowest loss. The last columns are differences in points, their intervals, and p. {P_NOTE}"
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
            f"{result.head['index']}: {result.head['setting']}, round {result.state['number']}",
            name,
            ids[name],
            result.articles[name],
            accuracy["answer_ranks"],
            accuracy["gold_ranks"],
            result.seed,
        )
        for result in _rounds(results)
        for name, accuracy in result.after.items()
    ]
