#!/usr/bin/env python3
"""Simulates many clients, a router and hosts that run `moebius serve`: what routing finds in caches, how long clients
wait, what breaks first, what a token costs. Needs Python 3.11 and nothing else.

  tools/scale.py                 16 hosts of eight H200 with a model of 671B, 10,000 clients, by routing and by load
  tools/scale.py two FILE        predicts the two servers that `contrib/proxy/try.sh --load FILE` measured, and compares
  tools/scale.py --check         checks the simulation: its arithmetic, its laws, and figures of docs/benchmarks.md

A step of a host costs what its bytes and operations take, with three factors that were fitted to one H200 and hold for
two (`H200`); or, with `two`, what steps were measured to take. Steps are as the engine's scheduler plans them: all
answers by one token, and prompts as far as they fit into the step's time. Caches keep prefixes by last use.
"""

import argparse
import bisect
import hashlib
import heapq
import json
import math
import random
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace

PAGE = 32


@dataclass(frozen=True)
class Shape:
    """What a model's step reads and computes."""

    n_layer: int
    d_model: int
    n_expert: int
    n_used: int
    expert: int  # weights of one expert
    other: int  # weights of a layer that every token uses
    head: int  # weights of the output matrix
    cache_bytes: int  # of a position, all layers
    pair_flops: float  # of a token and a position that it sees, all layers
    is_split: bool  # whether several GPUs share a position's cache out among them
    weight_bytes: float = 4.9 / 8  # Q4_K_M

    def read(self, n):
        """Bytes of weights that a step of n tokens reads, if tokens choose experts evenly."""
        touched = self.n_expert * (1 - (1 - self.n_used / self.n_expert) ** n)
        return self.weight_bytes * (self.n_layer * (touched * self.expert + self.other) + self.head)

    def active(self):
        return self.n_layer * (self.n_used * self.expert + self.other) + self.head


def attention(d_model, n_head, n_kv, d_head=128):
    return d_model * d_head * (2 * n_head + 2 * n_kv)


QWEN3_30B = Shape(48, 2048, 128, 8, 3 * 2048 * 768, attention(2048, 32, 4) + 2048 * 128, 2048 * 151936,
                  48 * 2048, 48 * 32 * 128 * 4, True)
QWEN3_235B = Shape(94, 4096, 128, 8, 3 * 4096 * 1536, attention(4096, 64, 4) + 4096 * 128, 4096 * 8192,
                   94 * 2048, 94 * 64 * 128 * 4, True)
# DeepSeek-V3's shape, its three dense layers counted as the others. Latents are the same for all heads, so each GPU
# has all of them.
DEEPSEEK_671B = Shape(61, 7168, 256, 8, 3 * 7168 * 2048, 3 * 7168 * 2048 + 187_000_000, 7168 * 129280,
                      61 * 576 * 2, 61 * 128 * (576 + 512) * 2, False)


@dataclass(frozen=True)
class H200:
    """Steps of a shape on GPUs of one host. `launches`, `reads` and `products` are fitted to decode of Qwen3-30B-A3B on
    one H200 by 1 to 256 sequences (docs/benchmarks.md); --check holds them to that and to other measured figures."""

    shape: Shape
    n_gpu: int = 1
    launches: float = 12e-6  # seconds a layer
    reads: float = 0.44 * 4.8e12  # bytes of weights a second
    products: float = 0.33 * 989e12  # operations a second
    positions: float = 3.0e12  # bytes of cache a second
    reduce: float = 9e-6  # seconds an all-reduce, two a layer, and per byte: measured between two GPUs
    reduce_byte: float = 5e-12
    step_time: float = 0.025
    memory: float = 0.9 * 141e9 - 6e9  # of a GPU, for weights and cache

    def seconds(self, n_decode, context, n_prompt=0, seen=0):
        """Of a step with n_decode answers that see `context` positions together, and n_prompt tokens of prompts that
        see `seen` token-position pairs."""
        shape, n = self.shape, n_decode + n_prompt
        time = shape.n_layer * self.launches + shape.read(n) / (self.reads * self.n_gpu)
        flops = 2 * shape.active() * n + shape.pair_flops * (context + seen)
        time += flops / (self.products * self.n_gpu)
        time += context * shape.cache_bytes / (self.positions * (self.n_gpu if shape.is_split else 1))
        if self.n_gpu > 1:
            time += 2 * shape.n_layer * (self.reduce + self.reduce_byte * 2 * shape.d_model * n)
        return time

    def cache_tokens(self):
        weights = self.shape.read(math.inf)
        shared = self.n_gpu if self.shape.is_split else 1
        return int((self.memory - weights / self.n_gpu) * shared / self.shape.cache_bytes)


@dataclass(frozen=True)
class Measured:
    """Steps as measured: seconds of a step by its answers, and of prompts a token and a request."""

    decode: tuple  # (answers, seconds), ascending
    prompt_token: float
    request: float  # what a request costs besides its tokens
    cache: int
    step_time: float = 0.1

    def seconds(self, n_decode, context, n_prompt=0, seen=0):  # pylint: disable=unused-argument
        time = n_prompt * self.prompt_token
        if n_decode:
            i = min(max(bisect.bisect_left(self.decode, (n_decode,)), 1), len(self.decode) - 1)
            (n0, t0), (n1, t1) = self.decode[i - 1], self.decode[i]
            time += t0 + (t1 - t0) * (n_decode - n0) / (n1 - n0)
        return time

    def cache_tokens(self):
        return self.cache


@dataclass(frozen=True)
class Work:
    """What clients ask for. Each reads and thinks, asks, and waits; a conversation begins with one of the prefixes."""

    clients: int
    prefixes: int  # system prompts or documents that conversations share
    prefix_tokens: int
    turn_tokens: int
    answer_tokens: int
    turns: int
    think: float  # seconds, on average
    by_prefix: bool = False  # whether the key names the prefix; else the client


@dataclass
class Request:
    client: int
    prefix: int
    history: int  # tokens of the conversation after the prefix that an answer has been given to
    prompt: int
    answer: int
    key: str
    begin: float
    shared: int  # tokens of the prefix
    talk: tuple  # what keeps the conversation apart from others in a cache
    hit: int = 0
    left: int = 0  # prompt tokens to compute
    first: float = 0.0


@dataclass
class Host:
    steps: object
    parallel: int
    name: int = 0
    waiting: deque = field(default_factory=deque)
    prompts: list = field(default_factory=list)
    answers: list = field(default_factory=list)  # heap of (step in which it ends, order, request)
    cache: OrderedDict = field(default_factory=OrderedDict)  # what of it, by last use: tokens
    cached: int = 0
    active: int = 0  # tokens that running requests hold or will
    context: int = 0  # positions that answers see together
    step: int = 0
    outstanding: int = 0
    is_busy: bool = False
    is_down: bool = False
    busy: float = 0.0
    prompt_time: float = 0.0

    def find(self, request):
        """Tokens of the prompt that the cache has."""
        found = self.cache.get(("prefix", request.prefix), 0)
        if found == request.shared:
            found += min(self.cache.get(request.talk, 0), request.history)
        return min(found, request.prompt - 1) // PAGE * PAGE

    def keep(self, what, tokens):
        self.cached += tokens - self.cache.pop(what, 0)
        self.cache[what] = tokens

    def touch(self, request):
        # The beginning of a prefix is used later than its continuation, and goes last.
        for what in (request.talk, ("prefix", request.prefix)):
            if what in self.cache:
                self.cache.move_to_end(what)

    def evict(self):
        # What was used longest ago goes, from its end on.
        while self.cache and (excess := self.cached + self.active - self.steps.cache_tokens()) > 0:
            what, tokens = self.cache.popitem(last=False)
            kept = max(tokens - excess, 0) // PAGE * PAGE
            self.cached -= tokens - kept
            if kept:
                self.cache[what] = kept
                self.cache.move_to_end(what, last=False)

    def admit(self):
        """Requests begin while there is room for them."""
        n = 0
        while self.waiting and len(self.prompts) + len(self.answers) < self.parallel:
            request = self.waiting[0]
            hit = self.find(request)
            need = request.prompt + request.answer - hit
            if self.active and self.active + need > self.steps.cache_tokens():
                break
            self.waiting.popleft()
            request.hit, request.left = hit, request.prompt - hit
            self.touch(request)
            self.active += need
            self.prompts.append(request)
            n += 1
        self.evict()
        return n

    def chunk(self):
        """Prompt tokens of the next step, as `pace.rs` bounds them."""
        wanted, n = sum(request.left for request in self.prompts), len(self.answers)
        if not n:
            return min(wanted, 8192)
        alone = self.steps.seconds(n, self.context)
        limit = max(self.steps.step_time * (1 + max(0, n - 32) / 96), 2 * alone)
        best = self.steps.seconds(0, 0, 2048) / 2048
        size = 16
        while size < wanted and size < 8192:
            time = self.steps.seconds(n, self.context, 2 * size)
            if time > limit and (time > 4 * limit or self.steps.seconds(0, 0, size) / size < 4 * best):
                break
            size *= 2
        return min(size, wanted)

    def plan(self, now):
        """Begins a step: its seconds, and the prompts that it ends."""
        n_new = self.admit()
        size = self.chunk() if self.prompts else 0
        seen, left, done = 0, size, []
        # Half for the oldest, the rest for the shortest.
        order = self.prompts[:1] + sorted(self.prompts[1:], key=lambda request: request.left)
        for i, request in enumerate(order):
            part = min(request.left, max(left // 2, left - sum(r.left for r in order[1:])) if i == 0 else left)
            seen += part * (request.prompt - request.left + part // 2)
            request.left -= part
            left -= part
            if not request.left:
                done.append(request)
        n = len(self.answers)
        time = self.steps.seconds(n, self.context, size, seen) if n or size else 0.0
        time += n_new * getattr(self.steps, "request", 0.0)
        self.busy += time
        self.prompt_time += time - (self.steps.seconds(n, self.context) if n else 0.0)
        return now + time, done

    def finish(self, now, done):
        """Ends a step: the requests whose answers are whole."""
        self.step += 1
        self.context += len(self.answers)
        whole = []
        while self.answers and self.answers[0][0] <= self.step:
            whole.append(heapq.heappop(self.answers)[2])
        for request in whole:
            self.context -= request.prompt + request.answer - 1
            self.active -= request.prompt + request.answer - request.hit
            self.keep(request.talk, request.prompt + request.answer - request.shared)
            self.touch(request)
        for request in done:
            self.prompts.remove(request)
            request.first = now
            if self.cache.get(("prefix", request.prefix), 0) < request.shared:
                self.keep(("prefix", request.prefix), request.shared)
            heapq.heappush(self.answers, (self.step + request.answer - 1, request.client, request))
            self.context += request.prompt
        self.evict()
        return whole


class Router:
    """Chooses a host for a request."""

    def __init__(self, kind, hosts, pick, homes=None):
        self.kind, self.hosts, self.pick, self.next, self.homes = kind, hosts, pick, 0, homes
        points = [(self.place(f"{host.name}-{i}"), host) for host in hosts for i in range(256)]
        self.circle = sorted(points, key=lambda point: point[0])
        self.places = [place for place, _ in self.circle]

    @staticmethod
    def place(text):
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())

    def choose(self, request):
        up = [host for host in self.hosts if not host.is_down]
        if self.homes:
            return self.hosts[self.homes[request.prefix]]
        if self.kind == "random":
            return self.pick.choice(up)
        if self.kind == "turns":
            self.next += 1
            return up[self.next % len(up)]
        if self.kind == "fewest":
            return min(up, key=lambda host: (host.outstanding, self.pick.random()))
        # By key, on a circle; with `key` to the next one where a host has more than 1.5 times the mean.
        factor = 1.5 if self.kind == "key" else math.inf
        bound = factor * (sum(host.outstanding for host in up) + 1) / len(up)
        at = bisect.bisect(self.places, self.place(request.key))
        for i in range(len(self.circle)):
            host = self.circle[(at + i) % len(self.circle)][1]
            if not host.is_down and host.outstanding + 1 <= max(bound, 1):
                return host
        return up[0]


def simulate(steps, work, kind, hosts=2, parallel=256, warm=700.0, seconds=300.0, seed=1, down=None,
             homes=None):
    """Runs clients against hosts; what happened in `seconds` after `warm`. `down` is when one host dies; `homes` are
    the hosts of prefixes, where a router has chosen them."""
    pick = random.Random(seed)
    hosts = [Host(steps, parallel, name) for name in range(hosts)]
    router = Router(kind, hosts, random.Random(seed + 1), homes)
    end = warm + seconds
    events, order = [], 0  # (time, order, what, of what)

    def at(time, what, of):
        nonlocal order
        order += 1
        heapq.heappush(events, (time, order, what, of))

    def begin(now, host):
        if not host.is_busy and (host.waiting or host.prompts or host.answers):
            host.is_busy = True
            time, done = host.plan(now)
            at(time, "step", (host, done))

    state = {}

    def next_turn(client):
        """Prefix and tokens of the conversation so far, and which one it is."""
        prefix, turn, history, talk = state.get(client) or (0, work.turns, 0, 0)
        if turn >= work.turns:
            # The first conversation of each has begun before, so that not all grow together.
            turn = 0 if client in state else pick.randrange(work.turns)
            prefix, history, talk = pick.randrange(work.prefixes), 0, talk + 1
        state[client] = (prefix, turn + 1, history, talk)
        return prefix, history, talk

    def ask(now, client, again=None):
        if again:
            prefix, history, talk = again.prefix, again.history, again.talk[1]
        else:
            prefix, history, talk = next_turn(client)
        prompt = work.prefix_tokens + history + work.turn_tokens
        key = f"prefix {prefix}" if work.by_prefix else f"client {client}"
        since = again.begin if again else now
        shared, answer = work.prefix_tokens, work.answer_tokens
        request = Request(client, prefix, history, prompt, answer, key, since, shared, (client, talk))
        host = router.choose(request)
        host.outstanding += 1
        host.waiting.append(request)
        begin(now, host)

    for client in range(work.clients):
        at(pick.random() * max(work.think, 0.01), "ask", client)
    if down is not None:
        at(down, "down", hosts[0])
    done, n_events, marks = [], 0, None
    while events:
        now, _, what, of = heapq.heappop(events)
        if marks is None and now >= warm:
            marks = [(host.busy, host.prompt_time) for host in hosts]
        if now >= end:
            break
        n_events += 1
        if what == "ask":
            ask(now, of)
        elif what == "down":
            of.is_down = True
            lost = [*of.waiting, *of.prompts, *(entry[2] for entry in of.answers)]
            of.waiting.clear(), of.prompts.clear(), of.answers.clear(), of.cache.clear()
            for request in lost:
                ask(now, request.client, request)
        elif not of[0].is_down:
            host, ended = of
            host.is_busy = False
            for request in host.finish(now, ended):
                host.outstanding -= 1
                prefix, turn, history, talk = state[request.client]
                state[request.client] = (prefix, turn, history + work.turn_tokens + request.answer, talk)
                think = pick.expovariate(1 / work.think) if work.think else 0.0
                at(now + think, "ask", request.client)
                if now >= warm:
                    done.append((request, now))
            begin(now, host)
    up = [host for host in hosts if not host.is_down]
    return Outcome(done, up, marks or [(0, 0)] * len(hosts), seconds)


def share(values, q):
    values = sorted(values)
    return values[min(int(q * len(values)), len(values) - 1)] if values else math.nan


class Outcome:
    """What clients and hosts saw."""

    def __init__(self, done, hosts, marks, seconds):
        requests = [request for request, _ in done]
        self.n = len(requests)
        self.requests = self.n / seconds
        self.tokens = sum(request.answer for request in requests) / seconds
        self.prompt_tokens = sum(request.prompt for request in requests) / seconds
        self.hits = sum(r.hit for r in requests) / max(sum(r.prompt for r in requests), 1)
        first = [request.first - request.begin for request in requests]
        self.first = share(first, 0.5), share(first, 0.99)
        self.response = sum(end - request.begin for request, end in done) / max(self.n, 1)
        gaps = [(end - request.first) / max(request.answer - 1, 1) for request, end in done]
        self.gap = share(gaps, 0.5), share(gaps, 0.99)
        times = [(host.busy - marks[host.name][0], host.prompt_time - marks[host.name][1]) for host in hosts]
        self.on_prompts = sum(time for _, time in times) / max(sum(busy for busy, _ in times), 1e-9)
        self.waiting = sum(len(host.waiting) for host in hosts) / len(hosts)
        self.running = sum(len(host.prompts) + len(host.answers) for host in hosts) / len(hosts)

    def row(self, price, n_gpu):
        cost = price * n_gpu / 3600 / self.tokens * 1e6 if self.tokens else math.inf
        cells = [f"{self.hits:.0%}", f"{self.requests:.0f}", f"{self.tokens:,.0f}"]
        cells += [f"{self.first[0]:.2f}, {self.first[1]:.1f}", f"{self.gap[0] * 1e3:.0f}, {self.gap[1] * 1e3:.0f}"]
        cells += [f"{self.on_prompts:.0%}", f"{self.running:.0f}; {self.waiting:.0f}", f"{cost:.2f}"]
        return " | ".join(cells)


HEAD = ("| clients | cached | requests/s | tokens/s | first token, s | between tokens, ms | time on prompts | "
        "a host's running; waiting | $ per million |\n|---|" + "---:|" * 8)
CHAT = Work(10_000, 20, 1500, 150, 300, 10, 45.0)


def paper(args):
    """The table of docs/scale.md."""
    steps = H200(DEEPSEEK_671B, 8)
    shared = replace(steps, shape=replace(DEEPSEEK_671B, is_split=True))
    print(f"{args.hosts} hosts, {CHAT}")
    for name, kind in (("cache on every GPU", steps), ("shared out", shared)):
        times = ", ".join(f"{kind.seconds(n, 3700 * n) * 1e3:.1f}" for n in (1, 64, 256))
        print(f"{name}: {kind.cache_tokens():,} tokens of cache a host; steps of 1, 64 and 256 answers after 3,700 "
              f"tokens: {times} ms; a prompt of 2,048: {2048 / kind.seconds(0, 0, 2048, 2048**2 // 2):,.0f} tokens/s")
    print(f"\n{HEAD}", flush=True)
    cases = [(5_000, kind, steps, {}) for kind in ("random", "turns", "fewest", "hash", "key")]
    cases += [(2_500, "key", steps, {}), (7_000, "key", steps, {}), (10_000, "key", steps, {}),
              (10_000, "key", steps, {"parallel": 64}), (10_000, "random", shared, {}), (10_000, "key", shared, {}),
              (15_000, "key", shared, {}), (20_000, "key", shared, {})]
    for clients, kind, of, late in ((5_000, "key", steps, 0), (5_000, "key", steps, 60), (10_000, "key", shared, 0),
                                    (10_000, "key", shared, 60)):
        cases.append((clients, kind, of, {"warm": args.warm + late, "seconds": 60, "down": args.warm}))
    for clients, kind, of, more in cases:
        run = {"hosts": args.hosts, "parallel": args.parallel, "warm": args.warm, "seconds": args.seconds} | more
        got = simulate(of, replace(CHAT, clients=clients, think=args.think), kind, **run)
        said = "".join([", cache shared out" if of is shared else "", ", 64 at once" if "parallel" in more else ""])
        if "down" in more:
            said += f", a host lost {'a minute ago' if run['warm'] > args.warm else 'now'}"
        print(f"| {clients:,}, {kind}{said} | {got.row(args.price, args.hosts * of.n_gpu)} |", flush=True)
    return 0


def two(path):
    """Predicts what two servers did, from their measured steps."""
    with open(path, encoding="utf-8") as file:
        measured = json.load(file)
    rows = {}
    for run in measured["runs"]:
        steps = Measured(tuple(map(tuple, run["decode"])), run["prompt_token"], run["request"], run["cache_tokens"])
        work = Work(**run["work"])
        got = simulate(steps, work, run["routing"], 2, run["parallel"], run["warm"], run["seconds"], homes=run["homes"])
        rows.setdefault(run["routing"], []).append((run["tokens"], got.tokens, run["hits"], got.hits))
    print("| routing | runs | tokens/s | predicted | | cached | predicted |\n|---|---:|---:|---:|---:|---:|---:|")
    errors, points = [], []
    for routing, found in rows.items():
        tokens, predicted, hits, predicted_hits = (sum(column) / len(found) for column in zip(*found))
        errors.append(abs(predicted / tokens - 1))
        points.append(abs(predicted_hits - hits))
        cells = [routing, len(found), f"{tokens:,.0f}", f"{predicted:,.0f}", f"{predicted / tokens - 1:+.0%}"]
        print(f"| {' | '.join(map(str, cells))} | {hits:.0%} | {predicted_hits:.0%} |")
    print(f"\nat worst {max(errors):.0%} of the tokens and {max(points) * 100:.0f} points of what is cached")
    return 0 if max(errors) < 0.3 and max(points) < 0.1 else 1


# Measured on H200 (docs/benchmarks.md): answers together, or tokens of a prompt, and tokens a second.
MEASURED = [
    (QWEN3_30B, 1, {1: 720, 2: 939, 4: 1357, 8: 1925, 32: 3560, 64: 5985, 128: 10491, 256: 17264},
     {512: 28700, 2048: 44492}),
    (QWEN3_235B, 2, {1: 164, 8: 475, 32: 873, 128: 2926}, {512: 6382, 2048: 11115, 8192: 11874}),
]
# Clients of one H200 over HTTP, 512 tokens in and 128 out, and tokens a second.
SERVED = {64: 3431, 256: 6117}


def check():
    """Checks the simulation; prints what is wrong."""
    wrong = []

    def hold(holds, what):
        print(("held: " if holds else "WRONG: ") + what)
        if not holds:
            wrong.append(what)

    def near(got, expected, most, what):
        hold(abs(got / expected - 1) <= most, f"{what}: {got:,.4g}, not more than {most:.1%} off {expected:,.4g}")

    for shape, n_gpu, decode, prompts in MEASURED:
        steps, name = H200(shape, n_gpu), f"{shape.read(math.inf) / 1e9:.0f} GB on {n_gpu} GPUs"
        for n, rate in decode.items():
            near(n / steps.seconds(n, 12 * n), rate, 0.09, f"{name}, {n} answers")
        for n, rate in prompts.items():
            near(n / steps.seconds(0, 0, n, n * n // 2), rate, 0.15, f"{name}, a prompt of {n}")
    for n, rate in SERVED.items():
        # No two prompts begin alike.
        got = simulate(H200(QWEN3_30B), Work(n, 10**9, 480, 32, 128, 1, 0.0), "turns", 1, n, warm=5, seconds=20)
        near(got.tokens, rate, 0.2, f"{n} clients of one GPU, tokens a second")
        hold(got.hits == 0, "nothing is found where nothing is shared")

    # One client of one host, by hand: each turn computes what is new, and the rest of a page.
    steps = Measured(((1, 0.01), (8, 0.02)), 1e-3, 0.0, 100_000)
    work = Work(1, 1, 1000, 100, 50, 5, 0.0)
    prompts = [1000 + 150 * turn + 100 for turn in range(5)]
    hits = [(prompt - 100) // PAGE * PAGE for prompt in prompts]
    time = sum(prompts) * 1e-3 - sum(hits) * 1e-3 + 5 * 49 * 0.01
    got = simulate(steps, work, "key", 1, 8, warm=100, seconds=1000)
    near(got.tokens, 250 / time, 0.005, "one client, tokens a second")
    near(got.hits, sum(hits) / sum(prompts), 0.005, "one client, share of what is cached")
    small = simulate(replace(steps, cache=900), work, "key", 1, 8, warm=100, seconds=1000)
    hold(small.hits == 0, f"a cache that holds no prompt whole keeps nothing of it once it runs: {small.hits:.0%}")

    # Clients are as many as answers a second times what each takes and thinks.
    steps = Measured(((1, 0.01), (64, 0.05)), 1e-4, 1e-3, 60_000)
    work = Work(100, 10, 500, 50, 40, 6, 3.0)
    run = {"hosts": 4, "parallel": 32, "warm": 100, "seconds": 400}
    runs = {kind: simulate(steps, work, kind, **run) for kind in ("random", "turns", "fewest", "hash", "key")}
    runs["key, a host lost"] = simulate(steps, work, "key", **run, down=90)
    for kind, got in runs.items():
        near(got.requests * (got.response + work.think), work.clients, 0.04, f"clients, by {kind}")
    by_key, by_turns = runs["hash"].hits, runs["turns"].hits
    hold(by_key > by_turns + 0.1, f"keys find more than turns: {by_key:.0%}, {by_turns:.0%}")

    hosts = [Host(steps, 32, name) for name in range(4)]
    router = Router("hash", hosts, random.Random(1))
    asks = [Request(i, 0, 0, 1, 1, f"client {i}", 0.0, 1, (i, 0)) for i in range(1000)]
    before = [router.choose(request).name for request in asks]
    hold(all(180 < before.count(name) < 320 for name in range(4)), "keys are shared out evenly")
    hosts[2].is_down = True
    after = [router.choose(request).name for request in asks]
    moved = sum(b != a for b, a in zip(before, after) if b != 2)
    hold(moved == 0 and 2 not in after, "a host that goes moves its own keys alone")
    print(f"{len(wrong)} wrong")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("command", nargs="?", choices=["paper", "two"], default="paper")
    parser.add_argument("file", nargs="?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--think", type=float, default=CHAT.think)
    parser.add_argument("--parallel", type=int, default=256)
    parser.add_argument("--price", type=float, default=3.0, help="dollars of a GPU and hour")
    parser.add_argument("--warm", type=float, default=700.0)
    parser.add_argument("--seconds", type=float, default=300.0)
    args = parser.parse_args()
    if args.check:
        return check()
    return two(args.file) if args.command == "two" else paper(args)


if __name__ == "__main__":
    sys.exit(main())
