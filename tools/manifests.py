#!/usr/bin/env python3
"""Fills the manifests of package managers (contrib/packages) with a release: `tools/manifests.py OWNER/NAME DIST OUT`
reads the version from Cargo.toml and the sums from DIST/SHA256SUMS. In templates, @VERSION@ and @REPOSITORY@ stand for
these, @URL SUFFIX@ and @SUM SUFFIX@ for an archive of the program."""

import argparse
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "contrib" / "packages"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("repository")
    parser.add_argument("dist", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", args.repository):
        sys.exit(f"{args.repository} is not OWNER/NAME")
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    lines = (args.dist / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}

    def fill(match):
        word, _, suffix = match[1].partition(" ")
        name = f"moebius-{version}-{suffix}"
        if word in ("URL", "SUM") and name not in sums:
            sys.exit(f"{args.dist}/SHA256SUMS has no {name}")
        return {
            "VERSION": lambda: version,
            "REPOSITORY": lambda: args.repository,
            "URL": lambda: f"https://github.com/{args.repository}/releases/download/v{version}/{name}",
            "SUM": lambda: sums[name],
        }[word]()

    for template in sorted(path for path in TEMPLATES.rglob("*") if path.is_file()):
        path = args.out / template.relative_to(TEMPLATES)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub(r"@((?:VERSION|REPOSITORY|URL|SUM)[^@\n]*)@", fill, template.read_text()))
        print(path)


if __name__ == "__main__":
    main()
