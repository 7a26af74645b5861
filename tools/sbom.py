#!/usr/bin/env python3
"""Lists the crates that a program is made of, as CycloneDX 1.5 (a software bill of materials):
`tools/sbom.py TARGET >FILE`. Names, versions, licenses and hashes come from cargo and Cargo.lock; crates that build or
test the program, or that another target alone needs, are left out. Needs cargo and Python 3.11."""

import json
import pathlib
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = "moebius"


def main():
    [target] = sys.argv[1:]
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    macros = {id for id, of in packages.items() if any("proc-macro" in target["kind"] for target in of["targets"])}
    # Of each crate, the crates that are linked with it.
    linked = {
        node["id"]: sorted(
            dep["pkg"]
            for dep in node["deps"]
            if dep["pkg"] not in macros and any(kind["kind"] is None for kind in dep["dep_kinds"])
        )
        for node in metadata["resolve"]["nodes"]
    }
    [program] = [package["id"] for package in packages.values() if package["name"] == PROGRAM]
    reached, left = set(), [program]
    while left:
        package = left.pop()
        if package not in reached:
            reached.add(package)
            left += linked[package]
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    hashes = {(package["name"], package["version"]): package.get("checksum") for package in locked}

    def purl(package):
        return f"pkg:cargo/{packages[package]['name']}@{packages[package]['version']}"

    def component(package):
        of = packages[package]
        found = {
            "type": "application" if package == program else "library",
            "bom-ref": purl(package),
            "name": of["name"],
            "version": of["version"],
            "purl": purl(package),
        }
        if of.get("license"):
            # An older form has `/` for OR.
            found["licenses"] = [{"expression": of["license"].replace("/", " OR ").replace("  ", " ")}]
        if hash_of := hashes.get((of["name"], of["version"])):
            found["hashes"] = [{"alg": "SHA-256", "content": hash_of}]
        return found

    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(program), "properties": [{"name": "rust:target", "value": target}]},
        "components": [component(package) for package in sorted(reached - {program}, key=purl)],
        "dependencies": [
            {"ref": purl(package), "dependsOn": sorted({purl(other) for other in linked[package]})}
            for package in sorted(reached, key=purl)
        ],
    }
    json.dump(bom, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
