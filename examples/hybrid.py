"""Search by views, by views and words, and measure both: `python examples/hybrid.py [PASSAGES]`.

Words match names and numbers, views match paraphrases. docs/howto/hybrid.md has the details.
"""

from wikipedia import passages, questions

from mvr_ray import Index

rows = passages()
index = Index.build(rows, path="example-store/hybrid", settings={"index": {"lexical": True}})

# "rrf" adds reciprocal ranks and needs no weight; a number w ranks by BM25 + w x score, and `mvr-ray tune` chooses it.
for hybrid in ("off", "rrf", 30.0):
    print(f"\nhybrid {hybrid}:")
    for hit in index.search("1968 film by Stanley Kubrick", k=3, hybrid=hybrid):
        print(f"  {hit.score:.4f}  {hit.title}")

print("\ndescriptions that find their own article first:")
queries = questions(rows)
for hybrid in ("off", "rrf", 30.0):
    hits = index.search([one["question"] for one in queries], k=1, hybrid=hybrid)
    num_first = sum(own[0].id == one["positive_ids"][0] for own, one in zip(hits, queries))
    print(f"  hybrid {hybrid}: {num_first} of {len(queries)}")
