#!/usr/bin/env python3
"""Moebius beside llama.cpp and ik_llama.cpp on this machine: one table, each engine in turn.

    tools/compare.py --build                          # builds llama.cpp from the Python registry's llama-cpp-python
    tools/compare.py MODEL.gguf                       # prompt 512, decode 64
    tools/compare.py MODEL.gguf -d 0,4096 -n 32       # at depths
    tools/compare.py MODEL.gguf -p 0 -n 32 --parallel 1,8,16   # sequences that decode together
    tools/compare.py --build --backend cuda && tools/compare.py MODEL.gguf --backend cuda -r 3   # on an NVIDIA GPU

Every round runs every engine once, each with all cores; figures are medians of the rounds. An engine with settings that
help some models and hurt others (repacking of weights) is measured with each, and ratios are to the better. Run nothing
else meanwhile.

--llama and --ik (or $LLAMA_CPP and $IK_LLAMA_CPP) are folders with llama-bench and llama-batched-bench; --build makes
the former. With --parallel every engine should take random tokens: sequences of one token choose the same experts, and
read fewer of them than others would.
"""
import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tarfile
import tempfile

# Runs of a program in a round: those on a GPU take less time than it takes to read the file.
RUNS = {"cpu": 1, "cuda": 5}
# Tokens of a prompt in a step.
BATCH = 2048
# Of llama.cpp: all layers on the GPU.
ON_GPU = ("-ngl", "99", "-fa", "on", "-b", str(BATCH), "-ub", str(BATCH))
ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = ROOT / "target" / "peers"
SDIST = "llama-cpp-python==0.3.36"


def built(backend):
    """Where `build` puts llama.cpp's programs."""
    return PEERS / ("llama.cpp" if backend == "cpu" else f"llama.cpp-{backend}") / "bin"


@dataclasses.dataclass(frozen=True)
class Test:
    """A prompt (`n_gen` 0) or a generation, behind `depth` tokens, of `parallel` sequences at once."""

    n_prompt: int
    n_gen: int
    depth: int
    parallel: int

    def __str__(self):
        name = f"prompt {self.n_prompt}" if self.n_prompt else f"decode {self.n_gen}"
        name += f" x {self.parallel}" if self.parallel > 1 else ""
        return name + (f" at depth {self.depth}" if self.depth else "")


def output(command, errors=subprocess.PIPE):
    # Some write a log into the working directory.
    cwd = tempfile.gettempdir()
    result = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=cwd)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{result.stdout[-2000:]}{(result.stderr or '')[-2000:]}")
    return result.stdout


class Moebius:
    name = "Moebius"

    def __init__(self, binary, backend):
        self.binary, self.backend = binary, backend
        self.settings = [()]

    def measure(self, model, test, threads, _):
        command = [self.binary, "bench", "-m", model, "-p", test.n_prompt, "-n", test.n_gen, "-d", test.depth]
        command += ["--parallel", test.parallel, "-t", threads, "-r", RUNS[self.backend], "-o", "jsonl"]
        command += ["--backend", self.backend] + (["-b", BATCH] if self.backend != "cpu" else [])
        return json.loads(output(command).splitlines()[-1])["tokens_per_second"]


class LlamaCpp:
    """llama.cpp and its fork, which differ in the names of their settings."""

    def __init__(self, name, folder, settings, has_depth, backend="cpu"):
        self.name, self.folder, self.settings, self.has_depth = name, folder, settings, has_depth
        self.backend = backend

    def measure(self, model, test, threads, setting):
        if test.parallel > 1:
            return self.batched(model, test, threads, setting)
        command = [self.folder / "llama-bench", "-m", model, "-p", test.n_prompt, "-n", test.n_gen, "-t", threads]
        command += ["-r", RUNS[self.backend], "-o", "json", *setting]
        if test.depth:
            if not self.has_depth:
                return None
            command += ["-d", test.depth]
        return json.loads(output(command))[-1]["avg_ts"]

    def batched(self, model, test, threads, setting):
        n_prompt = max(test.depth, 1)
        command = [self.folder / "llama-batched-bench", "-m", model, "-t", threads, "-npp", n_prompt]
        command += ["-ntg", test.n_gen, "-npl", test.parallel, "-c", test.parallel * (n_prompt + test.n_gen + 1)]
        # This program has other names for some settings of llama-bench, and none for others.
        names = {("--repack", "0"): ["--no-repack"], ("-rtr", "1"): ["-rtr"], ON_GPU: ON_GPU}
        command += names.get(tuple(setting), [])
        # One of the two prints its table to standard error.
        lines = output(command, errors=subprocess.STDOUT).splitlines()
        rows = [line for line in lines if line.startswith("|") and line.count("|") == 11]
        return float(rows[-1].split("|")[8])


def build(backend="cpu"):
    """llama.cpp from the registry's source distribution, native, into target/peers."""
    PEERS.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", PEERS, SDIST], check=True)
    (archive,) = PEERS.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(PEERS, filter="data")
    source = PEERS / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    flags = "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF"
    flags += " -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
    flags += " -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=native" if backend == "cuda" else ""
    folder = built(backend).parent
    subprocess.run(["cmake", "-S", source, "-B", folder, *flags.split()], check=True)
    targets = ["llama-bench", "llama-batched-bench"]
    subprocess.run(["cmake", "--build", folder, "-j", str(os.cpu_count()), "--target", *targets], check=True)


def engines(args):
    binary = args.moebius
    if not binary:
        subprocess.run(["cargo", "build", "--release", "--quiet", "--bin", "moebius"], cwd=ROOT, check=True)
        binary = ROOT / "target" / "release" / "moebius"
    found = [Moebius(binary, args.backend)]
    is_cpu = args.backend == "cpu"
    built_here = built(args.backend)
    llama = args.llama or os.environ.get("LLAMA_CPP") or (built_here if built_here.exists() else None)
    if llama:
        settings = [("--repack", "0"), ("--repack", "1")] if is_cpu else [ON_GPU]
        found.append(LlamaCpp("llama.cpp", pathlib.Path(llama).resolve(), settings, True, args.backend))
    if is_cpu and (ik := args.ik or os.environ.get("IK_LLAMA_CPP")):
        settings = [("-rtr", "0"), ("-rtr", "1")]
        found.append(LlamaCpp("ik_llama.cpp", pathlib.Path(ik).resolve(), settings, has_depth=False))
    if len(found) == 1:
        sys.exit("no other engine: give --llama or --ik, or run with --build first")
    return found


def numbers(text):
    return [int(n) for n in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("-p", "--n-prompt", type=numbers, default=[512])
    parser.add_argument("-n", "--n-gen", type=numbers, default=[64])
    parser.add_argument("-d", "--depth", type=numbers, default=[0])
    parser.add_argument("--parallel", type=numbers, default=[1])
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--backend", choices=RUNS, default="cpu")
    parser.add_argument("--moebius", type=pathlib.Path, help="binary; built when left out")
    parser.add_argument("--llama", help="folder with llama.cpp's llama-bench")
    parser.add_argument("--ik", help="folder with ik_llama.cpp's llama-bench")
    parser.add_argument("--build", action="store_true", help="build llama.cpp, measure nothing")
    args = parser.parse_args()
    if args.build:
        return build(args.backend)
    if not args.model:
        parser.error("MODEL is missing")
    args.model = pathlib.Path(args.model).resolve()
    found = engines(args)
    tests = [Test(n, 0, d, 1) for d in args.depth for n in args.n_prompt if n]
    tests += [Test(0, n, d, k) for d in args.depth for n in args.n_gen if n for k in args.parallel]
    speeds = {}
    for round_ in range(args.rounds):
        for test in tests:
            for engine in found:
                for setting in engine.settings:
                    speed = engine.measure(args.model, test, args.threads, setting)
                    if speed is not None:
                        speeds.setdefault((test, engine.name, " ".join(setting)), []).append(speed)
        print(f"round {round_ + 1} of {args.rounds}", file=sys.stderr)
    show(tests, found, speeds, args)


def show(tests, found, speeds, args):
    where = f"{args.threads} threads" if args.backend == "cpu" else args.backend
    print(f"{args.model.name}, {where}, medians of {args.rounds} (lowest to highest), tok/s\n")
    print("| test | engine | tok/s | | Moebius / it |\n|---|---|---:|---|---:|")
    for test in tests:
        ours = statistics.median(speeds[test, "Moebius", ""])
        for engine in found:
            rows = [(statistics.median(v), s, v) for (t, e, s), v in speeds.items() if (t, e) == (test, engine.name)]
            if not rows:
                continue
            median, setting, v = max(rows)
            ratio = "" if engine.name == "Moebius" else f"{ours / median:.2f}"
            print(f"| {test} | {engine.name} {setting} | {median:.1f} | {min(v):.1f} to {max(v):.1f} | {ratio} |")


if __name__ == "__main__":
    main()
