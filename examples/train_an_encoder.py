"""Train the views on your own passages, without labels: `python examples/train_an_encoder.py [PASSAGES] [STEPS]`.

A sentence of a passage is the question, the rest of it the answer (inverse cloze). It takes some minutes on two cores.
"""

import sys

from wikipedia import passages, questions

from mvr_ray import Index

PATH = "example-store/train"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 40

rows = passages()
index = Index.build(rows, path=PATH, settings={"index": {"encoder": "untrained"}})
index.add_questions(questions(rows), "descriptions")
before = index.evaluate("descriptions", k=[1, 5])

model = index.train(loss="camvr", max_steps=STEPS, batch_questions=16, num_hard_negatives=0, progress=print)
print("trained:", model.name, model.fingerprint)

index = Index.build(rows, path=PATH, settings={"index": {"encoder": "trained"}})
index.add_questions(questions(rows), "descriptions")
after = index.evaluate("descriptions", k=[1, 5])
for old, new in zip(before.rows, after.rows):
    print(f"{old.metric:15} {100 * old.value:5.1f} % before, {100 * new.value:5.1f} % after")
