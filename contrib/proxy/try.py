"""What `try.sh` runs: HAProxy with haproxy.cfg before two servers, what is asked of them, and what must come back.
Standard library only."""

import argparse
import contextlib
import http.client
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

WORDS = "fox owl bear river forest moon hat boat bird clock snow house garden tree friend road hill cat dog".split()
CONTEXT = 2048
# Of a server under load: room for the prefixes that are its own, not for all.
CACHE = 8192
# Answers that take seconds, so that something can happen meanwhile.
LONG = 1500


class Failed(Exception):
    """What did not hold."""


class Cut(Exception):
    """An answer that the client was told is none, or not whole: what came of its text, and why."""


def check(holds, what):
    if not holds:
        raise Failed(what)


def wait(until, what, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if until():
            return
        time.sleep(0.05)
    raise Failed(f"not within {seconds} s: {what}")


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Process:
    """A program with its log."""

    def __init__(self, name, command, folder):
        self.name, self.log = name, folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


def status(port, path="/ready"):
    """The status of a GET over a new connection; None where nothing listens."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Host": "localhost"})
            return connection.getresponse().status
    except OSError:
        return None


def ask(port, words, n, key=None, stream=False, on_piece=None, **more):
    """An answer's text, usage and server."""
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": n, "temperature": 0, "ignore_eos": True}
    body |= {"stream": stream, **({"stream_options": {"include_usage": True}} if stream else {}), **more}
    headers = {"Host": "localhost", "Content-Type": "application/json"} | ({"X-Prefix-Key": key} if key else {})
    text, usage, finish = "", {}, None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            by = answer.headers.get("x-served-by")
            if answer.status != 200:
                raise Cut("", f"{answer.status} {answer.read()[:200]!r}")
            if not stream:
                whole = json.loads(answer.read())
                usage = whole["usage"] | whole.get("timings", {})
                return whole["choices"][0]["message"]["content"], usage, by
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise Cut(text, event["error"])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
                    if on_piece:
                        on_piece(text, by)
    except (OSError, http.client.HTTPException) as error:
        raise Cut(text, repr(error)) from error
    if finish is None:
        raise Cut(text, "the stream ended without an end")
    return text, usage, by


def cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


def some_words(seed, n):
    return " ".join(random.Random(seed).choices(WORDS, k=n))


class InBackground:
    """Something that runs on a thread; `result` returns or raises what it did."""

    def __init__(self, run):
        self.value = self.error = None
        self.thread = threading.Thread(target=self._work, args=(run,), daemon=True)
        self.thread.start()

    def _work(self, run):
        try:
            self.value = run()
        except Exception as error:  # pylint: disable=broad-except
            self.error = error

    def result(self):
        self.thread.join(180)
        check(not self.thread.is_alive(), "a request did not end")
        if self.error:
            raise self.error
        return self.value


class Load:
    """Clients that ask for known answers again and again, whole and streamed, while something happens."""

    def __init__(self, port, known, n_clients=6):
        self.port, self.known, self.stopping = port, known, False
        self.done, self.cut, self.wrong = [], [], []
        self.clients = [InBackground(lambda i=i: self.client(i)) for i in range(n_clients)]

    def client(self, i):
        pick = random.Random(i)
        while not self.stopping:
            (key, (words, expected)), stream = pick.choice(list(self.known.items())), pick.random() < 0.5
            begin = time.monotonic()
            try:
                text, _, by = ask(self.port, words, 24, key, stream)
                self.done.append((begin, by))
                if text != expected:
                    self.wrong.append((words, text, expected))
            except Cut as cut:
                self.cut.append((begin, cut))
                if not expected.startswith(cut.args[0]):
                    self.wrong.append((words, cut.args[0], expected))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stopping = True
        for client in self.clients:
            client.result()
        check(not self.wrong, f"answers are those of a calm server: {self.wrong[:1]}")


class Trial:
    """The steps, each of which must hold."""

    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.port = free_port()
        self.ports = {"one": free_port(), "two": free_port()}
        self.servers = {name: self.server(name) for name in self.ports}
        config = (Path(__file__).parent / "haproxy.cfg").read_text()
        addresses = {"8000": self.port, "8081": self.ports["one"], "8082": self.ports["two"]}
        for old, new in addresses.items():
            check(config.count(f"127.0.0.1:{old}") == 1, f"haproxy.cfg names 127.0.0.1:{old} once")
            config = config.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
        (folder / "haproxy.cfg").write_text(config)
        self.proxy = Process("proxy", ["haproxy", "-db", "-f", folder / "haproxy.cfg"], folder)
        self.home, self.known, self.story = {}, {}, ""

    def server(self, name):
        engine = ["--backend", "cpu", "-t", "1", "--parallel", "8", "--ctx", str(CONTEXT), "--max-queue", "64"]
        engine += [*(["-m", self.args.model] if self.args.model else []), *self.args.flags]
        return Process(name, [self.args.server, "serve", "--port", str(self.ports[name]), *engine], self.folder)

    def ask(self, *args, **more):
        return ask(self.port, *args, **more)

    def up(self):
        """Both servers are ready, and requests reach both."""
        wait(lambda: all(status(port) == 200 for port in self.ports.values()), "both servers are ready")
        wait(lambda: status(self.port) == 200, "the proxy is ready")
        wait(lambda: {self.ask("Hello", 1)[2] for _ in range(6)} == set(self.ports), "the proxy asks both")

    def prefixes(self):
        """Requests with one key go to one server, and the second finds the first one's prefix there."""
        hits = 0
        for i in range(14):
            key, prefix = f"key {i}", f"{i} " + some_words(i, 150)
            _, first, home = self.ask(f"{prefix} first", 4, key)
            _, second, again = self.ask(f"{prefix} second", 4, key)
            check(home == again, f"{key}: {home}, then {again}")
            # All pages of 32 tokens that are the same: the last words and the template's end are not.
            check(cached(second) >= first["prompt_tokens"] - 64, f"{key}: {cached(second)} of {first}")
            hits += cached(second)
            self.home[key] = home
            words = f"{prefix} and a story"
            self.known[key] = (words, self.ask(words, 24, key)[0])
        homes = list(self.home.values())
        check(all(homes.count(name) >= 2 for name in self.ports), f"keys are shared out: {homes}")
        key = "key 3"
        by = self.ask("Hello", 1, prompt_cache_key=key)[2]
        check(by == self.home[key], f"prompt_cache_key is a key: {by}, not {self.home[key]}")
        self.hits = hits
        return f"{hits} tokens of 14 prompts found; keys: {homes.count('one')} one, {homes.count('two')} two"

    def without(self):
        """Without keys servers take turns, and fewer prefixes are found."""
        prefixes = [f"other {i} " + some_words(100 + i, 150) for i in range(14)]
        for prefix in prefixes:
            self.ask(f"{prefix} first", 4)
        random.Random(1).shuffle(prefixes)
        hits = sum(cached(self.ask(f"{prefix} second", 4)[1]) for prefix in prefixes)
        check(hits < 0.85 * self.hits, f"{hits} without keys, {self.hits} with them")
        return f"{hits} tokens found in place of {self.hits}"

    def long_story(self, key, on_piece=None):
        return self.ask("Tell me a long story about a fox and an owl", LONG, key, stream=True, on_piece=on_piece)

    def begun(self, key):
        """Starts the long answer; returns once some of it has come, with its server."""
        started = threading.Event()
        story = InBackground(lambda: self.long_story(key, lambda text, _: text and started.set()))
        wait(lambda: started.is_set() or story.error, "an answer begins")
        return story

    def mapped(self):
        return {key: self.ask("Hello", 1, key)[2] for key in self.home}

    def drained(self):
        """A server is told to stop under load: no request fails, its answers are finished, others take its keys."""
        self.story = self.long_story("key 0")[0]
        check(len(self.story) > 500, f"a long story: {self.story!r}")
        name = self.home["key 0"]
        other = next(server for server in self.ports if server != name)
        with Load(self.port, self.known) as load:
            story = self.begun("key 0")
            self.servers[name].process.send_signal(signal.SIGTERM)
            told = time.monotonic()
            wait(lambda: status(self.ports[name]) == 503, "a server that drains is not ready", 5)
            check(story.thread.is_alive(), "the answer runs while its server drains")
            wait(lambda: set(self.mapped().values()) == {other}, "the other server gets all", 10)
            took = time.monotonic() - told
            text, _, by = story.result()
            check((text, by) == (self.story, name), f"{by}, another text: {text!r}\nin place of {self.story!r}")
            code = self.servers[name].process.wait(30)
            time.sleep(1)
        check(code == 0, f"exit code {code}")
        check(not load.cut, f"no request failed: {load.cut[:3]}")
        since = [by for begin, by in load.done if begin > told]
        check(since, "requests were answered meanwhile")
        return f"{len(since)} requests since, none failed; all on the other server {took:.1f} s later"

    def back(self):
        """A server that comes back gets its keys again, under load, and no request fails."""
        with Load(self.port, self.known) as load:
            for name, server in self.servers.items():
                if server.process.poll() is not None:
                    self.servers[name] = self.server(name)
            start = time.monotonic()
            wait(lambda: all(status(port) == 200 for port in self.ports.values()), "the server is ready")
            # Under load a key may be passed on to the server that has less to do.
            wait(lambda: {by for begin, by in load.done if begin > start} == set(self.ports), "both answer")
        check(not load.cut, f"no request failed: {load.cut[:3]}")
        wait(lambda: self.mapped() == self.home, "keys are where they were")
        return f"{len(load.done)} requests, none failed; all {len(self.home)} keys are where they were"

    def killed(self):
        """A server is killed in the middle of answers: they are cut and no other text comes; later requests go on."""
        name = self.home["key 0"]
        with Load(self.port, self.known) as load:
            story = self.begun("key 0")
            self.servers[name].process.kill()
            killed = time.monotonic()
            try:
                text, _, by = story.result()
                raise Failed(f"{by} finished an answer after its end: {text == self.story}")
            except Cut as cut:
                text, why = cut.args
            check(0 < len(text) < len(self.story) and self.story.startswith(text), f"another text: {text!r}")
            wait(lambda: sum(begin > killed for begin, _ in load.done) > 20, "later requests are answered")
        late = [cut for begin, cut in load.cut if begin > killed]
        check(not late, f"no later request failed: {late[:3]}")
        return f"cut after {len(text)} characters ({why}); {len(load.cut)} others cut, later ones went to the other"

    def together(self, runs):
        """What functions return that run at the same time."""
        return [run.result() for run in [InBackground(run) for run in runs]]

    def steps(self, ports):
        """Seconds of steps while both servers are busy: by the number of answers, of a prompt's token, and what a
        request takes of a server besides, where the cores are shared with clients and the proxy. Each for seconds: a
        program that has slept gets more of a busy machine at first."""
        both, decode = list(self.ports.values()), []
        for n in (1, 2, 4, 8):
            runs = [lambda port=port: ask(port, "Hello", 480)[1] for port in both for _ in range(n)]
            used = self.together(runs)
            decode.append((n, statistics.mean(u["predicted_ms"] / u["predicted_n"] for u in used) / 1e3))

        def prompts(port):
            used = [ask(port, some_words(time.monotonic_ns(), 300), 2)[1] for _ in range(24)]
            return [u["prompt_ms"] / u["prompt_n"] / 1e3 for u in used]

        token = statistics.mean(sum(self.together([lambda port=port: prompts(port) for port in both]), []))

        def short(i):
            return [ask(ports[i % len(ports)], "Hello", 1)[1]["prompt_n"] for _ in range(24)]

        begin = time.monotonic()
        asked = sum(self.together([lambda i=i: short(i) for i in range(16)]), [])
        rest = 2 * (time.monotonic() - begin) / len(asked) - statistics.mean(asked) * token
        return decode, token, max(rest, 0.0)

    def loaded(self, routing, work, homes, warm, seconds):
        """Closed loops of clients, each of which picks one of the prefixes every time."""
        end, counted = time.monotonic() + warm + seconds, []

        def client(i):
            pick = random.Random(f"{routing} {i} {time.monotonic_ns()}")
            while time.monotonic() < end:
                prefix = pick.randrange(work["prefixes"])
                key = f"prefix {prefix}"
                words = f"{prefix} {some_words(prefix, self.args.words)} {some_words(pick.random(), 15)}"
                port = list(self.ports.values())[homes[prefix]] if routing == "direct" else self.port
                usage = ask(port, words, work["answer_tokens"], None if routing == "turns" else key)[1]
                counted.append((time.monotonic(), usage))

        self.together([lambda i=i: client(i) for i in range(work["clients"])])
        used = [usage for at, usage in counted if end - seconds <= at < end]
        return {
            "requests": len(used) / seconds,
            "tokens": sum(u["completion_tokens"] for u in used) / seconds,
            "prompt": statistics.mean(u["prompt_tokens"] for u in used),
            "hits": sum(cached(u) for u in used) / sum(u["prompt_tokens"] for u in used),
        }

    def load(self):
        """Measures steps before and after each load, and writes all that `tools/scale.py two` reads."""
        self.up()
        work = {"clients": 16, "prefixes": 24, "turn_tokens": 30, "answer_tokens": 32, "turns": 1, "think": 0.0}
        prefix = ask(self.ports["one"], f"0 {some_words(0, self.args.words)}", 1)[1]["prompt_tokens"]
        work |= {"prefix_tokens": prefix, "by_prefix": True}
        # Where keys go is the proxy's choice, which clients without it repeat; what follows from it is simulated.
        names, runs = list(self.ports), []
        placed = [names.index(self.ask("Hello", 1, f"prefix {i}")[2]) for i in range(work["prefixes"])]
        for turn in range(self.args.rounds):
            for routing in ("hash", "turns", "direct"):
                ports = list(self.ports.values()) if routing == "direct" else [self.port]
                before = self.steps(ports)
                homes = None if routing == "turns" else placed
                got = self.loaded(routing, work, homes, 4, self.args.seconds)
                after = self.steps(ports)
                mean = [statistics.mean(pair) for pair in zip(before[1:], after[1:])]
                decode = [(n, (a + b) / 2) for (n, a), (_, b) in zip(before[0], after[0])]
                run = {"routing": routing, "work": work | {"turn_tokens": round(got["prompt"] - prefix)}, **got}
                run |= {"decode": decode, "prompt_token": mean[0], "request": mean[1], "parallel": 8, "homes": homes}
                runs.append(run | {"cache_tokens": CACHE, "warm": 4, "seconds": self.args.seconds})
                print(f"{turn + 1}: {routing}: {got['tokens']:.0f} tokens/s, {got['requests']:.1f} requests/s, "
                      f"{got['hits']:.0%} of {got['prompt']:.0f} prompt tokens cached; steps "
                      f"{' '.join(f'{t * 1e3:.1f}' for _, t in decode)} ms, {mean[0] * 1e6:.0f} us a prompt's token, "
                      f"{mean[1] * 1e3:.1f} ms a request", flush=True)
        self.args.load.write_text(json.dumps({"runs": runs}, indent=1))

    def run(self):
        if self.args.load:
            self.load()
            return
        for step in [self.up, self.prefixes, self.without, self.drained, self.back, self.killed, self.back]:
            start = time.monotonic()
            said = step()
            print(f"held in {time.monotonic() - start:5.1f} s: {step.__doc__} {said or ''}", flush=True)

    def end(self):
        for process in [self.proxy, *self.servers.values()]:
            process.end()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("server", help="the program moebius")
    parser.add_argument("folder", type=Path, help="for logs")
    parser.add_argument("-m", "--model")
    parser.add_argument("--load", type=Path, help="measure, and write this file for tools/scale.py")
    parser.add_argument("--seconds", type=float, default=15, help="of each load")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--words", type=int, default=300, help="of a prefix under load")
    args, args.flags = parser.parse_known_args()
    if args.load:
        args.flags += ["--cache-tokens", str(CACHE)]
    args.folder.mkdir(parents=True, exist_ok=True)
    for log in args.folder.glob("*.log"):
        log.unlink()
    # What it started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    trial = Trial(args, args.folder)
    try:
        trial.run()
    except Exception as error:  # pylint: disable=broad-except
        print(f"did not hold: {type(error).__name__}: {error}\nlogs: {args.folder}", flush=True)
        return 1
    finally:
        trial.end()
    if not args.load:
        print("all held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
