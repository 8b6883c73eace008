"""Serve an index over HTTP and search it from a program: `python examples/serve_and_ask.py [PASSAGES] [PORT]`."""

import subprocess
import sys
import time

from wikipedia import passages

from mvr_ray import Client, Index
from mvr_ray.client import RefusedError, UnreachableError

PATH = "example-store/serve"
PORT = int(sys.argv[2]) if len(sys.argv) > 2 else 8000


def is_ready(client: Client) -> bool:
    """Whether a search covered every passage just now; Ray Serve takes half a minute to start."""
    try:
        return client.ready().ready
    except UnreachableError:
        return False


Index.build(passages(), path=PATH).close()
command = [sys.executable, "-m", "mvr_ray.cli", "serve", f"{PATH}/run.yaml", f"serve.port={PORT}"]
with subprocess.Popen(command) as server, Client(f"http://127.0.0.1:{PORT}") as client:
    try:
        while not is_ready(client):
            assert server.poll() is None, "the server ended"
            time.sleep(1)
        response = client.search(["a city at a river"], k=3)
        for hit in response.results[0]:
            print(f"{hit.score:.4f}  {hit.title}: {hit.snippet.text if hit.snippet else hit.text}")
        print(f"version {response.version}, exact: {response.exact.certified}")
        try:
            client.search([""])
        except RefusedError as error:  # the error says what is wrong
            print("refused:", error)
    finally:
        server.terminate()
