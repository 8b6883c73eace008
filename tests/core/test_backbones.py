"""Refuses by name, before any work, what cannot serve as a backbone."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from mvr_ray.core.encoding.backbones import open_tower
from mvr_ray.core.encoding.tower import KINDS
from mvr_ray.errors import EncoderError


@pytest.fixture
def copy(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny("bert"), tmp_path / "copy"))


def refusal(folder: Path | str) -> str:
    with pytest.raises(EncoderError) as caught:
        open_tower(str(folder))
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_tells_its_positions_and_vocabulary(tiny, kind):
    tower = open_tower(tiny(kind))
    assert (tower.dimension, tower.num_positions) == (16, 96)
    assert tower.first_position == (2 if kind in ("roberta", "xlm-roberta", "mpnet") else 0)
    assert tower.num_words == len(tower.tokenizer)


def test_a_truncation_written_into_the_tokenizer_file_is_undone(minilm):
    tower = open_tower(str(minilm))
    assert len(tower.tokenizer.backend_tokenizer.encode("river " * 1000).ids) == 1002


def test_a_missing_folder_is_named():
    assert refusal("/nowhere/at/all") == (
        "backbone folder /nowhere/at/all does not exist; give a folder with config.json, model.safetensors and "
        "tokenizer.json, or the name of a model on the Hugging Face hub"
    )


NEITHER = (
    "backbone no/such is neither a folder ({folder} does not exist) nor a model that can be fetched from {hub} "
    "({reason}); give a folder with config.json, model.safetensors and tokenizer.json, or a model's name on a hub that "
    "can be reached"
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[int | None], str]]:
    """Stands in for the hub: answers every request with this status; None: nobody listens. Gives its address."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def start(status: int | None) -> str:
            class HubHandler(BaseHTTPRequestHandler):
                def do_HEAD(self) -> None:
                    self.send_response(status or 500)
                    self.send_header("X-Error-Code", "RepoNotFound")
                    self.end_headers()

                def log_message(self, *_: object) -> None: ...

            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), HubHandler))
            if status is None:
                server.server_close()
            else:
                threading.Thread(target=server.serve_forever, daemon=True).start()
                stack.callback(server.shutdown)
            address = f"http://127.0.0.1:{server.server_port}"
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
            monkeypatch.setattr(
                "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
                address + "/{repo_id}/resolve/{revision}/{filename}",
            )
            return address

        yield start


@pytest.mark.parametrize(("status", "reason"), [(None, "Connection refused"), (401, "401 "), (404, "404 ")])
def test_a_hub_model_that_cannot_be_fetched_is_refused_at_once_with_both_readings(hub, status, reason):
    address, start = hub(status), time.monotonic()
    message = refusal("no/such")
    assert time.monotonic() - start < 5
    before, after = NEITHER.format(folder=Path("no/such").absolute(), hub=address, reason="#").split("#")
    assert message.startswith(before)
    assert message.endswith(after)
    assert reason in message


def test_a_folder_without_config_is_named(tmp_path):
    assert refusal(tmp_path) == f"backbone {tmp_path} has no config.json; give a folder that save_pretrained wrote"
    (tmp_path / "config.json").write_text("{")
    assert refusal(tmp_path).startswith(f"backbone {tmp_path} has no readable config.json: ")


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (
            "nosuch",
            "backbone {0} is of model type 'nosuch', which transformers {1} does not have; if the model brings code of "
            "its own, mvr_ray does not run it: take a model whose type transformers knows",
        ),
        (
            "bart",
            "a backbone of model type 'bart' has an encoder and a decoder, and transformers loads its encoder not "
            "alone; take one of the kind of BERT, T5 or Qwen",
        ),
    ],
)
def test_a_model_type_that_is_no_text_encoder_is_named(copy, model_type, message):
    config = json.loads((copy / "config.json").read_text())
    auto_map = {"AutoModel": "modeling_own.Model"}
    (copy / "config.json").write_text(json.dumps({**config, "model_type": model_type, "auto_map": auto_map}))
    assert refusal(copy) == message.format(copy, transformers.__version__)


def test_weights_that_are_not_safetensors_are_not_opened(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    message = refusal(copy)
    assert message.startswith(f"backbone {copy} cannot be loaded: ")
    assert message.endswith("; it needs model.safetensors and tokenizer.json")


def test_a_checkpoint_that_lacks_weights_is_refused(copy):
    weights = load_file(copy / "model.safetensors")
    gone = sorted(weights)[5]
    save_file({name: weight for name, weight in weights.items() if name != gone}, copy / "model.safetensors")
    assert refusal(copy) == (
        f"backbone {copy} lacks 1 weights of a bert model (first: {gone}); they would be random, so take a complete "
        f"checkpoint"
    )


def test_a_tokenizer_without_a_separator_is_refused(copy):
    config = json.loads((copy / "tokenizer_config.json").read_text())
    del config["sep_token"]
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    assert refusal(copy) == f"the tokenizer of backbone {copy} has no SEP token, which is needed"
