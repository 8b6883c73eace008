"""The queueing model against laws that need no measurement."""

import numpy as np
import pytest
from cluster_model import Cluster, Fault, Routing, Service, makespan_s, poisson, simulate
from hypothesis import given, settings
from hypothesis import strategies as st


@given(
    groups=st.integers(1, 5),
    replicas=st.integers(1, 3),
    batch=st.integers(1, 4),
    queue=st.integers(1, 6),
    rate=st.floats(0.5, 400),
    share_cores=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_every_query_is_served_or_refused_and_no_answer_comes_before_its_work(
    groups, replicas, batch, queue, rate, share_cores, seed
):
    cluster = Cluster(groups, replicas, (1.0, 1.6), share_cores, queue, batch, fault=Fault(0.05, 8.0))
    service = Service(0.002, 0.01, 0.004, spread=0.0)
    outcome = simulate(cluster, service, poisson(rate, 120, seed), Routing(0.0002, 0.0001, 0.0005), seed)
    latencies = outcome.latency_Q[~np.isnan(outcome.latency_Q)]
    assert len(latencies) + outcome.refusals == 120
    assert (latencies >= service.work_s(1) + 0.0005 + 0.0002 + 0.0001 * groups - 1e-9).all()
    assert outcome.calls == len(latencies) * groups + outcome.hedges
    assert outcome.hedges <= 0.05 * len(latencies) * groups
    assert 0 <= outcome.busy_share <= 1 + 1e-9


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_searcher_waits_as_the_pollaczek_khinchine_formula_says(load):
    """M/D/1: the mean wait is load s / (2 (1 - load))."""
    service_s, queries = 0.01, 40_000
    outcome = simulate(Cluster(1, queue=10**9), Service(0.0, service_s), poisson(load / service_s, queries, seed=3))
    wait_Q = outcome.latency_Q - service_s
    means = wait_Q.reshape(20, -1).mean(axis=1)
    error = means.std(ddof=1) / np.sqrt(20)
    assert abs(means.mean() - load * service_s / (2 * (1 - load))) < 4 * error
    assert outcome.busy_share == pytest.approx(load, rel=0.05)


@given(rate=st.floats(1, 60), seed=st.integers(0, 999))
@settings(max_examples=20)
def test_more_nodes_for_the_same_index_are_never_slower(rate, seed):
    arrival_Q = poisson(rate, 150, seed)
    before = np.full(150, np.inf)
    for nodes in (1, 2, 4, 8, 16):
        cluster = Cluster(nodes, queue=10**9)
        latency_Q = simulate(cluster, Service(0.001, 0.2 / nodes), arrival_Q).latency_Q
        assert (latency_Q <= before + 1e-9).all()
        before = latency_Q


def test_searchers_that_share_cores_take_turns_at_them():
    alone_s = simulate(Cluster(4, speeds=(1.0, 2.0)), Service(0, 0.1), np.zeros(1)).latency_Q[0]
    shared_s = simulate(Cluster(4, speeds=(1.0, 2.0), is_shared=True), Service(0, 0.1), np.zeros(1)).latency_Q[0]
    hampered_s = simulate(Cluster(4, speeds=(1.0, 1.5), is_shared=True), Service(0, 0.1), np.zeros(1)).latency_Q[0]
    assert (alone_s, shared_s, hampered_s) == pytest.approx((0.1, 0.2, 0.4 / 1.5))


def test_a_batch_costs_what_its_reading_costs_until_multiplying_costs_more():
    service = Service(0.001, 0.1, 0.01)
    assert [service.work_s(n) for n in (1, 10, 20)] == pytest.approx([0.101, 0.101, 0.201])
    burst = np.zeros(40)
    one, ten = (simulate(Cluster(1, batch=b, queue=99), service, burst).latency_Q.max() for b in (1, 10))
    assert one == pytest.approx(40 * 0.101) and ten == pytest.approx(5 * 0.101)  # the first begins alone


def test_a_second_replica_hides_slow_calls_when_it_is_asked_late():
    arrival_Q, service, fault = poisson(20, 4000, 5), Service(0.0, 0.02, spread=0.2), Fault(0.01, 20.0)
    plain, with_hedges = (
        simulate(Cluster(4, 2, hedging=hedging, fault=fault), service, arrival_Q, seed=6) for hedging in (False, True)
    )
    assert plain.hedges == 0 < with_hedges.hedges
    assert with_hedges.quantile_s(0.99) < 0.75 * plain.quantile_s(0.99)


def test_what_waits_beyond_the_bound_is_refused_and_what_was_let_in_is_served():
    outcome = simulate(Cluster(2, queue=3), Service(0, 1.0), np.arange(10) * 1e-3)
    assert outcome.refusals == 7
    assert sorted(outcome.latency_Q[:3].round(2)) == [1.0, 2.0, 3.0]


@given(st.lists(st.floats(0.01, 5), max_size=40), st.integers(1, 12))
def test_jobs_end_between_the_bounds_of_list_scheduling(jobs_s, workers):
    """Graham 1966: at least the mean load and the longest job; at most the mean load and one job more."""
    most, total = max(jobs_s, default=0.0), sum(jobs_s)
    span = makespan_s(jobs_s, workers)
    assert max(most, total / workers) - 1e-9 <= span <= total / workers + most + 1e-9
