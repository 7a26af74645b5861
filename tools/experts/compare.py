#!/usr/bin/env python3
"""A model larger than memory: Moebius beside llama.cpp and ik_llama.cpp, each held to a cgroup, in turn.

    tools/experts/compare.py WORK_FOLDER                 # everything; run as root, nothing else meanwhile
    tools/experts/compare.py WORK_FOLDER --only moebius  # one engine
    tools/experts/compare.py WORK_FOLDER --build         # builds the engines and makes the file, measures nothing

Makes a 48-layer file in the shape of Qwen3-30B-A3B (18.6 GB, `tools/make_shape.py --skew`), builds llama.cpp from the
Python registry's llama-cpp-python, and ik_llama.cpp where --ik-source names its sources. Every run starts with none of
the file in the page cache, in a memory cgroup of --cap bytes without swap (v1 or v2, whichever has the controller).
Decoding is warmed up by as many tokens as are measured; tokens are random.

The disk is measured like fio does it: eight threads read planes of random experts past the page cache. A run's bound is
the time that the disk takes for what Moebius had to read; its share of that bound stands in the table.

Needs: pip install gguf numpy cmake, a C++ compiler, 20 GB of disk.
"""
import argparse
import json
import mmap
import os
import pathlib
import random
import re
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
# Bytes of an expert's gate, up and down: Q4_K, Q4_K, Q4_K or Q6_K of 768 x 2048.
PLANES = [884_736, 884_736, 1_290_240]
READERS = 8
PREFETCH = "IK_PREFETCH"
CORES = len(os.sched_getaffinity(0))


class Group:
    """A memory cgroup of `cap` bytes without swap."""

    def __init__(self, cap):
        v2 = pathlib.Path("/sys/fs/cgroup")
        controllers = v2 / "cgroup.controllers"
        self.is_v2 = controllers.exists() and "memory" in controllers.read_text().split()
        self.path = (v2 if self.is_v2 else v2 / "memory") / f"moebius-compare-{os.getpid()}"
        if self.is_v2:
            (v2 / "cgroup.subtree_control").write_text("+memory")
        self.path.mkdir()
        if self.is_v2:
            self.write("memory.max", cap)
            self.write("memory.swap.max", 0, or_else=True)
        else:
            self.write("memory.limit_in_bytes", cap)
            self.write("memory.swappiness", 0, or_else=True)

    def write(self, name, value, or_else=False):
        try:
            (self.path / name).write_text(str(value))
        except OSError:
            if not or_else:
                raise

    def enter(self):
        self.write("cgroup.procs", os.getpid())

    def peak(self):
        """Most bytes charged, caches included, where the kernel counts them."""
        names = ["memory.peak"] if self.is_v2 else ["memory.max_usage_in_bytes"]
        found = [int((self.path / name).read_text()) for name in names if (self.path / name).exists()]
        return found[0] if found else None

    def close(self):
        for _ in range(100):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.1)


def drop(path):
    """Takes a file out of the page cache: pages that another group has read would cost this one nothing."""
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(path, seconds=8.0):
    """Bytes a second of direct reads of random planes by READERS threads."""
    drop(path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size, read, end = os.fstat(fd).st_size, [0] * READERS, time.monotonic() + seconds

    def reader(i):
        choose = random.Random(i)
        buffer = mmap.mmap(-1, 2 << 20)
        while time.monotonic() < end:
            length = choose.choice(PLANES) // 4096 * 4096
            at = choose.randrange(0, size - length) // 4096 * 4096
            read[i] += os.preadv(fd, [memoryview(buffer)[:length]], at)

    begin = time.monotonic()
    threads = [threading.Thread(target=reader, args=(i,)) for i in range(READERS)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    os.close(fd)
    return sum(read) / (time.monotonic() - begin)


def call(command, cap, model, limit, keep):
    """Runs a command in a group of its own; its output, errors and most bytes, or None where it ended badly."""
    drop(model)
    group = Group(cap)
    try:
        command = [str(part) for part in command]
        how = dict(capture_output=True, text=True, timeout=limit, preexec_fn=group.enter, cwd="/tmp")
        done = subprocess.run(command, **how)
        peak = group.peak()
    except subprocess.TimeoutExpired as slow:
        print(f"{command[0]}: longer than {limit} s", file=sys.stderr)
        with open(keep, "a") as log:
            log.write(f"{' '.join(command)}\nlonger than {limit} s\n{slow.stderr}\n")
        return None
    finally:
        group.close()
    with open(keep, "a") as log:
        log.write(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}\n")
    if done.returncode:
        print(f"{command[0]} failed: {done.stderr[-300:]}", file=sys.stderr)
        return None
    return done.stdout, done.stderr, peak


class Moebius:
    name = "Moebius"
    settings = [()]

    def __init__(self, binary, args):
        self.binary, self.args = binary, args

    def measure(self, model, n_prompt, n_gen, _):
        # What the process does not count as its own but its group does: page tables, buffers of the kernel.
        promise = self.args.cap - max(self.args.cap // 40, 100_000_000)
        command = [self.binary, "bench", "-m", model, "--backend", "cpu", "--memory", promise, "-t", CORES]
        # Random tokens, as llama-bench takes them: a model of random weights would repeat its best ones.
        command += ["-p", n_prompt, "-n", n_gen, "-r", 1, "--temp", 1, "-o", "jsonl"]
        found = call(command, self.args.cap, model, self.args.limit, self.args.log)
        if found is None:
            return None
        rate = json.loads(found[0].splitlines()[-1])["tokens_per_second"]
        units = {"B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
        line = next((l for l in found[1].splitlines() if l.startswith("experts:")), "")
        read = re.search(r"([\d.]+) (\w+) a token", line)
        note = re.sub(r"^experts: ", "", line)
        return rate, float(read[1]) * units[read[2]] if read else None, note, found[2]


class LlamaCpp:
    """llama-bench; a setting is flags, and `NAME=value` for its environment."""

    def __init__(self, name, binary, settings, args):
        self.name, self.binary, self.settings, self.args = name, binary, settings, args

    def measure(self, model, n_prompt, n_gen, setting):
        # A prompt reads every expert whatever is there; decoding begins with as many tokens as are measured.
        repetitions = 2 if n_gen else 1
        variables = [part for part in setting if "=" in part]
        command = ["env", *variables, self.binary, "-m", model, "-p", n_prompt, "-n", n_gen, "-t", CORES]
        command += ["-r", repetitions, "-o", "json", *[part for part in setting if part not in variables]]
        command += ["--no-warmup"] if self.has("--no-warmup") else ["-w", "0"]
        found = call(command, self.args.cap, model, self.args.limit, self.args.log)
        return (json.loads(found[0])[-1]["samples_ts"][-1], None, "", found[2]) if found else None

    def has(self, flag):
        return flag in subprocess.run([self.binary, "--help"], capture_output=True, text=True).stdout


def cmake(source, target, flags):
    """Builds llama-bench from sources, unless it is there."""
    binary = target / "bin" / "llama-bench"
    if not binary.exists():
        flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", *flags]
        subprocess.run(["cmake", "-S", source, "-B", target, *flags], check=True)
        subprocess.run(["cmake", "--build", target, "-j", str(CORES), "--target", "llama-bench"], check=True)
    return binary


def prefetch_by_variable(source):
    """ik_llama.cpp's --prefetch-experts is no flag of its llama-bench: here a variable of the environment sets it."""
    path = source / "src" / "llama.cpp"
    text = path.read_text()
    found = re.search(r"(/\*\.prefetch_experts +=\*/) false", text)
    if found:
        path.write_text(text.replace(found[0], f'{found[1]} getenv("{PREFETCH}") != nullptr'))


def engines(args):
    wanted = args.only.split(",")
    if "moebius" in wanted:
        binary = args.moebius
        if not binary:
            subprocess.run(["cargo", "build", "--release", "--quiet", "--bin", "moebius"], cwd=ROOT, check=True)
            binary = ROOT / "target" / "release" / "moebius"
        yield Moebius(binary, args)
    if "llama" in wanted:
        binary = args.llama
        if not binary:
            import compare

            folder = compare.built("cpu")
            if not folder.exists():
                compare.build()
            binary = folder / "llama-bench"
        engine = LlamaCpp("llama.cpp", binary, [], args)
        # Repacked weights are copies, which the group does not hold.
        mapped = ("-lm", "mmap") if engine.has("--load-mode") else ("-mmp", "1")
        engine.settings = [(*mapped, "--repack", "0")]
        yield engine
    if "ik" in wanted and (args.ik or args.ik_source):
        off = ["-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_CURL=OFF"]
        if args.ik_source:
            prefetch_by_variable(args.ik_source)
        binary = args.ik or cmake(args.ik_source, args.folder / "ik_llama.cpp", off)
        engine = LlamaCpp("ik_llama.cpp", binary, [("-fmoe", "1")], args)
        # Its other way with files larger than memory: pages of experts come when they are touched.
        engine.settings += [("-fmoe", "1", "--defer-experts")] if engine.has("--defer-experts") else []
        engine.settings += [("-fmoe", "1", f"{PREFETCH}=1")]
        yield engine


def shape(args, skew, routers_only):
    command = [sys.executable, ROOT / "tools" / "make_shape.py", "--layers", args.layers, "--out", args.model]
    command += ["--skew", skew] + (["--routers-only"] if routers_only else [])
    subprocess.run([str(part) for part in command], check=True)
    os.sync()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="for the file, the builds and the log")
    parser.add_argument("--cap", type=int, default=6_000_000_000, help="bytes of the group")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--skews", default="0,0.5", help="uniform routing, and the top quarter with 60%% of the tokens")
    parser.add_argument("-n", "--n-gen", type=int, default=16)
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("--limit", type=int, default=900, help="seconds of a run")
    parser.add_argument("--only", default="moebius,llama,ik")
    parser.add_argument("--moebius", type=pathlib.Path, help="binary; built when left out")
    parser.add_argument("--llama", type=pathlib.Path, help="llama-bench of llama.cpp; built when left out")
    parser.add_argument("--ik", type=pathlib.Path, help="llama-bench of ik_llama.cpp")
    parser.add_argument("--ik-source", type=pathlib.Path, help="sources of ik_llama.cpp, to be built")
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leave the file there")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.model, args.log = args.folder / f"shape-{args.layers}.gguf", args.folder / "compare.log"
    found = list(engines(args))
    skews = [float(skew) for skew in args.skews.split(",")]
    if not args.model.exists():
        shape(args, skews[0], routers_only=False)
    if args.build:
        return
    cases = [(name, p, n) for name, p, n in [("decode", 0, args.n_gen), ("prompt", args.n_prompt, 0)] if p + n]
    rows, disks = [], []
    for skew in skews:
        shape(args, skew, routers_only=True)
        for name, n_prompt, n_gen in cases:
            disks.append(disk(args.model))
            best = {}
            for engine in found:
                runs = [engine.measure(args.model, n_prompt, n_gen, setting) for setting in engine.settings]
                runs = [run for run in runs if run]
                if runs:
                    best[engine.name] = max(runs, key=lambda run: run[0])
                print(f"{time.strftime('%T')} skew {skew} {name} {engine.name}: {runs}", file=sys.stderr)
            rows.append((skew, name, n_prompt + n_gen, best))
            show(args, rows, disks)
    if not args.keep:
        args.model.unlink()


def show(args, rows, disks):
    speed = sum(disks) / len(disks)
    size = args.model.stat().st_size / 1e9
    spread = f"{min(disks) / 1e9:.2f} to {max(disks) / 1e9:.2f}"
    print(f"\n{size:.1f} GB in a group of {args.cap / 1e9:.1f} GB, {CORES} threads; disk {spread} GB/s\n")
    print("| routing | work | engine | tok/s | Moebius / it | of the disk's bound | most GB of the group | notes |")
    print("|---|---|---|---:|---:|---:|---:|---|")
    for skew, name, n, best in rows:
        ours = best.get("Moebius")
        for engine, (rate, read, note, peak) in best.items():
            ratio = f"{ours[0] / rate:.2f}" if ours and engine != "Moebius" else ""
            bound = f"{rate * read / speed:.0%}" if read else ""
            peak = f"{peak / 1e9:.2f}" if peak else ""
            routing = "uniform" if skew == 0 else f"skew {skew}"
            print(f"| {routing} | {name} {n} | {engine} | {rate:.2f} | {ratio} | {bound} | {peak} | {note} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
