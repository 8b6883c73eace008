"""The server under schemathesis, which makes requests from the server's own description, right ones and wrong ones.

    coverage   every bound and every wrong type of every field, missing and doubled headers, methods that are not there
    fuzzing    random bodies, right and wrong
    stateful   versions that are listed are then shown, rolled back to and promoted

Each answer must have a status, a content type, headers and a body that the description has for it, and none may be a
fault of the server. Not asked: that everything which fits the schema is taken (`positive_data_acceptance`). Whether a
text has words, a vector the dimension of the index, or a manifest its files is more than a schema says, and refused by
name. A search that asks for an answer within 2 ms gets 504 where there is none: the one status from 500 on that is
allowed, and there alone.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server import listening

from mvr_ray.config import ServeConfig
from mvr_ray.distributed.hot_swap import open_hot_swap_router
from mvr_ray.serving.app import create_app
from mvr_ray.serving.auth import read_tokens
from mvr_ray.serving.catalog import VersionCatalog
from mvr_ray.serving.service import SearchService
from mvr_ray.store.files import Store

pytestmark = [pytest.mark.data, pytest.mark.ray, pytest.mark.slow]

ADMIN = "admin-" + "a" * 20
LIMITS = {"max_batch": 4, "max_k": 20, "max_query_chars": 200, "max_body_bytes": 100_000, "follow_s": 0}
EXAMPLES = "15"
SETTINGS = """
[[operations]]
include-path = "/v1/search"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "504"]
"""


def test_no_request_made_from_the_description_breaks_the_server_or_gets_what_is_not_described(
    own_index: Path, run_over, tmp_path: Path
) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed: pip install -e '.[dev]'")
    run = run_over(own_index, serve=LIMITS)
    with open_hot_swap_router(run, local=True) as router:
        catalog = VersionCatalog(Store(run.store.path), run.index.name)
        service = SearchService(router, ServeConfig(**LIMITS), catalog)
        app = create_app(service, read_tokens(None, {"MVR_RAY_ADMIN_TOKEN": ADMIN}))
        with listening(app) as address:
            (tmp_path / "schemathesis.toml").write_text(SETTINGS)
            command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
            command += [f"{address}/openapi.json", "--header", f"Authorization: Bearer {ADMIN}", "--checks", "all"]
            command += ["--exclude-checks", "positive_data_acceptance", "--max-examples", EXAMPLES, "--seed", "1"]
            command += ["--continue-on-failure", "--request-timeout", "30", "--suppress-health-check", "all"]
            clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
            process = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        output = process.stdout + process.stderr
        assert process.returncode == 0, output
        assert "13 selected / 13 total" in output and "Tested: 13" in output, output
        assert service.readiness().ready
