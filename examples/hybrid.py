"""Search by views, by words as well, and measure both: `python examples/hybrid.py [PASSAGES]`.

Words keep names and numbers apart, views find what is said in other words. docs/howto/hybrid.md has the rest.
"""

from wikipedia import passages, questions

from mvr_ray import Index

rows = passages()
index = Index.build(rows, path="example-store/hybrid", settings={"index": {"lexical": True}})

# "rrf" adds reciprocal ranks and needs no choice; a number w ranks by BM25 + w x score, and `mvr-ray tune` chooses it.
for hybrid in ("off", "rrf", 30.0):
    print(f"\nhybrid {hybrid}:")
    for hit in index.search("1968 film by Stanley Kubrick", k=3, hybrid=hybrid):
        print(f"  {hit.score:.4f}  {hit.title}")

print("\ndescriptions that find their own article first:")
asked = questions(rows)
for hybrid in ("off", "rrf", 30.0):
    hits = index.search([one["question"] for one in asked], k=1, hybrid=hybrid)
    found = sum(own[0].id == one["positive_ids"][0] for own, one in zip(hits, asked))
    print(f"  hybrid {hybrid}: {found} of {len(asked)}")
