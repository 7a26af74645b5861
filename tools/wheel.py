#!/usr/bin/env python3
"""Packs a built program as a wheel, so that `pip install` and `uvx` put it on the path:

    cargo build --profile dist -p moebius && tools/wheel.py target/dist/moebius --out dist

A wheel is a zip archive with the program under `NAME.data/scripts` and a list of hashes (PEP 427). The platform tag
comes from the program: the newest glibc symbol that it needs, or none where it is static. Needs nothing but Python 3.9.
"""

import argparse
import base64
import hashlib
import pathlib
import platform
import re
import stat
import subprocess
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUMMARY = "An inference engine for mixture-of-experts language models: one program, run, chat and serve"


def tag(program):
    """The platform that the program runs on, in the words of PEP 600 and its kin."""
    machine = platform.machine().lower()
    if platform.system() == "Darwin":
        return f"macosx_11_0_{'arm64' if machine == 'arm64' else 'x86_64'}"
    if platform.system() == "Windows":
        return "win_amd64"
    data = program.read_bytes()
    needed = [tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)]
    if b"/lib/ld-musl" in data or not needed:
        return f"musllinux_1_1_{machine}.manylinux_2_17_{machine}"
    major, minor = max(needed)
    return f"manylinux_{major}_{max(minor, 17)}_{machine}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("dist"))
    args = parser.parse_args()
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    said = subprocess.run([args.program, "-V"], capture_output=True, text=True, check=True).stdout
    if not said.startswith(f"moebius {version}"):
        raise SystemExit(f"{args.program} says {said.strip()!r}, the workspace is {version}")
    platform_tag = tag(args.program)
    info = f"moebius-{version}.dist-info"
    files = {
        f"moebius-{version}.data/scripts/{args.program.name}": args.program.read_bytes(),
        f"{info}/METADATA": "\n".join([
            "Metadata-Version: 2.1", "Name: moebius", f"Version: {version}", f"Summary: {SUMMARY}",
            "License: MIT OR Apache-2.0", "Requires-Python: >=3.8", "Description-Content-Type: text/markdown", "",
            (ROOT / "README.md").read_text(),
        ]).encode(),
        f"{info}/WHEEL": "\n".join([
            "Wheel-Version: 1.0", "Generator: tools/wheel.py", "Root-Is-Purelib: false",
            *(f"Tag: py3-none-{one}" for one in platform_tag.split(".")), "",
        ]).encode(),
    }
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        files[f"{info}/licenses/{name}"] = (ROOT / name).read_bytes()
    record = []
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"moebius-{version}-py3-none-{platform_tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}")
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            mode = 0o755 if "/scripts/" in name else 0o644
            entry.external_attr = (stat.S_IFREG | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
        record.append(f"{info}/RECORD,,")
        wheel.writestr(zipfile.ZipInfo(f"{info}/RECORD", (1980, 1, 1, 0, 0, 0)), "\n".join(record) + "\n")
    print(path)


if __name__ == "__main__":
    main()
