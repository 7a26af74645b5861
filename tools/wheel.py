#!/usr/bin/env python3
"""Packs the Python package as a wheel, which carries the command `moebius` too:

    cargo build --profile dist -p moebius-python && tools/wheel.py target/dist/libmoebius_python.so --out dist

A wheel is a zip archive with the package, its metadata and a list of hashes (PEP 427). The library is the program as
well: the command is a few lines of Python that call it, so that nothing is in the wheel twice. Names come from
python/pyproject.toml; the platform from the newest glibc symbol that the library needs. Needs nothing but Python 3.11,
and `strip` where the library has symbols.
"""

import argparse
import base64
import hashlib
import pathlib
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "moebius"


def tag(library):
    """The platform that the library runs on, in the words of PEP 600 and its kin."""
    machine = platform.machine().lower()
    if platform.system() == "Darwin":
        return f"macosx_11_0_{'arm64' if machine == 'arm64' else 'x86_64'}"
    if platform.system() == "Windows":
        return "win_arm64" if machine == "arm64" else "win_amd64"
    needed = [tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)]
    if not needed:
        raise SystemExit("the library needs no glibc: wheels for musl are not made")
    major, minor = max(needed)
    return f"manylinux_{major}_{max(minor, 17)}_{machine}"


def stripped(path):
    """The library without symbols and lines of code, which are nine tenths of a build for tests."""
    if platform.system() == "Windows" or not shutil.which("strip"):
        return path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / path.name
        subprocess.run(["strip", "-x" if platform.system() == "Darwin" else "-s", "-o", copy, path], check=True)
        return copy.read_bytes()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("dist"))
    parser.add_argument("--fast", action="store_true", help="store files as they are, for tests")
    args = parser.parse_args()
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    project = tomllib.loads((ROOT / "python" / "pyproject.toml").read_text())["project"]
    library = stripped(args.library)
    name = f"{project['name']}-{version}"
    tags = f"cp310-abi3-{tag(library)}"
    info = f"{name}.dist-info"
    ending = ".pyd" if platform.system() == "Windows" else ".abi3.so"
    files = {f"moebius/{path.name}": path.read_bytes() for path in sorted(PACKAGE.glob("*.py*")) if path.is_file()}
    files["moebius/py.typed"] = b""
    files[f"moebius/_native{ending}"] = library
    files[f"{info}/METADATA"] = "\n".join([
        "Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {version}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}", "License-File: LICENSE-APACHE", "License-File: LICENSE-MIT",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {needed}" for needed in project["dependencies"]),
        *(f"Classifier: {classifier}" for classifier in project["classifiers"]),
        "Description-Content-Type: text/markdown", "", (ROOT / "README.md").read_text(),
    ]).encode()
    wheel_lines = ["Wheel-Version: 1.0", "Generator: tools/wheel.py", "Root-Is-Purelib: false", f"Tag: {tags}", ""]
    files[f"{info}/WHEEL"] = "\n".join(wheel_lines).encode()
    scripts = "".join(f"{script} = {call}\n" for script, call in project["scripts"].items())
    files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{scripts}".encode()
    for license_file in ("LICENSE-APACHE", "LICENSE-MIT"):
        files[f"{info}/licenses/{license_file}"] = (ROOT / license_file).read_bytes()
    record = []
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{name}-{tags}.whl"
    method = zipfile.ZIP_STORED if args.fast else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(path, "w") as wheel:
        for file, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{file},sha256={digest},{len(data)}")
            entry = zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (stat.S_IFREG | (0o755 if file.endswith(ending) else 0o644)) << 16
            entry.compress_type = method
            wheel.writestr(entry, data)
        record.append(f"{info}/RECORD,,")
        wheel.writestr(zipfile.ZipInfo(f"{info}/RECORD", (1980, 1, 1, 0, 0, 0)), "\n".join(record) + "\n")
    print(path)


if __name__ == "__main__":
    main()
