"""Search passages whose fields pass a filter: `python examples/filters.py [PASSAGES]`.

All values of a passage besides id, title and text are fields. docs/filters.md has the operators.
"""

from wikipedia import passages

from mvr_ray import Index

index = Index.build(passages(), path="example-store/filters")
question = "a novel that became a film"

for condition in (None, {"words": {"lt": 60}}, {"or": [{"words": {"gte": 120}}, {"title": {"in": ["Dracula"]}}]}):
    print(f"\nfilter: {condition}")
    for hit in index.search(question, k=3, filter=condition):
        print(f"  {hit.score:.4f}  {hit.title} ({hit.fields['words']} words)")
