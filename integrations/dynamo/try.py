"""What `try.sh` runs: a frontend and workers, what is asked of them, and what must come back. Standard library only."""

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

MODEL = "story"
# How the processes find each other, ask and tell: files, TCP and ZeroMQ unless others are named.
DISCOVERY, REQUESTS, EVENTS = os.environ.get("TRY_PLANES", "file tcp zmq").split()
PLANES = ["--discovery-backend", DISCOVERY, "--request-plane", REQUESTS, "--event-plane", EVENTS]
# Words that differ from prompt to prompt from the first on, so that no two share a page.
ANIMALS = ["fox", "owl", "bear", "hare", "mole", "crow", "wolf", "deer", "frog", "lynx", "swan", "toad"]


def free_port():
    """A port below 32768: Dynamo's runtime reads that of its metrics as a signed number of 16 bits."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class Process:
    """A program with its log."""

    def __init__(self, name, command, folder, more):
        self.name, self.log = name, folder / f"{name}.log"
        env = {**os.environ, "DYN_FILE_KV": str(folder / "discovery"), "HF_HUB_OFFLINE": "1", **more}
        self.process = subprocess.Popen(command, env=env, stdout=self.log.open("wb"), stderr=subprocess.STDOUT)

    def signal(self, which):
        self.process.send_signal(which)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


def get(port, path, timeout=10):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


class Worker(Process):
    """A worker; what it counts says what it has computed."""

    def __init__(self, name, program, model, folder, flags=()):
        self.port = free_port()
        more = {
            "DYN_SYSTEM_PORT": str(self.port),
            "DYN_SYSTEM_HOST": "127.0.0.1",
            # Dynamo's pause between leaving the list and the end. Without it answers finish before they are waited for.
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.2",
        }
        named = ["-m", model] if model else []
        engine = ["--backend", "cpu", "--threads", "1", "--ctx", "1024", "--parallel", "8", *flags]
        parser = ["--dyn-tool-call-parser", "hermes"]
        super().__init__(name, [program, *named, "--name", MODEL, *parser, *engine, *PLANES], folder, more)

    def ready(self):
        try:
            return get(self.port, "/health")[0] == 200
        except OSError:
            if self.process.poll() is not None:
                raise Failed(f"{self.name} ended with {self.process.returncode}: see {self.log}") from None
            return False

    def count(self, name):
        """A number among the worker's metrics."""
        text = get(self.port, "/metrics")[1]
        found = re.search(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
        check(found, f"{self.name} has a metric {name}")
        return float(found[1])


class Failed(Exception):
    """What did not hold."""


def check(holds, what):
    if not holds:
        raise Failed(what)


def wait(until, what, seconds=90):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if until():
            return
        time.sleep(0.1)
    raise Failed(f"not within {seconds} s: {what}")


class Frontend(Process):
    """Dynamo's frontend, and what clients say to it."""

    def __init__(self, python, folder, flags):
        self.port = free_port()
        command = [python, "-m", "dynamo.frontend", "--http-port", str(self.port), *PLANES, *flags]
        # What is known of a worker that has died is forgotten soon.
        super().__init__("frontend", command, folder, {"PYTHONUNBUFFERED": "1"})

    def models(self):
        try:
            return [model["id"] for model in json.loads(get(self.port, "/v1/models")[1])["data"]]
        except (OSError, ValueError):
            return []

    def ask(self, body, path="/v1/chat/completions", on_piece=None, timeout=120):
        """An answer's text, what it ended with, and its usage. A client sees an error as one, never as a text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        text, reason, usage, calls, thought = "", None, None, [], ""
        asked = {"model": MODEL, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise Refused(answer.status, answer.read().decode())
            event = None
            for line in answer:
                line = line.decode().strip()
                if line.startswith("event:"):
                    event = line[6:].strip()
                if event == "error" or line.startswith(": "):
                    if event == "error" and line.startswith((":", "data:")):
                        raise Refused(200, line)
                    continue
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                piece = json.loads(line[5:])
                if "error" in piece:
                    raise Refused(200, line)
                usage = piece.get("usage") or usage
                for choice in piece.get("choices", []):
                    delta = choice.get("delta", choice)
                    text += delta.get("content") or delta.get("text") or ""
                    thought += delta.get("reasoning_content") or ""
                    calls += delta.get("tool_calls") or []
                    reason = choice.get("finish_reason") or reason
                    if on_piece:
                        on_piece(text)
        return {"text": text, "reason": reason, "usage": usage or {}, "calls": calls, "thought": thought}


class Refused(Exception):
    """An error that the client was told."""


def chat(words, n, **more):
    return {"messages": [{"role": "user", "content": words}], "max_tokens": n, **more}


def cached(answer):
    return ((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")) or 0


def long_prompt(animal, i=0):
    return f"{animal.capitalize()} {i}. " + f"The {animal} walked into the forest and sat by the river. " * 12


def in_background(run):
    """Runs something on a thread; a function that waits for what it returned or raised."""
    box = {}

    def work():
        try:
            box["value"] = run()
        except Exception as error:  # pylint: disable=broad-except
            box["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def result(timeout=180):
        thread.join(timeout)
        check(not thread.is_alive(), "a request did not end")
        if "error" in box:
            raise box["error"]
        return box["value"]

    return result


def running(workers):
    """The workers that compute something now."""
    return [worker for worker in workers if worker.count("moebius_sequences_running") > 0]


class Trial:
    """The steps, each of which must hold."""

    def __init__(self, program, python, folder, model):
        self.program, self.folder, self.model = program, folder, model
        shutil.rmtree(folder / "discovery", ignore_errors=True)
        # How often an answer may go on elsewhere.
        often = os.environ.get("TRY_MIGRATIONS", "3")
        self.frontend = Frontend(python, folder, ["--router-mode", "kv", "--migration-limit", often])
        self.workers = [self.worker("one"), self.worker("two")]

    def worker(self, name):
        return Worker(name, self.program, self.model, self.folder, os.environ.get("TRY_FLAGS", "").split())

    def alive(self):
        return [worker for worker in self.workers if worker.process.poll() is None]

    def up(self):
        wait(lambda: all(worker.ready() for worker in self.workers), "both workers are healthy")
        wait(lambda: MODEL in self.frontend.models(), "the frontend lists the model")
        # The list says that there is one worker at least.
        wait(lambda: self.spread() == len(self.workers), "both workers get requests")

    def together(self, bodies):
        """Answers to requests that are made at the same time; the router spreads them, as each is load."""
        return [answer() for answer in [in_background(lambda body=body: self.frontend.ask(body)) for body in bodies]]

    def spread(self):
        """Workers that have computed something after a few requests of different prompts."""
        with contextlib.suppress(Refused):
            self.together(chat(f"{time.monotonic_ns()} {i}", 8) for i in range(4))
        return sum(worker.count("moebius_generated_tokens_total") > 0 for worker in self.alive())

    def answers(self):
        """Answers are the same from every worker, and end as asked."""
        first = self.frontend.ask(chat("Tell me a story about a fox", 40))
        check(first["text"] and first["usage"]["completion_tokens"] <= 40, f"an answer: {first}")
        for _ in range(4):
            again = self.frontend.ask(chat("Tell me a story about a fox", 40))
            check(again["text"] == first["text"], f"the same answer: {again['text']!r}, {first['text']!r}")
        word = first["text"].split()[2]
        cut = self.frontend.ask(chat("Tell me a story about a fox", 40, stop=[word]))
        check(cut["text"] == first["text"][: first["text"].index(word)], f"{cut['text']!r} ends before {word!r}")
        shape = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": shape, "strict": True}}
        held = self.frontend.ask(chat("How old is the fox?", 60, response_format=form))
        check(isinstance(json.loads(held["text"]).get("age"), int), f"JSON of its schema: {held['text']!r}")
        with_probabilities = chat("Hello", 3, logprobs=True, top_logprobs=2, stream=False)
        connection = http.client.HTTPConnection("127.0.0.1", self.frontend.port, timeout=60)
        with contextlib.closing(connection):
            body = {"model": MODEL, "temperature": 0, **with_probabilities}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            got = json.loads(connection.getresponse().read())
        content = got["choices"][0]["logprobs"]["content"]
        check(content and all(len(token["top_logprobs"]) == 2 for token in content), f"log-probabilities: {got}")
        try:
            self.frontend.ask(chat("Hello", 3, response_format={"type": "json_schema", "json_schema": {
                "name": "a", "schema": {"type": "object", "properties": {"a": {"type": "strange"}}}}}))
            raise Failed("a schema that is none was taken")
        except Refused as refused:
            check(refused.args[0] in (200, 400), f"a client's mistake is told as one: {refused}")
        return f"{len(first['text'])} characters, the same 5 times"

    def tools(self):
        """A tool that must be called is called, with arguments of its schema, by the frontend's parser."""
        city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
        tool = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": city}}
        choice = {"type": "function", "function": {"name": "weather"}}
        answer = self.frontend.ask(chat("How is the weather?", 60, tools=[tool], tool_choice=choice))
        called = "".join((call.get("function") or {}).get("name") or "" for call in answer["calls"])
        given = "".join((call.get("function") or {}).get("arguments") or "" for call in answer["calls"])
        check(called == "weather" and json.loads(given)["city"] in ("Rome", "Oslo"), f"a call: {answer}")
        return given

    def gone(self):
        """A client that leaves ends its answer."""

        class Left(Exception):
            pass

        def leave(text):
            if text:
                raise Left

        before = sum(worker.count("moebius_cancelled_total") for worker in self.workers)
        with contextlib.suppress(Left):
            self.frontend.ask(self.long_story(), on_piece=leave)
        start = time.monotonic()
        wait(lambda: not running(self.workers), "no worker computes for a client that has left", 5)
        took = time.monotonic() - start
        after = sum(worker.count("moebius_cancelled_total") for worker in self.workers)
        check(after == before + 1, f"one answer was cancelled: {before}, {after}")
        return f"nothing ran {took * 1000:.0f} ms later"

    def routing(self):
        """A repeated prefix is sent to the worker that has it."""
        # A second round after all of the first, so that each worker has several of them.
        before = {worker.name: worker.count("moebius_prompt_tokens_cached_total") for worker in self.workers}
        self.together(chat(long_prompt(animal), 8) for animal in ANIMALS)
        time.sleep(1)
        found = []
        for animal in ANIMALS:
            answer = self.frontend.ask(chat(long_prompt(animal), 1))
            found.append((cached(answer), answer["usage"]["prompt_tokens"]))
        check(all(hit >= (n - 1) // 32 * 32 for hit, n in found), f"cached tokens of prompts: {found}")
        both = [worker.count("moebius_prompt_tokens_cached_total") - before[worker.name] for worker in self.workers]
        check(all(n > 0 for n in both), f"both workers have prefixes: {both}")
        hits = sum(hit for hit, _ in found)
        return f"{hits} of {sum(n for _, n in found)} tokens of 12 repeated prompts found, {both} by worker"

    def long_story(self):
        return chat("Tell me a long story about a fox and an owl", 400, ignore_eos=True, min_tokens=400)

    def reference(self):
        """The whole text of a long answer, to compare with."""
        self.story = self.frontend.ask(self.long_story())["text"]
        check(len(self.story) > 200, f"a long story: {self.story!r}")
        return f"{len(self.story)} characters"

    def begun(self):
        """Starts the long answer; once it has some text, its worker and what waits for its end."""
        started = threading.Event()
        result = in_background(lambda: self.frontend.ask(self.long_story(), on_piece=lambda t: t and started.set()))
        check(started.wait(60), "an answer began")
        busy = running(self.alive())
        check(len(busy) == 1, f"one worker answers: {[worker.name for worker in busy]}")
        return busy[0], result

    def killed(self):
        """A worker is killed in the middle of an answer."""
        worker, result = self.begun()
        worker.signal(signal.SIGKILL)
        try:
            text = result()["text"]
            check(text == self.story, f"another text: {text!r}\nin place of {self.story!r}")
            outcome = "the answer went on elsewhere, to the same text"
        except (Refused, http.client.HTTPException, OSError) as error:
            outcome = f"the client got an error: {error}"
        worker.process.wait()

        def works():
            with contextlib.suppress(Refused):
                return self.frontend.ask(chat("Tell me a story about a fox", 8))["text"] != ""
            return False

        wait(works, "the other worker answers")
        return outcome

    def added(self):
        """A worker joins under load."""
        stop, errors, n = threading.Event(), [], [0]

        def load(seed):
            while not stop.is_set():
                try:
                    self.frontend.ask(chat(long_prompt(ANIMALS[seed], n[0]), 8))
                    n[0] += 1
                except Exception as error:  # pylint: disable=broad-except
                    errors.append(error)

        threads = [threading.Thread(target=load, args=(i,), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        new = self.worker("three")
        self.workers.append(new)
        try:
            wait(new.ready, "the new worker is healthy")
            wait(lambda: new.count("moebius_generated_tokens_total") > 20, "the new worker gets requests")
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        check(not errors, f"no request failed: {errors[:3]}")
        return f"{n[0]} requests meanwhile, none failed"

    def drained(self):
        """A worker is told to stop in the middle of an answer, and finishes it."""
        worker, result = self.begun()
        worker.signal(signal.SIGTERM)
        text = result()["text"]
        check(text == self.story, f"another text: {text!r}\nin place of {self.story!r}")
        code = worker.process.wait(60)
        check(code == 0, f"{worker.name} ended with {code}: see {worker.log}")
        log = worker.log.read_text(errors="replace")
        check("waiting for running answers" in log, "the worker waited for its answer")
        check("cutting them off" not in log, "the answer was finished, not cut off")
        after = self.frontend.ask(chat("Tell me a story about a fox", 8))
        check(after["text"] != "", "the other workers answer")
        return "its answer was complete, exit code 0"

    def run(self):
        steps = [self.up, self.answers, self.tools, self.gone, self.routing, self.reference, self.killed]
        steps += [self.added, self.drained]
        for step in steps:
            start = time.monotonic()
            said = step()
            about = (step.__doc__ or "The frontend and two workers are up.").strip()
            print(f"held in {time.monotonic() - start:5.1f} s: {about} {said or ''}", flush=True)

    def end(self):
        for process in [*self.workers, self.frontend]:
            process.end()


def main():
    program, python, folder, *model = sys.argv[1:]
    trial = Trial(program, python, Path(folder), model[0] if model else None)
    try:
        trial.run()
    except Exception as error:  # pylint: disable=broad-except
        print(f"did not hold: {type(error).__name__}: {error}\nlogs: {folder}", flush=True)
        return 1
    finally:
        trial.end()
    print("all held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
