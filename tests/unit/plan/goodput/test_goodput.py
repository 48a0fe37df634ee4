"""The simulator of runs with failures beside closed forms and beside a loop over every step."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from scipy.special import stdtrit

from fornax.config import ConfigError
from fornax.config.quantities import parse_bytes, parse_rate, parse_time
from fornax.plan.goodput import RunSpec, plan_goodput
from fornax.plan.goodput.closed_form import closed_form, young_interval
from fornax.plan.goodput.inputs import Policy
from fornax.plan.goodput.simulate import CAUSES, Failure, draw_failures, simulate

HOUR, DAY = 3600.0, 86_400.0
DETECTION, RECOVERY = 45.0, 15.0


def spec(**changes):
    """Eight hosts in slices of two: a step of 2 s, a copy of 0.5 s, a replica in 1.5 s."""
    values = {
        "hosts": 8,
        "step": 2.0,
        "state": 8e9,
        "rates": {},
        "memory_rate": 2e9,
        "peer_rate": 1e9 / 1.5,
        "disk_rate": 0.1e9,
        "store_rate": 0.2e9,
        "detection": 3.0,
        "recovery": 5.0,
        "compile": 1.25,
        "repair": 100.0,
        "slice_hosts": 2,
    }
    return RunSpec(**{**values, **changes})


ALL = Policy(steps=3, every={"memory": 1, "peer": 1, "disk": 2, "store": 7}, spares=2)


class Loop:
    """A run gone through step by step, with the snapshots that every host really holds."""

    def __init__(self, run, policy, failures, horizon):
        self.run, self.policy, self.queue, self.horizon = run, policy, list(failures), horizon
        self.now, self.seconds = 0.0, dict.fromkeys(CAUSES, 0.0)
        self.journal = []  # (number of the snapshot that it leads to, cause, seconds)
        hosts = range(run.hosts)
        self.held = {
            name: {h: {0} if name in policy.every else set() for h in hosts}
            for name in ("memory", "peer", "disk")
        }
        self.store = {0}
        self.writing = []  # (when it is whole, tier, number)
        self.spares, self.gone = [0.0] * policy.spares, 0

    def until_failure(self):
        return self.queue[0].time if self.queue else math.inf

    def spend(self, cause, seconds, number=None):
        """Pass time; False when a failure or the end comes first."""
        end = min(self.now + seconds, self.until_failure(), self.horizon)
        if number is None:
            self.seconds[cause] += end - self.now
        else:
            self.journal.append((number, cause, end - self.now))
        whole = end == self.now + seconds
        self.now = end
        return whole

    def settle(self):
        """Count the snapshots that were whole by now as held."""
        for when, tier, number in list(self.writing):
            if when <= self.now:
                self.writing.remove((when, tier, number))
                if tier == "store":
                    self.store = {number}
                elif tier == "memory":
                    for held in self.held["memory"].values():
                        held.add(number)
                else:
                    for host in range(self.run.hosts):
                        self.held[tier][host] = {number}

    def snapshot(self, number):
        for tier, every in self.policy.every.items():
            if number % every == 0:
                wait = self.run.tier(tier).write_seconds
                self.writing.append((self.now + wait, tier, number))

    def strike(self):
        """Carry out the failure that is due; its snapshots in flight are gone."""
        self.settle()
        self.writing.clear()
        failure = self.queue.pop(0)
        if failure.kind == "restart":
            for host in range(self.run.hosts):
                self.held["memory"][host], self.held["peer"][host] = set(), set()
        if failure.kind not in ("host", "slice"):
            return
        size = self.run.slice_hosts if failure.kind == "slice" else 1
        for host in range(failure.unit * size, failure.unit * size + size):
            guest = (host - self.run.partner) % self.run.hosts
            self.held["memory"][host], self.held["disk"][host] = set(), set()
            self.held["peer"][guest] = set()
            self.spares.append(failure.time + self.run.repair)
            self.gone += 1

    def source(self):
        """The newest snapshot of which every share is somewhere, and the seconds to read it."""
        hosts = range(self.run.hosts)
        memory, peer, disk = (self.held[name] for name in ("memory", "peer", "disk"))
        found = []
        for number in set().union(self.store, *memory.values(), *peer.values(), *disk.values()):
            places = {
                "memory": all(number in memory[h] for h in hosts),
                "peer": all(number in memory[h] or number in peer[h] for h in hosts),
                "disk": all(number in disk[h] for h in hosts),
                "store": number in self.store,
            }
            found += [(number, -self.run.tier(n).read_seconds) for n, has in places.items() if has]
        number, reading = max(found)
        return number, -reading

    def restore(self):
        """Go through the downtime, from its start again at each failure; the snapshot's number."""
        while True:
            self.strike()
            number, reading = self.source()
            if not self.spend("detection", self.run.detection):
                if self.now >= self.horizon:
                    return number
                continue
            self.spares.sort()
            if self.gone and not self.spend(
                "waiting", max(0, self.spares[self.gone - 1] - self.now)
            ):
                if self.now >= self.horizon:
                    return number
                continue
            self.spares, self.gone = self.spares[self.gone :], 0
            rest = (("recovery", self.run.recovery), ("restore", reading))
            for cause, seconds in (*rest, ("compile", self.run.compile)):
                if not self.spend(cause, seconds):
                    break
            else:
                return number
            if self.now >= self.horizon:
                return number

    def go(self):
        number, step = 0, 0
        while self.now < self.horizon:
            whole = self.spend("step", self.run.step, number + 1)
            step += whole
            if whole and step == self.policy.steps:
                whole = self.spend("save", self.run.copy_seconds, number + 1)
                if whole:
                    number, step = number + 1, 0
                    self.snapshot(number)
            self.settle()
            if not whole and self.now < self.horizon:
                number, step = self.restore(), 0
                for entry in [e for e in self.journal if e[0] > number]:
                    self.journal.remove(entry)
                    self.seconds["lost"] += entry[2]
                for tier in ("memory", "peer", "disk"):
                    for host in range(self.run.hosts):
                        self.held[tier][host] -= {n for n in self.held[tier][host] if n > number}
                        if tier == "memory":
                            self.held[tier][host].add(number)
        for _, cause, seconds in self.journal:
            self.seconds[cause] += seconds
        return self.seconds


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize(
    "policy",
    [ALL, Policy(steps=4, every={"memory": 1, "peer": 3, "store": 6}, spares=0)],
    ids=["four tiers", "no spares"],
)
def test_seconds_are_those_of_a_loop_over_every_step(seed, policy):
    rates = {"process": 1 / 400, "host": 1 / 150, "slice": 1 / 600, "restart": 1 / 900}
    run = spec(rates=rates, slice_hosts=(2, 4, 8)[seed % 3])
    failures = draw_failures(run, 4000.0, seed)
    assert len(failures) > 20
    found = simulate(run, policy, failures, 4000.0)
    wanted = Loop(run, policy, failures, 4000.0).go()
    assert sum(found.values()) == pytest.approx(4000.0, abs=1e-6)
    assert found == pytest.approx(wanted, abs=1e-6)


def test_without_failures_there_are_only_steps_and_saves():
    found = simulate(spec(), ALL, [], 650.0 * 10 + 1.0)
    assert found == pytest.approx(
        {**dict.fromkeys(CAUSES, 0.0), "step": 6001.0, "save": 500.0}, abs=1e-6
    )
    assert closed_form(spec(), ALL) == pytest.approx(6 / 6.5)


@pytest.mark.parametrize(("mtbf", "work"), [(HOUR, 300.0), (HOUR, 900.0), (6 * HOUR, 2400.0)])
def test_one_tier_agrees_with_daly(mtbf, work):
    """Nothing is written in the background, so that a snapshot is whole when it is taken."""
    run = spec(
        step=10.0,
        memory_rate=8e9 / 8 / 20.0,
        store_rate=math.inf,
        detection=DETECTION,
        recovery=RECOVERY,
        compile=0.0,
        rates={"process": 1 / mtbf},
    )
    policy = Policy(steps=round(work / 10), every={"store": 1}, spares=0)
    copy, down = 20.0, DETECTION + RECOVERY + 20.0
    daly = work / (mtbf * math.exp(down / mtbf) * math.expm1((work + copy) / mtbf))
    assert closed_form(run, policy) == pytest.approx(daly, rel=1e-12)
    horizon, seeds = 1000 * mtbf, 32
    draws = (draw_failures(run, horizon, seed) for seed in range(seeds))
    shares = np.array([simulate(run, policy, d, horizon)["step"] for d in draws]) / horizon
    half = stdtrit(seeds - 1, 0.9995) * shares.std(ddof=1) / math.sqrt(seeds)
    assert abs(shares.mean() - daly) < half < 0.004


def test_young_s_interval_is_the_best_one():
    run = spec(
        step=10.0, memory_rate=1e9 / 20, store_rate=math.inf, rates={"process": 1 / (12 * HOUR)}
    )
    young = young_interval(20.0, 12 * HOUR)
    draws = [draw_failures(run, 200 * DAY, seed) for seed in range(8)]

    def lost(factor):
        policy = Policy(steps=round(factor * young / 10), every={"store": 1}, spares=0)
        return sum(200 * DAY - simulate(run, policy, d, 200 * DAY)["step"] for d in draws)

    assert lost(1.0) < 0.97 * min(lost(0.5), lost(2.0))


def test_a_slice_is_restored_from_peers_in_another_one_only():
    failure = [Failure(100.0, "slice", 1)]
    policy = Policy(steps=3, every={"memory": 1, "peer": 1, "store": 10}, spares=8)
    apart = simulate(spec(), policy, failure, 1000.0)
    together = simulate(spec(slice_hosts=8), policy, [Failure(100.0, "slice", 0)], 1000.0)
    assert apart["lost"] == pytest.approx(100.0 - 15 * 6.5)
    assert together["lost"] == pytest.approx(100.0)


def test_a_host_and_the_one_with_its_replica_dead_together_go_back_to_the_store():
    policy = Policy(steps=3, every={"memory": 1, "peer": 1, "store": 4}, spares=8)
    run = spec()
    other = [Failure(100.0, "host", 0), Failure(101.0, "host", 4)]
    both = [Failure(100.0, "host", 0), Failure(101.0, "host", run.partner)]
    assert simulate(run, policy, other, 1000.0)["lost"] == pytest.approx(100 - 15 * 6.5)
    assert simulate(run, policy, both, 1000.0)["lost"] == pytest.approx(100 - 8 * 6.5)


def test_without_a_spare_a_run_waits_for_the_repair():
    failures = [Failure(100.0, "host", 3), Failure(150.0, "host", 5)]
    policy = Policy(steps=3, every={"memory": 1, "peer": 1, "store": 4}, spares=1)
    waited = [
        simulate(spec(), dataclasses.replace(policy, spares=n), failures, 1000.0)["waiting"]
        for n in (0, 1, 2)
    ]
    assert waited == pytest.approx([144, 47, 0])


def large(hosts):
    """Hosts of 25,000 h between failures and a state of 1.2 TB, bandwidths of the guide."""
    each = hosts / (25_000 * HOUR)
    return spec(
        hosts=hosts,
        step=12.0,
        state=1.2e12,
        rates={"process": 0.13 * each, "host": 0.79 * each, "slice": 0.08 * each},
        memory_rate=2e9,
        peer_rate=2.1e9,
        store_rate=25e9,
        detection=60.0,
        repair=4 * HOUR,
        slice_hosts=64,
    )


def test_memory_each_minute_loses_on_64_hosts_and_wins_on_4096():
    plans = {
        hosts: plan_goodput(large(hosts), horizon=30 * DAY, seeds=8, store_interval=600.0)
        for hosts in (64, 4096)
    }
    store = {hosts: plan.tier_sets[0] for hosts, plan in plans.items()}
    assert [tuple(one.policy.every) for one in store.values()] == [("store",)] * 2
    assert plans[64].minutely.goodput.high < store[64].goodput.low
    assert plans[4096].minutely.goodput.low > store[4096].goodput.high
    assert "peer" in plans[4096].chosen.policy.every
    assert "peer" not in plans[64].chosen.policy.every
    for plan in plans.values():
        assert sum(plan.chosen.causes.values()) == pytest.approx(1)
        assert plan.chosen.goodput.low < plan.chosen.goodput.mean < plan.chosen.goodput.high
        best = max(plan.spares, key=lambda one: one.effective)
        assert plan.chosen.policy.spares == best.policy.spares
    assert plans[4096].chosen.policy.spares > 0


@pytest.mark.slow
def test_spares_are_added_until_no_more_pay():
    """Slices that fail ten times as often: several are under repair at a time."""
    run = large(8192)
    run = dataclasses.replace(run, rates={**run.rates, "slice": 40 * run.rates["slice"]})
    flags: dict[str, Any] = {"horizon": 5 * DAY, "seeds": 2, "store_interval": 600.0}
    plan = plan_goodput(run, **flags)
    chosen = plan.chosen
    policy = {"tiers": tuple(chosen.policy.every), "interval": chosen.policy.steps * run.step}
    assert chosen.policy.spares > 4 * run.slice_hosts
    assert chosen.goodput.mean > 0.85
    most = chosen.policy.spares
    for spares in (2 * run.slice_hosts, most - run.slice_hosts, most + run.slice_hosts, 2 * most):
        other = plan_goodput(run, **flags, **policy, spares=spares).chosen
        assert other.effective <= chosen.effective
        assert spares > most or other.goodput.mean <= chosen.goodput.mean


@pytest.mark.parametrize(("hosts", "often"), [(1024, 1), (4096, 0)])
def test_no_slice_is_paid_for_where_single_spares_are_enough(hosts, often):
    """A second slice of spares wins time, and costs more of the hosts than it wins."""
    run = large(hosts)
    run = dataclasses.replace(run, rates={**run.rates, "slice": often * run.rates["slice"]})
    flags: dict[str, Any] = {"horizon": 10 * DAY, "seeds": 2, "store_interval": 600.0}
    plan = plan_goodput(run, **flags)
    chosen = plan.chosen
    assert chosen.policy.spares < run.slice_hosts
    policy = {"tiers": tuple(chosen.policy.every), "interval": chosen.policy.steps * run.step}
    for spares in (*range(8), run.slice_hosts, run.slice_hosts + 4):
        other = plan_goodput(run, **flags, **policy, spares=spares).chosen
        assert other.effective <= chosen.effective + 1e-3


def test_what_is_given_is_kept():
    plan = plan_goodput(
        large(512),
        horizon=10 * DAY,
        seeds=2,
        store_interval=600.0,
        tiers=("store", "memory"),
        interval=300.0,
        spares=7,
    )
    assert plan.chosen.policy.steps == 25
    assert tuple(plan.chosen.policy.every) == ("memory", "store")
    assert [one.policy.spares for one in plan.spares] == [7]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_time, "25000h", 9e7),
        (parse_time, "1.5min", 90),
        (parse_time, "250ms", 0.25),
        (parse_bytes, "1.2TB", 1.2e12),
        (parse_bytes, "300GiB", 300 * 2**30),
        (parse_rate, "270MB/s", 270e6),
    ],
)
def test_a_number_with_its_unit_is_read(parse, text, value):
    assert parse("it", text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_time, "12"),
        (parse_time, "-3s"),
        (parse_time, "0s"),
        (parse_time, "3 weeks"),
        (parse_time, "1e3s"),
        (parse_time, "3H"),
        (parse_bytes, "12tb"),
        (parse_bytes, "TB"),
        (parse_bytes, "5s"),
        (parse_rate, "2GB"),
        (parse_rate, "2Gb/s"),
        (parse_rate, "nanGB/s"),
    ],
)
def test_a_number_without_its_unit_is_refused_with_the_units(parse, text):
    with pytest.raises(ConfigError) as caught:
        parse("it", text)
    assert f"it={text!r}" in str(caught.value)
    assert ("min" if parse is parse_time else "GiB") in str(caught.value)


@pytest.mark.parametrize("changes", [{"hosts": 0}, {"slice_hosts": 3}, {"slice_hosts": 0}])
def test_slices_divide_the_hosts(changes):
    with pytest.raises(ConfigError, match="give"):
        spec(**changes)


@pytest.mark.parametrize("tiers", [("memory", "peer"), ("peer", "store")])
def test_tiers_that_cannot_be_had_are_refused(tiers):
    with pytest.raises(ConfigError, match="the store belongs to them"):
        plan_goodput(spec(), horizon=DAY, seeds=2, store_interval=600.0, tiers=tiers)
