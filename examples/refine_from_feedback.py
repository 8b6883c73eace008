"""Refine an index from questions and their answering passages: `python examples/refine_from_feedback.py [PASSAGES]`.

Half of the questions are known; the others measure the effect on unseen questions.
"""

from wikipedia import passages, questions

from mvr_ray import Index

rows = passages(2000)
every = questions(rows)
known, unseen = every[::2], every[1::2]
index = Index.build(rows, path="example-store/refine")


def top_1(name: str) -> str:
    [row] = [row for row in index.evaluate(name, k=[1]).rows if row.metric == "gold/top-1"]
    return f"{row.in_percent()} %"


for name, some in (("known", known), ("unseen", unseen)):
    index.add_questions(some, name)
    print(f"before, {name}: top-1 {top_1(name)}")

clicks = [(one["question"], one["positive_ids"][0], 1) for one in known]
print(f"{index.add_feedback(clicks):,} judgements")
report = index.refine(rounds=3)
if report.published:
    print(f"published: version {report.published.version} ({report.reason})")
else:
    print(f"not published, version {report.base_version} stays live: {report.reason}")
for name in ("known", "unseen"):
    print(f"after, {name}: top-1 {top_1(name)}")
