"""Calls over a socket of a searcher's own: the same answers, only for who knows the key; else Ray's calls."""

import pickle
import socket
import struct
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import ray
from made import D, brute_force, made_index, made_views

from mvr_ray.distributed.router import open_router
from mvr_ray.distributed.searching import channel
from mvr_ray.distributed.searching.channel import Address, Channel, Channels, Cut, Listener, Turns, wait
from mvr_ray.errors import ShardIndexError

SHARDS, K = 3, 7
VIEWS = made_views(60, 1)
QUERIES_QD = np.random.default_rng(5).integers(-2, 3, (4, D)).astype(np.float32)
TRUTH = [brute_force(VIEWS, query_D, K) for query_D in QUERIES_QD]


class Desk:
    """What a listener stands before: it says what it is told, later when it is to."""

    def __init__(self) -> None:
        self.calls = 0
        self.gate = threading.Event()

    def say(self, what):
        self.calls += 1
        return what

    def say_later(self, what):
        self.gate.wait(60)
        return what

    def fail(self, error):
        raise error

    def forbidden(self):
        self.calls += 1


class Told:
    """In place of an actor: tells an address, by Ray, and counts how often it was asked."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.asked = 0
        self.channel = self

    def options(self, **_):
        return self

    def remote(self):
        self.asked += 1
        return ray.put(self.address)


@pytest.fixture
def desk():
    return Desk()


@pytest.fixture
def listener(desk):
    return Listener(desk, ("say", "say_later", "fail"), "127.0.0.1")


def until(holds, seconds: float = 30.0) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds
        time.sleep(0.002)


def connected(channels: Channels, number: int = 1) -> None:
    """Return when there are so many channels; calls made for it are answered."""
    while len(channels) < number:
        held = []
        while (one := channels.call("say", (None,))) is not None:
            held.append(one)
        until(lambda: not channels._connecting)
        for one in held:
            assert wait([one], 1, 30) == [one]
            one.answer()


def whole(router) -> bool:
    answer = router.search(QUERIES_QD, K)
    found = [[(hit.passage_id, hit.score, hit.view) for hit in hits] for hits in answer.hits]
    return found == TRUTH and answer.exact.certified


class NotByRay:
    """An actor of which Ray must ask neither a search nor views."""

    def __init__(self, actor) -> None:
        self.actor = actor

    def __getattr__(self, name):
        assert name not in ("search", "views"), f"{name} was called by Ray"
        return getattr(self.actor, name)


def test_turns_are_had_one_at_a_time_in_the_order_of_coming():
    turns, order, inside = Turns(), [], []

    def take(number: int) -> None:
        with turns:
            inside.append(number)
            assert len(inside) == 1
            order.append(number)
            inside.clear()

    with turns:
        threads = []
        for number in range(20):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            until(lambda number=number: len(turns._line) == number + 1)
        assert order == []
    for thread in threads:
        thread.join(30)
    assert order == list(range(20))
    with turns:
        order.append("free again")
    assert order[-1] == "free again"


@pytest.mark.ray
def test_what_is_said_comes_back_whatever_its_size_and_what_is_raised_is_raised(listener, desk, ray_session):
    channels = Channels(Told(listener.address))
    assert channels.call("say", ("by Ray then",)) is None
    connected(channels)
    for told in (None, {"a": [1, 2.5]}, np.random.default_rng(3).normal(size=(900, 900))):
        called = channels.call("say", (told,))
        assert wait([called], 1, 30) == [called]
        np.testing.assert_equal(called.answer(), told)
    for raised in (ShardIndexError("dropped here"), KeyError("x")):
        called = channels.call("fail", (raised,))
        wait([called], 1, 30)
        with pytest.raises(type(raised)) as caught:
            called.answer()
        assert caught.value.args == raised.args
    calls = desk.calls
    called = channels.call("forbidden", ())
    wait([called], 1, 30)
    with pytest.raises(AttributeError, match="fail, say, say_later are"):
        called.answer()
    assert desk.calls == calls and len(channels) == 1


@pytest.mark.ray
def test_a_stranger_is_let_in_by_nobody_and_nothing_of_his_is_unpickled(listener, desk, ray_session, tmp_path):
    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "sprung"), "w")

    trap = pickle.dumps(("say", (Trap(),)))
    for proof in (b"\0" * 32, channel._proof(b"another key", b"caller", b"\0" * 32), b""):
        with socket.create_connection(listener.address[:2], 10) as stranger:
            stranger.sendall(b"\0" * 32 + proof + struct.pack("!Q", len(trap)) + trap)
            with suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
            assert len(b"".join(iter(lambda stranger=stranger: _received(stranger), b""))) <= 64  # its nonce and proof
    assert desk.calls == 0 and not (tmp_path / "sprung").exists()
    channels = Channels(Told(listener.address))
    connected(channels)
    impostor = Channels(Told(Address("127.0.0.1", listener.address.port, b"another key")))
    assert impostor.call("say", (1,)) is None
    until(lambda: not impostor._connecting)
    assert len(impostor) == 0


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(1000)
    except ConnectionResetError:
        return b""


@pytest.mark.ray
def test_where_nobody_listens_calls_go_by_ray_and_it_is_not_tried_again_at_once(ray_session):
    with socket.create_server(("127.0.0.1", 0)) as there:
        free_port = there.getsockname()[1]
    told = Told(Address("127.0.0.1", free_port, b"key"))
    channels = Channels(told)
    assert channels.call("say", (1,)) is None
    until(lambda: not channels._connecting)
    assert [channels.call("say", (1,)) for _ in range(5)] == [None] * 5
    assert told.asked == 1 and len(channels) == 0


@pytest.mark.ray
def test_calls_side_by_side_have_channels_of_their_own_and_are_waited_for_with_rays(listener, desk, ray_session):
    channels = Channels(Told(listener.address))
    connected(channels, 2)
    slow, quick, soon = channels.call("say_later", (1,)), channels.call("say", (2,)), ray.put(3)
    done = wait([slow, quick, soon], 2, 30)
    assert set(done) == {quick, soon}
    began = time.monotonic()
    assert wait([slow], 1, 0.2) == [] == wait([slow], 1, 0)
    assert 0.2 <= time.monotonic() - began < 5
    assert wait([slow, quick], 1, 30) == [quick], "what is whole is whole at once"
    desk.gate.set()
    assert wait([slow, quick], 2, 30) == [quick, slow]
    assert (slow.answer(), quick.answer()) == (1, 2)


@pytest.mark.ray
def test_half_an_answer_holds_nobody_beyond_his_time_and_a_cut_is_told(ray_session):
    here, there = socket.socketpair()
    channels = Channels(Told(Address("nowhere", 1, b"")))
    one = Channel(here, channels)
    one.send(b"called")
    answer = pickle.dumps((True, list(range(1000))))
    framed = struct.pack("!Q", len(answer)) + answer
    there.sendall(framed[:700])
    began = time.monotonic()
    assert wait([one], 1, 0.1) == []
    assert time.monotonic() - began < 5
    there.sendall(framed[700:])
    assert wait([one], 1, 30) == [one] and one.answer() == list(range(1000))
    one.send(b"called")
    there.sendall(framed[:700])
    there.close()
    assert wait([one], 1, 30) == [one]
    with pytest.raises(Cut):
        one.answer()


@pytest.mark.ray
def test_a_channel_that_ended_while_nothing_was_asked_is_replaced(listener, desk, ray_session):
    channels = Channels(Told(listener.address))
    connected(channels)
    channels.cut()
    assert len(channels) == 0 and channels.call("say", (1,)) is None
    connected(channels)
    waits = channels.call("say_later", (1,))
    channels.cut()
    assert wait([waits], 1, 30) == [waits]
    with pytest.raises(Cut):
        waits.answer()
    desk.gate.set()


@pytest.mark.ray
def test_a_router_asks_over_channels_what_it_asked_by_ray(tmp_path, run_over, ray_session):
    made_index(tmp_path, VIEWS, SHARDS)
    run = run_over(tmp_path, index={"name": "made"}, resources={"searchers": 2, "cpus_per_searcher": 0.25})
    with open_router(run) as router:
        replicas = [replica for group in router.fleet.searchers.scatter.groups for replica in group]
        assert whole(router)
        by_ray = router.explain(QUERIES_QD, ["p001", "p002"])
        until(lambda: whole(router) and all(len(replica.channels) for replica in replicas))
        for replica in replicas:
            replica.actor = NotByRay(replica.actor)
        assert all(whole(router) for _ in range(20))
        over_channels = router.explain(QUERIES_QD, ["p001", "p002"])
        for one, other in zip(by_ray, over_channels, strict=True):
            np.testing.assert_equal(one, other)
        ray.get([replica.actor.drop.remote(1) for replica in replicas])
        with pytest.raises(ShardIndexError, match="version 1 was dropped here"):
            router.search(QUERIES_QD, K)
        until(lambda: router.fleet.searchers.counts().waiting == 0)
