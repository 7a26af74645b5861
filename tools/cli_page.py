#!/usr/bin/env python3
"""Writes docs/cli.md, the reference of all commands, from the program's own help.

    tools/cli_page.py [--check] PROGRAM        PROGRAM: target/release/moebius

`--check` writes nothing and fails where the page differs.
"""

import os
import pathlib
import re
import subprocess
import sys

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "cli.md"

HEAD = """# Commands

What `moebius COMMAND --help` prints. This page is made by `tools/cli_page.py target/release/moebius`; texts of flags
are in `crates/moebius/src/args/`.
"""


def help_of(program, *command):
    """Returns the help of a command as the program prints it where no variable or file changes a default."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MOEBIUS_")}
    done = subprocess.run([program, *command, "--help"], env=env, text=True, capture_output=True, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def commands(text):
    """Yields the names in the list of commands of the program's help."""
    block = re.search(r"^Commands:\n((?:  .*\n)+)", text, re.MULTILINE)
    for line in block[1].splitlines():
        name = re.match(r"  ([a-z]+)", line)
        if name and name[1] != "help":
            yield name[1]


def page(program):
    top = help_of(program)
    parts = [HEAD, f"```text\n{top}\n```\n"]
    for name in commands(top):
        text = help_of(program, name)
        summary, _, rest = text.partition("\n\n")
        parts.append(f"## moebius {name}\n\n{' '.join(summary.split())}.\n\n```text\n{rest}\n```\n")
    return "\n".join(parts)


def main():
    program = sys.argv[-1]
    text = page(program)
    if "--check" not in sys.argv[1:-1]:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit("docs/cli.md is not what the program says: run tools/cli_page.py target/release/moebius")


main()
