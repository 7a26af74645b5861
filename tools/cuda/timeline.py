#!/usr/bin/env python3
"""Times of a step's launches as they run, with what overlaps: from the end of a launch's wait for those before it to
the end of the next launch's wait.

    tools/cuda/timeline.py -- target/release/moebius bench -m MODEL --backend cuda -p 0 -n 900 --parallel 4 -r 1

A row for each launch (file and line of the wait, grid, threads of a block): how often it runs in a step, its mean and
median in microseconds, and their sum in a step. With --marks the places of `TRACE` in its first block are rows too.
Kernels of a copy of the tree's write the clock into memory that they share with the host; a step is from one merge of
picks to the next. The program should generate for two seconds or more. Needs Hopper or later, nvcc's headers, a C
compiler and NumPy. `kernel_times.py` times each launch alone.
"""
import argparse
import collections
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
WAIT = '#define PDL_WAIT() asm volatile("griddepcontrol.wait;" ::: "memory")'
TRACE = "#else\n#define TRACE(mark)\n"
# A record is the nanosecond and the launch, at a place that follows from the nanosecond, so that no thread waits for an
# atomic.
MARKED = '''
constexpr u32 timeline_hash(const char* s) {
    const char* name = s;
    for (; *s; s++) name = *s == '/' ? s + 1 : name;
    u32 hash = 5381;
    for (; *name; name++) hash = (hash * 33 + (unsigned char)*name) & 0xffff;
    return hash;
}
__device__ __forceinline__ void timeline_mark(u32 place) {
    if (threadIdx.x != 0 || blockIdx.x != 0 || blockIdx.y != 0 || blockIdx.z != 0) return;
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    u64* const to = (u64*)0x600000000000ull + 2 * (now >> 5 & 0xfffff);
    to[0] = now, to[1] = place | (u64)(gridDim.x & 0xffff) << 32 | (u64)blockDim.x << 48;
}
#define TIMELINE_MARK()                                                    \\
    do {                                                                   \\
        constexpr u32 file = timeline_hash(__FILE__);                      \\
        timeline_mark(file | (__LINE__ & 0xffff) << 16);                   \\
    } while (0)
#define PDL_WAIT()                                                         \\
    do {                                                                   \\
        asm volatile("griddepcontrol.wait;" ::: "memory");                 \\
        TIMELINE_MARK();                                                   \\
    } while (0)
'''
# Of records that are read, the last milliseconds.
RECENT_MS = 20


def file_hash(name):
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFF
    return value


def record(command, folder, has_marks):
    kernels = folder / "kernels"
    shutil.copytree(ROOT / "kernels", kernels)
    common = kernels / "cuda" / "common.h"
    text = common.read_text()
    if text.count(WAIT) != 1:
        sys.exit("kernels/cuda/common.h: the definition of PDL_WAIT is not the one that this replaces")
    if has_marks:
        if text.count(TRACE) != 1:
            sys.exit("kernels/cuda/common.h: the definition of TRACE is not the one that this replaces")
        text = text.replace(TRACE, TRACE.replace("(mark)", "(mark) TIMELINE_MARK()"))
    common.write_text(text.replace(WAIT, MARKED))
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    library, out = folder / "timeline.so", folder / "records"
    source = ROOT / "tools" / "cuda" / "timeline.c"
    build = ["cc", "-shared", "-fPIC", "-O1", "-I", f"{toolkit}/include", "-L", f"{toolkit}/lib64/stubs"]
    subprocess.run([*build, "-o", library, source, "-lcuda", "-lpthread"], check=True)
    env = {"CUDA_INJECTION64_PATH": library, "TIMELINE_OUT": out, "MOEBIUS_KERNELS": kernels}
    run = subprocess.run(command, env={**os.environ, **{name: str(value) for name, value in env.items()}})
    if run.returncode or not out.exists():
        sys.exit(f"{' '.join(command)}: ended with {run.returncode}" + ("" if out.exists() else " too early"))
    return np.fromfile(out, dtype=np.uint64).reshape(-1, 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="+", help="after --")
    parser.add_argument("--marks", action="store_true", help="rows for the places of TRACE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        marks = record(args.command, pathlib.Path(folder), args.marks)
    marks = marks[marks[:, 0] > 0]
    marks = marks[np.argsort(marks[:, 0])]
    marks = marks[marks[:, 0] + RECENT_MS * 1_000_000 > marks[-1, 0]] if len(marks) else marks
    names = {file_hash(file.name): file.name for file in (ROOT / "kernels").rglob("*") if file.is_file()}
    times, launches = marks[:, 0].astype(np.int64), [int(launch) for launch in marks[:, 1]]

    def parts(launch):
        return names.get(launch & 0xFFFF, "?"), launch >> 16 & 0xFFFF, launch >> 32 & 0xFFFF, launch >> 48

    # The merge of picks has a block a row; the picks before it have more.
    ends = {launch for launch in launches if parts(launch)[0] == "pick.cu"}
    ends = {launch for launch in ends if parts(launch)[1] == max(parts(end)[1] for end in ends)}
    if not ends:
        sys.exit("no step among the records")
    end = max(ends, key=lambda launch: parts(launch)[2])
    steps = [i for i, launch in enumerate(launches) if launch == end]
    if len(steps) < 2:
        sys.exit("no whole step among the records: let the program generate for longer")
    found = collections.OrderedDict()
    for i in range(steps[0], steps[-1]):
        found.setdefault(launches[i], []).append((times[i + 1] - times[i]) / 1e3)
    n = len(steps) - 1
    print(f"{n} steps, {(times[steps[-1]] - times[steps[0]]) / n / 1e3:.0f} us each")
    print(f"{'launch':<24}{'grid':>7}{'block':>7}{'a step':>8}{'mean us':>9}{'median':>8}{'sum us':>9}")
    for launch, us in found.items():
        name, line, grid, block = parts(launch)
        place = f"{name}:{line}"
        numbers = f"{np.mean(us):>9.2f}{np.median(us):>8.2f}{sum(us) / n:>9.1f}"
        print(f"{place:<24}{grid:>7}{block:>7}{len(us) / n:>8.1f}{numbers}")


if __name__ == "__main__":
    main()
