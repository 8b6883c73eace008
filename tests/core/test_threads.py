"""Threads that change what holds for the whole process leave it as it was, and neither they nor forks hang."""

import copy
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers.utils import logging as transformers_logging

from mvr_ray.core.encoding import openvino_cpu
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.stored_model import InferenceCache
from mvr_ray.core.encoding.tower import quiet_transformers
from mvr_ray.core.threads import torch_threads
from mvr_ray.errors import EncoderError
from mvr_ray.types import Passage

SPEC = EncoderSpec(num_views=3, max_query_tokens=24, max_passage_tokens=64)
PASSAGE = Passage("1", "The river", "The river rises in the hills. It runs to the sea!")


def in_new_thread(work):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result(60)


@pytest.mark.parametrize("knows", [False, True])
def test_threads_that_overlap_leave_torch_with_the_numbers_it_had(knows: bool) -> None:
    """A new thread of a pool has the default, and one that set a number of its own keeps it."""
    is_inside, has_ended = threading.Event(), threading.Event()

    def enter_late_and_leave_last() -> int:
        if knows:
            with torch_threads(5):
                pass
        own_number.set()
        is_inside.wait(60)
        with torch_threads(1):
            overlap.set()
            has_ended.wait(60)
        return torch.get_num_threads()

    own_number, overlap = threading.Event(), threading.Event()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with ThreadPoolExecutor(1) as late:
            number = late.submit(enter_late_and_leave_last)
            own_number.wait(60)
            with torch_threads(1):
                is_inside.set()
                overlap.wait(60)
            has_ended.set()
            assert number.result(60) == 3
        assert (torch.get_num_threads(), in_new_thread(torch.get_num_threads)) == (3, 3)
    finally:
        torch.set_num_threads(before)


def test_a_thread_s_own_number_outlasts_blocks_of_others() -> None:
    def set_and_enter() -> list[int]:
        torch.set_num_threads(2)
        numbers = []
        for _ in range(2):
            with torch_threads(1):
                numbers.append(torch.get_num_threads())
            numbers.append(torch.get_num_threads())
        return numbers

    with torch_threads(torch.get_num_threads()):
        pass
    assert in_new_thread(set_and_enter) == [1, 2, 1, 2]


FAILING_POOL = """
import threading
import torch
from mvr_ray.core.encoding.unpadded_cpu import thread_pool

starts, start, wait = [], threading.Thread.start, threading.Barrier.wait

def start_once(thread):
    starts.append(thread)
    if FAILURE == "no thread" and len(starts) > 1:
        raise RuntimeError("can't start new thread")
    return start(thread)

def wait_or_end(barrier, timeout=None):
    if FAILURE == "Ctrl-C" and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
    return wait(barrier, timeout)

torch.set_num_threads(2)
threading.Thread.start, threading.Barrier.wait = start_once, wait_or_end
try:
    thread_pool(2)
except (RuntimeError, KeyboardInterrupt) as error:
    print(type(error).__name__)
threading.Thread.start, threading.Barrier.wait = start, wait
numbers = []
other = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
other.start()
other.join()
print(torch.get_num_threads(), *numbers)
"""


@pytest.mark.parametrize(("failure", "name"), [("no thread", "RuntimeError"), ("Ctrl-C", "KeyboardInterrupt")])
def test_threads_that_could_not_all_start_do_not_outlast_the_program(failure: str, name: str) -> None:
    script = f"FAILURE = {failure!r}\n{FAILING_POOL}"
    reply = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (reply.returncode, reply.stdout) == (0, f"{name}\n2 2\n"), reply.stderr[-2000:]


def test_models_are_compiled_by_one_thread_at_a_time(tiny, monkeypatch) -> None:
    """OpenVINO's first use of numpy deadlocks with another one, and each core takes the signals of its thread."""
    towers = [DualEncoder.from_backbone(tiny("bert"), SPEC).passage_tower for _ in range(3)]
    core, inside, most = openvino_cpu._core, [], []

    def slow_core():
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.1)
        inside.pop()
        return core()

    monkeypatch.setattr(openvino_cpu, "_core", slow_core)
    with ThreadPoolExecutor(3) as threads:
        models = list(threads.map(lambda tower: openvino_cpu.OpenVinoTower(tower, "f32", None), towers))
    assert len(models) == len(most) == 3 and max(most) == 1


def test_two_threads_convert_and_embed_with_models_at_once(tiny) -> None:
    def vectors(encoder: DualEncoder):
        own = encoder.to_precision("openvino")
        return own.embed_passages(own.tokenize_passages([PASSAGE])).views_PVD

    full = DualEncoder.from_backbone(tiny("bert"), SPEC)
    with ThreadPoolExecutor(4) as threads:
        views = list(threads.map(vectors, [full, *(copy.deepcopy(full) for _ in range(3))]))
    assert all((own == views[0]).all() for own in views)


def test_a_module_is_prepared_once_for_threads_that_ask_at_once() -> None:
    cache, module, calls = InferenceCache(), torch.nn.Linear(2, 2), []

    def prepare() -> int:
        time.sleep(0.05)
        calls.append(1)
        return len(calls)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: cache.of(module, "x", prepare), range(4))) == [1, 1, 1, 1]


def test_transformers_is_as_loud_as_before_when_threads_have_loaded_models(monkeypatch) -> None:
    def load() -> None:
        for _ in range(20):
            with quiet_transformers():
                time.sleep(0.001)

    monkeypatch.setattr(logging.getLogger("transformers"), "level", logging.INFO)
    with ThreadPoolExecutor(4) as threads:
        for one in [threads.submit(load) for _ in range(4)]:
            one.result(60)
    assert transformers_logging.get_verbosity() == logging.INFO


def test_calibration_leaves_stdout_to_others_and_draws_nothing_on_it(tiny, capfd, monkeypatch) -> None:
    import nncf

    quantize, streams = nncf.quantize, []

    def record(*args, **options):
        streams.append(sys.stdout)
        sys.stdout.write("another thread's line\n")
        return quantize(*args, **options)

    monkeypatch.setattr(nncf, "quantize", record)
    encoder, stdout = DualEncoder.from_backbone(tiny("bert"), SPEC), sys.stdout
    openvino_cpu.quantize(encoder.passage_tower, encoder.tokenize_passages([PASSAGE] * 3))
    assert streams == [stdout] and sys.stdout is stdout
    assert capfd.readouterr().out == "another thread's line\n"


def test_a_fork_of_a_process_that_has_embedded_raises_and_does_not_hang(tiny) -> None:
    encoder = DualEncoder.from_backbone(tiny("bert"), SPEC).to_precision("openvino")
    passages = encoder.tokenize_passages([PASSAGE])
    encoder.embed_passages(passages)
    child = os.fork()
    if not child:
        code = 1
        try:
            encoder.embed_passages(passages)
        except EncoderError as error:
            code = 7 if "start processes by spawn" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
