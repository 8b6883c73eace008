"""Refuses by name, before any work, what cannot serve as a backbone."""

import json
import pickle
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import transformers
from pickle_payload import Payload
from random_backbones import SIZES
from safetensors.torch import load_file, save_file

from mvr_ray.core.encoding.backbones import open_tower
from mvr_ray.core.encoding.tower import KINDS
from mvr_ray.core.reading.cross_encoder import CrossEncoder
from mvr_ray.core.reading.reader import Reader
from mvr_ray.errors import EncoderError, MvrRayError


@pytest.fixture
def copy(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny("bert"), tmp_path / "copy"))


def refusal(folder: Path | str) -> str:
    with pytest.raises(EncoderError) as error:
        open_tower(str(folder))
    return str(error.value)


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
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Stands in for the hub: answers every request with this status, but for `file`, which it has; None: no
    server listens. Yields its address."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def start(status: int | None, file: str = "") -> str:
            class HubHandler(BaseHTTPRequestHandler):
                def do_HEAD(self) -> None:
                    exists = bool(file) and self.path.endswith(f"/{file}")
                    self.send_response(200 if exists else status or 500)
                    self.send_header("ETag", "1")
                    self.send_header("X-Error-Code", "EntryNotFound" if file else "RepoNotFound")
                    self.send_header("X-Repo-Commit", "1" * 40)
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
def test_a_hub_model_that_cannot_be_fetched_is_refused_at_once_with_both_readings(hub, status, reason, monkeypatch):
    address, pauses_s = hub(status), list[float]()
    monkeypatch.setattr("time.sleep", pauses_s.append)
    message = refusal("no/such")
    assert pauses_s == []
    before, after = NEITHER.format(folder=Path("no/such").absolute(), hub=address, reason="#").split("#")
    assert message.startswith(before)
    assert message.endswith(after)
    assert reason in message


def test_a_hub_model_that_is_an_adapter_alone_is_refused_as_such(hub):
    hub(404, "adapter_config.json")
    assert refusal("some/adapter").startswith(
        "backbone some/adapter holds an adapter (such as LoRA's), which mvr_ray does not apply; merge it by"
    )


def test_a_backbone_that_judges_texts_logs_a_warning(copy, caplog):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    open_tower(str(copy))
    assert not caplog.text
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    open_tower(str(copy))
    assert f"backbone {copy} is a BertForSequenceClassification, which judges texts" in caplog.text


def test_a_folder_without_config_is_named(tmp_path):
    assert refusal(tmp_path) == f"backbone {tmp_path} has no config.json; give a folder that save_pretrained wrote"
    (tmp_path / "config.json").write_text("{")
    assert refusal(tmp_path).startswith(f"backbone {tmp_path} has no readable config.json: ")


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (
            "nosuch",
            "backbone {0} is of model type 'nosuch', which transformers {1} does not have; code of its own "
            "(modeling_own.Model) computes it, and mvr_ray does not run it: take a model whose type transformers knows",
        ),
        (
            "bart",
            "a backbone of model type 'bart' has an encoder and a decoder, and transformers does not load its "
            "encoder alone; take one of the kind of BERT, T5 or Qwen",
        ),
    ],
)
def test_a_model_type_that_is_no_text_encoder_is_named(copy, model_type, message):
    config = json.loads((copy / "config.json").read_text())
    auto_map = {"AutoModel": "modeling_own.Model"}
    (copy / "config.json").write_text(json.dumps({**config, "model_type": model_type, "auto_map": auto_map}))
    assert refusal(copy) == message.format(copy, transformers.__version__)
    (copy / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    assert model_type != "nosuch" or "if the model brings code of its own, mvr_ray does not run it" in refusal(copy)


def test_code_of_a_model_that_is_not_run_is_named(copy, caplog):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling_own.Model"}}))
    open_tower(str(copy))
    assert f"backbone {copy} names code of its own (modeling_own.Model), which is not run" in caplog.text
    weights = load_file(copy / "model.safetensors")
    save_file({name: weights[name] for name in sorted(weights)[1:]}, copy / "model.safetensors")
    assert refusal(copy).endswith(
        "its weights are those of code of its own (modeling_own.Model), which mvr_ray does not run: take another model"
    )


@pytest.mark.parametrize("files", [["adapter_model.safetensors"], ["model.safetensors", "config.json"]])
def test_an_adapter_is_refused_by_the_name_of_its_base(copy, files):
    for name in {"config.json", "model.safetensors"}.difference(files):
        (copy / name).unlink()
    (copy / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "some/base"}))
    message = (
        f"backbone {copy} holds an adapter (such as LoRA's) of some/base, which mvr_ray does not apply; merge it by"
    )
    assert refusal(copy).startswith(message)


def test_weights_that_are_not_safetensors_are_not_opened(copy):
    for name, content in (
        ("pytorch_model.bin", "pickled weights, which could run code (pytorch_model.bin)"),
        ("onnx/model.onnx", "weights for ONNX Runtime (model.onnx)"),
        ("openvino_model.xml", "weights for OpenVINO (openvino_model.xml)"),
    ):
        file = copy / name
        file.parent.mkdir(exist_ok=True)
        shutil.copy(copy / "model.safetensors", file)
        (copy / "model.safetensors").rename(copy / "whole")
        message = refusal(copy)
        assert message.startswith(f"backbone {copy} cannot be loaded: ")
        assert f"; it has {content}, and mvr_ray reads model.safetensors: give the folder of the model that" in message
        file.unlink()
        assert refusal(copy).endswith("; it needs model.safetensors and tokenizer.json")
        (copy / "whole").rename(copy / "model.safetensors")


def with_settings(file: Path, **settings: object) -> None:
    before = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**before, **settings}))


def without_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_own_module(folder: Path) -> None:
    kinds = "sentence_transformers.models.Transformer", "modeling_own.Model"
    modules = [{"idx": at, "name": str(at), "path": "", "type": kind} for at, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: None, None),
        (
            lambda folder: with_settings(folder / "config.json", model_type="own"),
            "computes it, and mvr_ray does not run it",
        ),
        (lambda folder: with_settings(folder / "config.json", architectures=["Model"]), None),
        (lambda folder: with_settings(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer"), None),
        (with_own_module, "modeling_own.Model, which is code of the model's own"),
        (without_safetensors, "pickled weights, which could run code"),
    ],
    ids=["beside weights", "model type", "architecture", "tokenizer", "module", "pickle alone"],
)
def test_no_code_of_a_model_folder_is_run(copy, tmp_path, change, message):
    """A folder whose every file that could carry code does: it is refused by name, or read without them."""
    trace = tmp_path / "trace"
    code = f"import os\nos.mkdir({str(trace)!r})\nclass Model: pass\nclass OwnTokenizer: pass\nclass Config: pass\n"
    for name in ("modeling_own", "tokenization_own", "configuration_own", "modeling_x"):
        (copy / f"{name}.py").write_text(code)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (copy / name).write_bytes(pickle.dumps(Payload(trace)))
    own = {"AutoConfig": "configuration_own.Config", "AutoModel": "modeling_own.Model"}
    with_settings(copy / "config.json", auto_map=own)
    with_settings(copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.OwnTokenizer"] * 2})
    change(copy)
    if message:
        assert message in refusal(copy)
    else:
        assert open_tower(str(copy)).dimension == 16
    assert not trace.exists()
    assert not {"modeling_own", "tokenization_own", "configuration_own"} & set(sys.modules)


def own_type(folder: Path) -> None:
    own = {"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}
    (folder / "config.json").write_text(json.dumps(own))


def own_tokenizer(folder: Path) -> None:
    """Of a model for which transformers has no tokenizer."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    transformers.ViTModel(transformers.ViTConfig(**sizes)).save_pretrained(folder)
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", "code.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))


@pytest.mark.parametrize(
    ("open_model", "change"),
    [(Reader.open, own_type), (CrossEncoder.open, own_type), (open_tower, own_tokenizer)],
    ids=["reader", "cross-encoder", "tokenizer"],
)
def test_transformers_does_not_ask_whether_to_run_code_of_a_folder(copy, tmp_path, monkeypatch, open_model, change):
    """Where it has no class of its own, and nothing says whether code may run, it asks at the terminal."""
    prompts: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt: prompts.append(prompt) or "y")
    (copy / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'trace')!r})\nclass Own: pass\n")
    change(copy)
    with pytest.raises(MvrRayError, match=re.escape(str(copy))):
        open_model(str(copy))
    assert not prompts and not (tmp_path / "trace").exists()


def test_the_payload_that_no_folder_runs_does_run_where_it_is_unpickled(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "trace")))
    assert (tmp_path / "trace").is_dir()


def test_a_checkpoint_that_lacks_weights_is_refused(copy):
    weights = load_file(copy / "model.safetensors")
    missing = sorted(weights)[5]
    save_file({name: weight for name, weight in weights.items() if name != missing}, copy / "model.safetensors")
    assert refusal(copy) == (
        f"backbone {copy} lacks 1 weight of a bert model (first: {missing}); they would be random, so take a complete "
        f"checkpoint"
    )


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "t5"])
def test_a_model_without_tokenizer_files_is_refused_as_all_its_texts_would_be_alike(tiny, tmp_path, kind):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(tiny(kind)) / name, tmp_path)
    assert refusal(tmp_path) == (
        f"backbone {tmp_path} has no tokenizer with words, so all texts would be alike; add its tokenizer.json "
        f"(tokenizer.save_pretrained)"
    )


def test_a_model_without_a_plain_table_of_words_is_refused(copy, tiny):
    words = len(open_tower(tiny("bert")).tokenizer)
    transformers.IBertModel(transformers.IBertConfig(vocab_size=words, **SIZES)).save_pretrained(copy)
    assert refusal(copy) == (
        f"backbone {copy} embeds its words by a QuantEmbedding; take a model with a torch.nn.Embedding, which is a "
        f"plain table"
    )


def test_a_tokenizer_with_more_words_than_the_model_embeds_is_refused(copy, tmp_path):
    num_words = open_tower(str(copy)).num_words
    model = transformers.AutoModel.from_pretrained(copy)
    model.resize_token_embeddings(num_words - 1)
    model.save_pretrained(copy)
    assert refusal(copy) == (
        f"the tokenizer of backbone {copy} has {num_words} words, and the model embeds {num_words - 1}; add the "
        f"tokenizer of this model"
    )


def test_a_token_that_the_model_does_not_embed_is_refused(copy):
    """Read as a row of the table it ended in a traceback, read as a viewer in silence in a wrong vector."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(copy)
    num_words = len(tokenizer)
    tokenizer.add_tokens(["other"])
    tokenizer.save_pretrained(copy)
    assert refusal(copy) == (
        f"the tokenizer of backbone {copy} has the token 'other' of id {num_words}, and the model embeds ids below "
        f"{num_words}; remove the token from tokenizer.json, or give the model a row for it "
        f"(model.resize_token_embeddings) and train it"
    )


def test_a_tokenizer_without_a_separator_is_refused(copy):
    config = json.loads((copy / "tokenizer_config.json").read_text())
    del config["sep_token"]
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    assert refusal(copy) == f"the tokenizer of backbone {copy} has no SEP token, which is needed"
