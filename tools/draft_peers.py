#!/usr/bin/env python3
"""Drafts of llama.cpp's server and of Moebius on the same file and the same workloads, as rows of a table.

    tools/draft_peers.py -m MODEL.gguf --llama PATH/llama-server [-t 16] [-n 300] [--rounds 5]

Each server answers `/completion` at temperature 0 for a code edit, a JSON schema and prose, the workloads of
draft_gain.py; cells are tokens per second as the server tells them, the median of all rounds, and the share of the
first column of the same program. Servers start one after the other. Use a machine that does nothing else.
Columns are `NAME=FLAGS`, of --ours and --theirs. Where the text differs from that of the same program's first column,
the cell says so. llama.cpp renames its flags now and then: `--theirs` has them.
"""
import argparse
import importlib.util
import json
import pathlib
import shlex
import socket
import statistics
import subprocess
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = ["off=--draft off", "ngram=--draft ngram", "auto=--draft auto"]
THEIRS = ["off=", *(f"{kind}=--spec-type {kind} --draft-max 8" for kind in ("ngram-simple", "ngram-mod"))]


def workloads():
    """Name, prompt and schema, of the texts in draft_gain.py."""
    spec = importlib.util.spec_from_file_location("draft_gain", ROOT / "tools" / "draft_gain.py")
    gain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gain)
    prompts = {name: flags[flags.index("-p") + 1] for name, flags in gain.WORKLOADS}
    yield "code edit", prompts["code edit"], None
    yield "JSON", prompts["JSON schema"], gain.SCHEMA
    yield "prose", prompts["prose"], None


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def post(port, path, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=1800) as answer:
        return json.load(answer)


def ready(port, process):
    for _ in range(1200):
        if process.poll() is not None:
            raise SystemExit(f"{shlex.join(process.args)} ended with {process.returncode}")
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"{shlex.join(process.args)} is not ready")


def answers(line, args):
    """Tokens per second and text of each workload, after a first answer that warms up."""
    port = free_port()
    process = subprocess.Popen([*line, "--host", "127.0.0.1", "--port", str(port)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ready(port, process)
        post(port, "/completion", {"prompt": "One", "n_predict": 16, "temperature": 0})
        for name, prompt, schema in workloads():
            body = {"prompt": prompt, "n_predict": args.n, "temperature": 0, "cache_prompt": False}
            body |= {"ignore_eos": True} if schema is None else {"json_schema": schema}
            found = post(port, "/completion", body)
            yield name, found["timings"]["predicted_per_second"], found["content"]
    finally:
        process.terminate()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--llama", required=True, help="llama-server")
    parser.add_argument("--moebius", default=str(ROOT / "target" / "release" / "moebius"))
    parser.add_argument("--ours", nargs="+", default=OURS)
    parser.add_argument("--theirs", nargs="+", default=THEIRS)
    parser.add_argument("-n", type=int, default=300)
    parser.add_argument("-c", type=int, default=2048)
    parser.add_argument("-t", "--threads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    same = ["-m", args.model, "-t", str(args.threads), "-c", str(args.c), "--parallel", "1"]
    columns = []
    for program, start, kinds in (("Moebius", [args.moebius, "serve"], args.ours),
                                  ("llama.cpp", [args.llama], args.theirs)):
        for kind in kinds:
            name, flags = kind.split("=", 1)
            columns.append((program, name, [*start, *same, *shlex.split(flags)]))
    speeds, texts = {}, {}
    for _ in range(args.rounds):
        for program, kind, line in columns:
            for work, speed, text in answers(line, args):
                speeds.setdefault((work, program, kind), []).append(speed)
                texts[work, program, kind] = text
    print("| workload | " + " | ".join(f"{program}, {kind}" for program, kind, _ in columns) + " |")
    print("|---|" + "---:|" * len(columns))
    first = {program: kind for program, kind, _ in reversed(columns)}
    for work, *_ in workloads():
        cells = []
        for program, kind, _ in columns:
            median = statistics.median(speeds[work, program, kind])
            share = median / statistics.median(speeds[work, program, first[program]])
            differs = texts[work, program, kind] != texts[work, program, first[program]]
            cells.append(f"{median:.1f} ({share:.2f}){', another text' if differs else ''}")
        print(f"| {work} | " + " | ".join(cells) + " |", flush=True)


main()
