#!/usr/bin/env python3
"""Packs folders of a release and lists checksums, the same bytes on every system: `tools/pack.py FOLDER...` makes
FOLDER.zip where its name says Windows, FOLDER.tar.gz elsewhere, and removes the folder; `tools/pack.py --sums FOLDER`
writes SHA256SUMS of the files in it. Needs nothing but Python 3.9."""

import argparse
import gzip
import hashlib
import pathlib
import shutil
import stat
import tarfile
import zipfile


def is_program(path):
    """Whether it may be run, which Windows does not record."""
    return path.suffix == ".exe" or bool(path.stat().st_mode & stat.S_IXUSR)


def pack_zip(folder, files):
    archive = folder.with_name(folder.name + ".zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for path in files:
            entry = zipfile.ZipInfo(path.relative_to(folder.parent).as_posix(), (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (stat.S_IFREG | (0o755 if is_program(path) else 0o644)) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(entry, path.read_bytes())
    return archive


def pack_tar(folder, files):
    archive = folder.with_name(folder.name + ".tar.gz")
    with open(archive, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as out:
            for path in files:
                entry = tarfile.TarInfo(path.relative_to(folder.parent).as_posix())
                entry.size, entry.mode = path.stat().st_size, 0o755 if is_program(path) else 0o644
                with open(path, "rb") as data:
                    out.addfile(entry, data)
    return archive


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--sums", action="store_true")
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    args = parser.parse_args()
    for folder in args.folders:
        folder = folder.resolve()
        if args.sums:
            files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "SHA256SUMS")
            sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
            (folder / "SHA256SUMS").write_bytes("".join(sums).encode())
            print("".join(sums), end="")
        else:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            print((pack_zip if "windows" in folder.name else pack_tar)(folder, files))
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
