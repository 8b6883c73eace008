"""`/v1/embeddings` as the client of OpenAI calls it: the vectors are those of a search."""

import base64
from collections.abc import Iterator

import numpy as np
import openai
import pytest
from asgi import call
from in_memory_index import InMemoryIndex
from server import listening

from mvr_ray.client import Client, RefusedError
from mvr_ray.config import ServeConfig
from mvr_ray.serving.app import create_app
from mvr_ray.serving.auth import read_tokens
from mvr_ray.serving.service import SearchService

TOKEN = "read-" + "r" * 20
TEXTS = ["nile nile", "a hill by the rhine"]
VECTORS = [[2.0, 0.0, 0.0], [0.0, 1.0, 1.0]]
TOKENS = read_tokens(None, {"MVR_RAY_READ_TOKEN": TOKEN})


def service(**limits) -> SearchService:
    return SearchService(InMemoryIndex(), ServeConfig(**limits))


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with (
        listening(create_app(service(max_batch=4), TOKENS)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key=TOKEN, max_retries=0, timeout=30) as client,
    ):
        yield client


def test_the_client_of_openai_gets_the_vectors_of_a_search_in_either_encoding(client) -> None:
    for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model="words", input=TEXTS, **more)
        vectors = [one.embedding for one in answer.data]
        if more.get("encoding_format") == "base64":  # the client leaves alone what was asked for
            vectors = [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in vectors]
        assert vectors == VECTORS and [one.index for one in answer.data] == [0, 1]
        assert (answer.model, answer.object, answer.data[0].object) == (f"words/{'f' * 16}", "list", "embedding")
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 7
    one = client.embeddings.create(model="f" * 16, input="nile", dimensions=3)
    assert one.data[0].embedding == [1.0, 0.0, 0.0] and one.usage.prompt_tokens == 1


def test_what_cannot_be_embedded_is_an_error_of_the_client_that_names_the_field(client) -> None:
    cases = [
        ({"model": "text-embedding-3-small", "input": "x"}, openai.NotFoundError, "unknown_model", "words"),
        ({"model": "words", "input": "x", "dimensions": 2}, openai.UnprocessableEntityError, "wrong_dimension", "3"),
        ({"model": "words", "input": [1, 2]}, openai.UnprocessableEntityError, "not_a_text", "token numbers"),
        ({"model": "words", "input": [[1], [2]]}, openai.UnprocessableEntityError, "not_a_text", "token numbers"),
        ({"model": "words", "input": ["x", None]}, openai.UnprocessableEntityError, "wrong_type", "list of texts"),
        ({"model": "words", "input": "  "}, openai.UnprocessableEntityError, "empty_text", "empty"),
        ({"model": "words", "input": ""}, openai.UnprocessableEntityError, "empty_text", "no text"),
        ({"model": "words", "input": []}, openai.UnprocessableEntityError, "empty_text", "no text"),
        ({"model": "words", "input": 5 * ["x"]}, openai.UnprocessableEntityError, "too_many_texts", "5 texts"),
    ]
    for arguments, kind, code, words in cases:
        with pytest.raises(kind) as error:
            client.embeddings.create(**arguments)
        assert error.value.code == code and words in str(error.value)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="x" * 25).embeddings.create(model="words", input="x")


def test_the_own_client_embeds_the_same() -> None:
    with Client.over(service(), timeout_s=30) as client:
        assert [one.embedding for one in client.embed(TEXTS, model="words").data] == VECTORS
        assert client.embed(TEXTS) == client.embed(TEXTS, model="words")
        with pytest.raises(RefusedError, match="unknown_model"):
            client.embed(TEXTS, model="other")
        assert client.examples().queries[0] == "How long is the Nile?"


def test_examples_are_returned_to_clients_that_may_read() -> None:
    app = create_app(service(), TOKENS)
    assert call(app, "GET", "/v1/examples").status == 401
    assert call(app, "GET", "/v1/examples", token=TOKEN).body["queries"][1] == "What is a hill?"
