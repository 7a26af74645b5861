#!/usr/bin/env python3
"""Multiple choice of lm-eval against the server, checked against `moebius logits`.

    python3 -m venv venv && venv/bin/pip install 'lm-eval[api]==0.4.13' safetensors numpy    # 760 MB
    venv/bin/python tools/lm_eval.py target/release/moebius [-m MODEL]

It starts a server, has lm-eval's local-completions score the choices of a task in a local file (tokens come from the
server too), and computes each choice's log-likelihood from the logits of the command line. It fails where they differ
by more than 1e-4, or where the accuracy is another one.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.request

import numpy
from safetensors.numpy import load_file

# Question, choices, the right one.
ROWS = [
    ("Once upon a time there was a fox who lost his", ["hat", "seventeen", "of the"], 0),
    ("The sky is blue and the grass is", ["never", "green", "Monday"], 1),
    ("Two plus two is", ["four", "a big brown bear", "running"], 0),
    ("At night the moon shines and children go to", ["eleven", "quickly", "sleep"], 2),
    ("The capital of France is", ["Paris", "a spoon", "walked"], 0),
    ("A dog says", ["meow meow", "woof", "the end of all"], 1),
    ("When it rains you take an", ["umbrella", "apples tree house", "because"], 0),
    ("Cows give us", ["stones", "milk", "and then"], 1),
]
TASK = """\
task: choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: gold
doc_to_choice: choices
metric_list:
  - metric: acc
metadata:
  version: 1
"""


def main():
    program, model = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        rows = [{"question": q, "choices": c, "gold": g} for q, c, g in ROWS]
        data = folder / "choices.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "choices.yaml").write_text(TASK.format(file=data))
        server = subprocess.Popen([program, "serve", "--port", "0", "--ctx", "1024", *model], stdout=subprocess.PIPE, text=True)
        try:
            address = re.search(r"http://\S+", server.stdout.readline()).group()
            samples, accuracy = evaluate(folder, address)
            worst, expected = check(folder, program, model, address, samples)
        finally:
            server.terminate()
            server.wait()
    print(f"{len(ROWS)} questions: accuracy {accuracy} by lm-eval, {expected} by logits; likelihoods differ by {worst:.1e}")
    sys.exit(worst > 1e-4 or accuracy != expected)


def evaluate(folder, address):
    """Log-likelihoods of all choices, question by question, and the accuracy, as lm-eval finds them."""
    arguments = f"model=moebius,base_url={address}/v1/completions,tokenizer_backend=remote,num_concurrent=2,max_length=1024"
    command = [str(pathlib.Path(sys.executable).parent / "lm_eval"), "--model", "local-completions"]
    command += ["--model_args", arguments, "--tasks", "choices", "--include_path", str(folder)]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    subprocess.run(command, check=True)
    (file,) = (folder / "out").rglob("samples_choices_*.jsonl")
    (results,) = (folder / "out").rglob("results_*.json")
    samples = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda s: s["doc_id"])
    accuracy = json.loads(results.read_text())["results"]["choices"]["acc,none"]
    return [[float(reply[0][0]) for reply in sample["resps"]] for sample in samples], accuracy


def check(folder, program, model, address, samples):
    """The largest difference of a likelihood from the one by `moebius logits`, and the accuracy by those."""
    worst, right = 0.0, 0
    for (question, choices, gold), told in zip(ROWS, samples, strict=True):
        start, found = len(tokens(address, question)), []
        for choice, likelihood in zip(choices, told, strict=True):
            ids = tokens(address, f"{question} {choice}")
            out = folder / "logits.safetensors"
            command = [program, "logits", *model, "--tokens", ",".join(map(str, ids)), "-o", str(out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            logits = load_file(out)["logits"].astype(numpy.float64)
            top = logits.max(axis=1, keepdims=True)
            likelihoods = logits - top - numpy.log(numpy.exp(logits - top).sum(axis=1, keepdims=True))
            found.append(sum(likelihoods[i - 1, ids[i]] for i in range(start, len(ids))))
            worst = max(worst, abs(found[-1] - likelihood))
        right += int(numpy.argmax(found) == gold)
    return worst, right / len(ROWS)


def tokens(address, text):
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(f"{address}/tokenize", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["tokens"]


main()
