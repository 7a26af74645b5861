#!/usr/bin/env python3
"""What drafts gain on four workloads, as rows of a table: tokens per second with each --draft, and how many were right.

    tools/draft_gain.py [--program PROGRAM] [-m MODEL] [--drafts off,ngram,auto] [-n 300] [--rounds 5] [-t N]

A code edit, a JSON schema, prose, and random text. Kinds of drafts alternate, and each figure is the median of all
rounds; use a machine that does nothing else. A text that differs between kinds is an error: drafts change none (CPU).
"""
import argparse
import json
import pathlib
import re
import statistics
import subprocess
import tempfile

CODE = """
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("balance is too low")
        self.balance -= amount
        return self.balance
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 6,
            "maxItems": 6,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 20},
                    "age": {"type": "integer", "minimum": 1, "maximum": 99},
                    "friend": {"type": "string", "maxLength": 20},
                },
                "required": ["name", "age", "friend"],
            },
        }
    },
    "required": ["people"],
}
EDIT = f"Rename amount to value in this file and write the whole file again:\n{CODE}"
# Name, flags. Random text is drawn at a temperature at which nothing is likely.
WORKLOADS = [
    ("code edit", ["-p", EDIT, "--temp", "0"]),
    ("JSON schema", ["-p", "Six people and their friends, as JSON.", "--temp", "0", "--json-schema", "SCHEMA"]),
    ("prose", ["-p", "Tell me a story about a fox who wanted to fly.", "--temp", "0.7", "--seed", "1"]),
    ("random", ["--raw", "-p", "The", "--temp", "5", "--seed", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0"]),
]


def run(args, flags, draft, schema):
    line = [args.program, "run", *flags, "-n", str(args.n), "--draft", draft]
    line = [str(schema) if word == "SCHEMA" else word for word in line]
    line += ["-m", args.model] if args.model else []
    line += ["-t", str(args.threads)] if args.threads else []
    line += [] if "--json-schema" in flags else ["--ignore-eos"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    speed = re.search(r"answer: (\d+) tokens at ([\d.]+) tok/s", done.stderr)
    if speed is None:
        raise SystemExit(f"{' '.join(line)}: {done.stderr}")
    right = re.search(r"drafts: ([\d.]+)% of (\d+) accepted", done.stderr)
    return float(speed[2]), (float(right[1]), int(right[2])) if right else None, done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("--program", default=str(root / "target/release/moebius"))
    parser.add_argument("-m", "--model")
    parser.add_argument("--drafts", default="off,ngram,auto")
    parser.add_argument("-n", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int)
    args = parser.parse_args()
    drafts = args.drafts.split(",")
    print("| workload | " + " | ".join(f"{draft}, tok/s" for draft in drafts) + " |")
    print("|---|" + "---|" * len(drafts))
    with tempfile.TemporaryDirectory() as folder:
        schema = pathlib.Path(folder) / "schema.json"
        schema.write_text(json.dumps(SCHEMA))
        for name, flags in WORKLOADS:
            speeds, rights, texts = {draft: [] for draft in drafts}, {}, set()
            for _ in range(args.rounds):
                for draft in drafts:
                    speed, rights[draft], text = run(args, flags, draft, schema)
                    speeds[draft].append(speed)
                    texts.add(text)
            if len(texts) > 1:
                raise SystemExit(f"{name}: drafts changed the text")
            cells = []
            for draft in drafts:
                median, right = statistics.median(speeds[draft]), rights[draft]
                share = median / statistics.median(speeds[drafts[0]])
                told = f", {right[0]:.0f}% of {right[1]} right" if right else ""
                cells.append(f"{median:.1f} ({share:.2f}{told})")
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
