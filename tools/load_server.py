#!/usr/bin/env python3
"""Loads a server with many streaming clients and says how it held up. Needs Python 3.11 and nothing else.

  tools/load_server.py hold --server target/release/moebius [--clients 64] [--seconds 120] [-m MODEL.gguf]
      Clients request answers of mixed lengths, all streamed; some leave half way. Every completed text must be the one that
      the same request gets alone. Prints a table: requests, tokens per second, time between tokens, memory. Exits with
      failure when a text differs, a request fails, or pages stay in use.
      With --backend cuda bits depend on a step's other sequences, so answers are greedy and the CPU judges each text: how
      far the log-probability of a token is below that of the CPU's best one. A near tie costs little; a token out of
      another's context costs much. Exits with failure where one is further below than JUDGED.

  tools/load_server.py siege --server target/release/moebius [--clients 16] [--seconds 120] [--cores N] [--only WORD]
                         [-m MODEL.gguf]
      Honest clients alone for a fifth of the time, then with attackers beside them: slow bodies, JSON bombs, clients
      that never read, hostile schemas and grammars, cancelled streams. Attackers are a process of their own, so that
      what they do does not delay the clock of the honest ones; with --cores the server has the first N cores and the
      clients have the others. Exits with failure when an honest text differs from its solo run, an honest request
      fails, pages stay in use, or the process keeps more than 100 MB.

  tools/load_server.py compare --server target/release/moebius --llama llama-server -m MODEL.gguf [--clients 1,4,16]
      Tokens per second of both servers for several numbers of clients, in turn: the same requests, greedy, of one length.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request

STORIES = ["a fox who lost his hat", "a small boat", "two birds", "the moon", "an old clock", "a bear in the snow"]


# The most that a token of a GPU's greedy text may be below the CPU's best, in nats: it is a near tie, or a wrong text.
JUDGED = 1.0


def body(seed: int, n_tokens: int, long: bool, greedy: bool, temperature: float | None = None) -> dict:
    text = f"Tell me a story about {STORIES[seed % len(STORIES)]}"
    if long:
        text = "Once there was a wood, and in the wood a house. " * 12 + text
    fields = {"messages": [{"role": "user", "content": text}], "max_tokens": n_tokens, "stream": True, "seed": seed}
    fields |= {"stream_options": {"include_usage": True}, "ignore_eos": greedy}
    temperature = 0 if greedy else temperature
    return fields | ({} if temperature is None else {"temperature": temperature})


class Answer:
    def __init__(self):
        self.text, self.gaps, self.first, self.tokens, self.finish, self.error = "", [], None, 0, None, None


async def ask(port: int, fields: dict, leave_after: int | None = None) -> Answer:
    """One streamed request over a new connection; leaves after a number of pieces of text."""
    answer, start, last = Answer(), time.monotonic(), None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(fields).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        status = (await reader.readline()).split()
        if status[1:2] != [b"200"]:
            answer.error = (await reader.read()).decode(errors="replace")[-300:]
            return answer
        pieces = 0
        while line := await reader.readline():
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = str(event["error"])
                return answer
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
            for choice in event.get("choices", []):
                answer.finish = choice.get("finish_reason") or answer.finish
                if text := choice["delta"].get("content"):
                    now = time.monotonic()
                    if last is None:
                        answer.first = now - start
                    else:
                        answer.gaps.append(now - last)
                    last, answer.text, pieces = now, answer.text + text, pieces + 1
                    if pieces == leave_after:
                        return answer
        if answer.finish is None:
            answer.error = "the stream ended without an end"
        return answer
    finally:
        writer.close()


class Server:
    """A server process; ready when its health says so."""

    def __init__(self, command: list[str], port: int, cores: int = 0):
        self.port = port
        every = sorted(os.sched_getaffinity(0))
        if cores:
            os.sched_setaffinity(0, every[:cores])
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if cores:
            os.sched_setaffinity(0, every[cores:])
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                return
            except OSError:
                if self.process.poll() is not None:
                    sys.exit(f"{command[0]} ended with {self.process.returncode}")
                time.sleep(0.1)
        sys.exit(f"{command[0]} is not ready after a minute")

    def memory_mb(self) -> float:
        """Resident memory."""
        with open(f"/proc/{self.process.pid}/status") as status:
            row = next(row for row in status if row.startswith("VmRSS"))
        return int(row.split()[1]) / 1000

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as reply:
            rows = reply.read().decode().splitlines()
        return next(float(row.split()[-1]) for row in rows if row.startswith(name))

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


class Card:
    """What a GPU's memory holds, asked once a second while the server runs; nothing where no GPU computes."""

    def __init__(self, is_there: bool):
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop=1"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if is_there else None

    def stop(self) -> list[int]:
        """MiB, in their order."""
        if self.process is None:
            return []
        self.process.terminate()
        return [int(line) for line in self.process.communicate()[0].split() if line.isdigit()]


def moebius(args, port: int, parallel: int) -> Server:
    command = [args.server, "serve", "--port", str(port), "--parallel", str(parallel), "--max-queue", "256"]
    command += ["--backend", args.backend] if args.backend else []
    command += (["-m", args.model] if args.model else []) + ["--ctx", "1024", "--log-level", "error"]
    return Server(command + (["--threads", str(args.cores)] if args.cores else []), port, args.cores)


def share(values: list[float], q: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))] if values else float("nan")


def judge(args, texts: list[tuple[dict, str]]) -> list[float]:
    """How far each text's worst token is below the CPU's best one in its place."""
    server = Server([args.server, "serve", "--port", str(args.port), "--backend", "cpu", "--ctx", "1024", "--log-level",
                     "error"] + (["-m", args.model] if args.model else []), args.port)

    def call(path: str, fields: dict) -> dict:
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{args.port}{path}", json.dumps(fields).encode(), head)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    worst = []
    for fields, text in texts:
        prompt = call("/apply-template", {"messages": fields["messages"]})["prompt"]
        scored = {"prompt": prompt + text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        found = call("/v1/completions", scored)["choices"][0]["logprobs"]
        rows = zip(found["text_offset"], found["token_logprobs"], found["top_logprobs"])
        # Behind the prompt, without the token that is generated.
        ours = [row for row in rows if len(prompt) <= row[0] < len(prompt) + len(text)]
        worst.append(max((max(best.values()) - own for _, own, best in ours), default=0.0))
    server.stop()
    return worst


async def hold(args) -> int:
    server = moebius(args, args.port, args.parallel)
    kinds = [(seed, [8, 24, 64, 160][seed % 4], seed % 3 == 0) for seed in range(24)]
    judged = args.backend not in (None, "cpu")
    want = {seed: body(seed, n_tokens, long, False, 0 if judged else None) for seed, n_tokens, long in kinds}
    alone, texts = {}, set()
    for seed, fields in want.items():
        alone[seed] = (await ask(server.port, fields)).text
    before, memory = server.memory_mb(), []
    done, left, wrong, failed, gaps, firsts, tokens = 0, 0, 0, [], [], [], 0
    end = time.monotonic() + args.seconds

    async def client(i: int):
        nonlocal done, left, wrong, tokens
        dice = random.Random(i)
        while time.monotonic() < end:
            seed, n_tokens, _ = dice.choice(kinds)
            leave = dice.randint(1, max(1, n_tokens // 2)) if dice.random() < 0.2 else None
            answer = await ask(server.port, want[seed], leave)
            if answer.error:
                failed.append(answer.error)
            elif answer.finish is None:
                left += 1
            else:
                texts.add((seed, answer.text))
                done += 1
                tokens += answer.tokens
                wrong += answer.text != alone[seed]
                firsts.append(answer.first or 0.0)
            gaps.extend(answer.gaps)

    async def watch():
        while time.monotonic() < end:
            memory.append(server.memory_mb())
            await asyncio.sleep(1)

    start, card = time.monotonic(), Card(judged)
    await asyncio.gather(watch(), *(client(i) for i in range(args.clients)))
    card = card.stop()
    elapsed = time.monotonic() - start
    for _ in range(100):
        if (used := server.metric('moebius_kv_pages{state="used"}')) == 0:
            break
        await asyncio.sleep(0.1)
    after = server.memory_mb()
    server.stop()
    quarter = len(memory) // 4
    rows = [
        ("clients", args.clients),
        ("seconds", f"{elapsed:.0f}"),
        ("answers completed", done),
        ("of them unlike the answer alone", wrong),
        ("clients that left", left),
        ("failures", len(failed)),
        ("tokens per second, completed answers", f"{tokens / elapsed:.0f}"),
        ("time to first text, median / p99, ms", f"{share(firsts, 0.5) * 1e3:.0f} / {share(firsts, 0.99) * 1e3:.0f}"),
        ("between texts, median / p99, ms", f"{share(gaps, 0.5) * 1e3:.0f} / {share(gaps, 0.99) * 1e3:.0f}"),
        ("memory before / first quarter / last quarter / after, MB",
         f"{before:.0f} / {statistics.mean(memory[:quarter] or memory):.0f} / "
         f"{statistics.mean(memory[-quarter:] or memory):.0f} / {after:.0f}"),
        ("pages in use at the end", int(used)),
    ]
    if card:
        rows.append(("memory of the GPU first / at least / most / last, MiB",
                     f"{card[0]} / {min(card)} / {max(card)} / {card[-1]}"))
    print("| | |\n|---|---:|")
    for name, value in rows:
        print(f"| {name} | {value} |", flush=True)
    below = 0.0
    if judged:
        ours = judge(args, [(want[seed], text) for seed, text in alone.items()])
        some = sorted(texts)[:: len(texts) // args.judged + 1]
        theirs = judge(args, [(want[seed], text) for seed, text in some])
        below = max(ours + theirs)
        print(f"| worst token below the CPU's best, nats: most of {len(ours)} texts alone / median, 99%, most of "
              f"{len(theirs)} different texts in company | "
              f"{max(ours):.2f} / {share(theirs, 0.5):.2f}, {share(theirs, 0.99):.2f}, {max(theirs):.2f} |")
    for error in failed[:3]:
        print(error, file=sys.stderr)
    return int(bool(wrong and not judged or failed or used or below > JUDGED))


def post(path: str, data: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data) if length is None else length}\r\n\r\n".encode() + data


class Siege:
    """Attackers, each a loop until the time is over. Counts what they were told."""

    def __init__(self, port: int, end: float, only: str):
        self.port, self.end, self.only, self.told = port, end, only, {}

    @staticmethod
    def run(port: int, end: float, only: str, told: multiprocessing.Queue):
        """All of them, in a process of their own. `end` is a time of the monotonic clock, which processes share."""
        storm = Siege(port, end, only)

        async def attack():
            await asyncio.gather(*storm.attackers())

        asyncio.run(attack())
        told.put(storm.told)

    async def attack(self, name: str, request: bytes, wait: float, drip: bytes = b"", read: bool = True):
        """Sends a request, drips bytes after it, reads for a while, leaves; then again."""
        dice = random.Random(name)
        while self.only in name and time.monotonic() < self.end:
            said = "nothing"
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 16)
                writer.write(request)
                leave = min(time.monotonic() + wait * dice.uniform(0.7, 1.3), self.end)
                while (left := leave - time.monotonic()) > 0:
                    if read:
                        try:
                            data = await asyncio.wait_for(reader.read(1 << 16), min(1.0, left))
                            said = data[9:12].decode() if said == "nothing" and data else said
                            if not data:
                                break
                        except TimeoutError:
                            pass
                    else:
                        await asyncio.sleep(min(1.0, left))
                    if drip:
                        writer.write(drip)
                writer.transport.abort()
            except OSError:
                said = "closed"
            counts = self.told.setdefault(name, {})
            counts[said] = counts.get(said, 0) + 1
            await asyncio.sleep(0.05)

    def attackers(self):
        chat = {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 400, "ignore_eos": True}
        path = "/v1/chat/completions"

        def body(more: dict) -> bytes:
            return json.dumps(chat | more).encode()

        def bomb(field: str) -> bytes:
            return b'{"%s":[' % field.encode() + b'{"":0},' * 1_100_000 + b"0]," + body({"max_tokens": 8})[1:]

        def schema(value: dict) -> bytes:
            return body({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}})

        patterns = [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrstuvwxyz"]
        multiple = {"type": "integer", "multipleOf": 99_991}
        lark = 'start: e\ne: e e | e e e | /[a-z ]/ | ""'
        text = json.dumps({"content": "a fox " * 700_000}).encode()
        for _ in range(40):
            yield self.attack("slow bodies", post("/tokenize", b'{"x": "', 8 << 20), 30, drip=b"y")
        for _ in range(2):
            yield self.attack("bombs, skipped", post(path, bomb("x")), 3)
            yield self.attack("bombs, refused", post(path, bomb("tools")), 3)
            yield self.attack("never read, lists", post("/tokenize", text), 20, read=False)
            yield self.attack("never read, streams", post(path, body({"stream": True})), 20, read=False)
            yield self.attack("cancelled streams", post(path, body({"stream": True})), 0.3)
        numbers = body({"logprobs": True, "top_logprobs": 20})
        ambiguous = body({"grammar": lark, "temperature": 2, "stream": True})
        yield self.attack("never read, numbers", post(path, numbers), 20, read=False)
        yield self.attack("schemas, refused", post(path, schema({"allOf": patterns})), 5)
        yield self.attack("schemas, costly", post(path, schema({"allOf": patterns[:8]})), 12)
        yield self.attack("schemas, multiples", post(path, schema(multiple)), 12)
        yield self.attack("grammars, ambiguous", post(path, ambiguous), 12)
        yield self.attack("half a head", b"GET /health HTTP/1.1\r\nHost: local", 30)


async def siege(args) -> int:
    server = moebius(args, args.port, 32)
    kinds = [(seed, [8, 24, 64, 160][seed % 4], seed % 3 == 0) for seed in range(24)]
    alone = {}
    for seed, n_tokens, long in kinds:
        alone[seed] = (await ask(server.port, body(seed, n_tokens, long, False))).text
    wrong, failed, memory = 0, [], []

    async def client(i: int, end: float, gaps: list, firsts: list):
        nonlocal wrong
        dice = random.Random(i)
        while time.monotonic() < end:
            seed, n_tokens, long = dice.choice(kinds)
            answer = await ask(server.port, body(seed, n_tokens, long, False))
            if answer.error:
                failed.append(answer.error)
            wrong += answer.error is None and answer.text != alone[seed]
            firsts.append(answer.first or 0.0)
            gaps.extend(answer.gaps)

    async def watch(end: float):
        while time.monotonic() < end:
            memory.append(server.memory_mb())
            await asyncio.sleep(0.2)

    # The cache fills with what nobody asks for again, so that its pages are resident before memory is measured.
    for i in range(400):
        if server.metric('moebius_kv_pages{state="free"}') == 0:
            break
        await ask(server.port, body(0, 1, True, False) | {"messages": [{"role": "user", "content": f"{i} fox " * 220}]})
    calm, calm_first, pressed, pressed_first = [], [], [], []
    end = time.monotonic() + args.seconds / 5
    await asyncio.gather(*(client(i, end, calm, calm_first) for i in range(args.clients)))
    idle = server.memory_mb()
    end = time.monotonic() + args.seconds * 4 / 5
    processes = multiprocessing.get_context("spawn")
    answers = processes.Queue()
    attackers = processes.Process(target=Siege.run, args=(server.port, end, args.only, answers))
    attackers.start()
    await asyncio.gather(watch(end), *(client(i, end, pressed, pressed_first) for i in range(args.clients)))
    told_all = await asyncio.to_thread(answers.get, timeout=60)
    attackers.join()
    for _ in range(300):
        used, after = server.metric('moebius_kv_pages{state="used"}'), server.memory_mb()
        if used == 0 and after < idle + 100:
            break
        await asyncio.sleep(0.1)
    last = await ask(server.port, body(*kinds[0], False))
    wrong += last.text != alone[kinds[0][0]]
    server.stop()

    def ms(values: list[float]) -> str:
        return f"{share(values, 0.5) * 1e3:.0f} / {share(values, 0.99) * 1e3:.0f} / {max(values, default=0) * 1e3:.0f}"

    rows = [
        ("honest clients", args.clients),
        ("honest answers, alone / under siege", f"{len(calm_first)} / {len(pressed_first)}"),
        ("of them unlike the answer alone", wrong),
        ("of them failed", len(failed)),
        ("between texts alone, median / p99 / max, ms", ms(calm)),
        ("between texts under siege, median / p99 / max, ms", ms(pressed)),
        ("to the first text alone, median / p99 / max, ms", ms(calm_first)),
        ("to the first text under siege, median / p99 / max, ms", ms(pressed_first)),
        ("memory before / at most / after, MB", f"{idle:.0f} / {max(memory):.0f} / {after:.0f}"),
        ("pages in use at the end", int(used)),
    ]
    for name, told in told_all.items():
        rows.append((f"attack: {name}", ", ".join(f"{n} x {said}" for said, n in told.items())))
    print("| | |\n|---|---:|")
    for name, value in rows:
        print(f"| {name} | {value} |")
    for error in failed[:3]:
        print(error, file=sys.stderr)
    return int(bool(wrong or failed or used or after > idle + 100))


async def rate(port: int, n: int, n_tokens: int, rounds: int) -> float:
    """Tokens per second over all of `n` clients that each ask `rounds` times, one after the other."""
    tokens = 0

    async def client(i: int):
        nonlocal tokens
        for round_ in range(rounds):
            answer = await ask(port, body(i * 100 + round_, n_tokens, False, True))
            if answer.error:
                sys.exit(f"failed: {answer.error}")
            tokens += answer.tokens

    start = time.monotonic()
    await asyncio.gather(*(client(i) for i in range(n)))
    return tokens / (time.monotonic() - start)


async def compare(args) -> int:
    counts = [int(n) for n in args.clients_list.split(",")]
    most, threads = max(counts), str(args.threads)
    speeds: dict[tuple[str, int], list[float]] = {}
    for round_ in range(args.rounds):
        for name in ["moebius", "llama-server"]:
            if name == "moebius":
                server = moebius(args, args.port, most)
            else:
                command = [args.llama, "-m", args.model, "--port", str(args.port), "-np", str(most), "-t", threads]
                server = Server(command + ["-c", str(1024 * most), "-cb", "--no-warmup"], args.port)
            await rate(server.port, 1, 16, 1)
            for n in counts:
                speeds.setdefault((name, n), []).append(await rate(server.port, n, args.tokens, 2))
            server.stop()
        print(f"round {round_ + 1} of {args.rounds} done", file=sys.stderr)
    print("| clients | Moebius tok/s | llama-server tok/s | ratio |\n|---:|---:|---:|---:|")
    for n in counts:
        ours, theirs = statistics.median(speeds["moebius", n]), statistics.median(speeds["llama-server", n])
        print(f"| {n} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["hold", "siege", "compare"])
    parser.add_argument("--server", required=True, help="the moebius binary")
    parser.add_argument("--llama", help="the llama-server binary")
    parser.add_argument("-m", "--model", help="a GGUF file; the embedded model when left out")
    parser.add_argument("--backend", help="what computes; on a GPU bits depend on how many sequences a step has, so that "
                                          "hold counts texts unlike those alone and does not fail for them")
    parser.add_argument("--port", type=int, default=18090)
    parser.add_argument("--clients", default="64", help="hold and siege: how many; compare: a list")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--parallel", type=int, default=16, help="hold: answers that the server computes at a time")
    parser.add_argument("--judged", type=int, default=150, help="hold: texts in company that the CPU judges, about")
    parser.add_argument("--cores", type=int, default=0, help="hold and siege: the server's, clients take the others")
    parser.add_argument("--only", default="", help="siege: attackers whose names hold this word alone")
    parser.add_argument("--tokens", type=int, default=96, help="compare: tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.what != "compare":
        args.clients = int(args.clients)
        return asyncio.run(hold(args) if args.what == "hold" else siege(args))
    if not (args.llama and args.model):
        parser.error("compare needs --llama and --model")
    args.clients_list = args.clients if "," in args.clients else "1,4,16"
    return asyncio.run(compare(args))


if __name__ == "__main__":
    sys.exit(main())
