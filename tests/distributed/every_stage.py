"""Runs every stage that may need no Ray over one store, one after another: by the tests in a session, and as a program.

python every_stage.py RUN_FILE no-ray     with `import ray` forbidden; prints what the stages reported, as JSON
"""

import json
import sys
from pathlib import Path
from typing import Any

from mvr_ray.config import RunConfig, load_run
from mvr_ray.store.runs import to_plain


def run_stages(run: RunConfig) -> dict[str, Any]:
    """The report of each stage without paths, times and the store's own name."""
    from mvr_ray.cli.search_once import SearchRequest, open_service
    from mvr_ray.distributed import analyze, evaluate, refine, retrieve
    from mvr_ray.distributed.indexing import build_index, rewrite
    from mvr_ray.store.files import Store
    from mvr_ray.store.update import update

    folder = Path(run.store.path)
    stages: dict[str, Any] = {"index": build_index.index(run)}
    stages["evaluate"] = evaluate.evaluate(run)
    stages["retrieve"] = retrieve.retrieve(run, "dev", folder / "ranking.jsonl", "jsonl")._replace(output="")
    stages["ranking"] = (folder / "ranking.jsonl").read_text()
    request = SearchRequest(queries=["who ruled the country?"], k=5)
    with open_service("search", run, None, request) as service:
        stages["search"] = service.search(request).model_dump(mode="json")
    stages["analyze"] = analyze.analyze(run)
    stages["update"] = update(run.prepare, Store(run.store.path), str(folder / "changes.jsonl"))
    stages["index again"] = build_index.index(run)
    stages["compact"] = rewrite.compact(run)
    stages["refine"] = refine.refine(run)
    stages["reshard"] = rewrite.reshard(run, 2)
    return to_plain(stages)


if __name__ == "__main__":
    sys.modules["ray"] = None  # type: ignore[assignment]
    sys.stdout.write(json.dumps(run_stages(load_run(sys.argv[1]))))
