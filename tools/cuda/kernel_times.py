#!/usr/bin/env python3
"""Times of a step's launches, each alone on the GPU: what `ncu` counts over a run of the program.

    tools/cuda/kernel_times.py -- target/release/moebius bench -m MODEL --backend cuda -p 0 -n 2 --parallel 64 -r 1
    tools/cuda/kernel_times.py --csv SAVED.csv

A row for each kernel, grid and number of registers (by which the types of weights differ), in the order in which they
are first seen: how often it ran, and medians of its microseconds, of cycles in which a scheduler issues, of warps in
percent of those that fit, and of megabytes from memory. Models of a few layers (`tools/make_shape.py --layers 6`) have
all kernels: `ncu` runs each launch several times and puts memory back in between. Needs Nsight Compute.
"""
import argparse
import csv
import statistics
import subprocess
import sys

METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "issue %": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1),
    "warps %": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "MB": ("dram__bytes.sum", 1e-6),
}
REGISTERS = "launch__registers_per_thread"


def measure(command):
    metrics = ",".join([REGISTERS, *(name for name, _ in METRICS.values())])
    ncu = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", "--metrics", metrics]
    run = subprocess.run([*ncu, *command], stdout=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(command)}: ended with {run.returncode} under ncu")
    return run.stdout.splitlines()


def launches(lines):
    """Kernel, grid, registers and numbers of each launch; lines of the program itself are passed over."""
    head = None
    for row in csv.reader(lines):
        if "Kernel Name" in row:
            head = row
        elif head and len(row) == len(head) and row[0].isdigit():
            found = dict(zip(head, row))
            numbers = [float(found[name].replace(",", "")) * by for name, by in METRICS.values()]
            yield (found["Kernel Name"], found["Grid Size"], found[REGISTERS]), numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="what ncu printed before, instead of a command")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    if bool(args.csv) == bool(args.command):
        parser.error("give a command after --, or --csv")
    lines = open(args.csv, errors="replace") if args.csv else measure(args.command)
    by_kernel = {}
    for kernel, numbers in launches(lines):
        by_kernel.setdefault(kernel, []).append(numbers)
    if not by_kernel:
        sys.exit("ncu printed no launch")
    print(f"{'kernel':28} {'grid':>16} {'regs':>5} {'times':>6}", *(f"{name:>8}" for name in METRICS))
    for (name, grid, registers), all_numbers in by_kernel.items():
        medians = [statistics.median(numbers) for numbers in zip(*all_numbers)]
        columns = " ".join(f"{number:8.2f}" for number in medians)
        print(f"{name[:28]:28} {grid:>16} {registers:>5} {len(all_numbers):6} {columns}")


if __name__ == "__main__":
    main()
