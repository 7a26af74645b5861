# guest.sh: what avx512.sh and numa.sh share: a root of programs and their libraries, started by a kernel of Debian's.
# Sourced by them; leaves $work (removed at exit) and $root. Needs Rust and Debian or a relative of it.
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

# Installs packages that are missing.
needs() {
  dpkg -s "$@" >/dev/null 2>&1 ||
    { as_root apt-get update && as_root apt-get install -y --no-install-recommends "$@"; } >/dev/null
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root"/{bin,proc,sys,dev,tmp,t}

# Puts a program into the root as /t/NAME, with the libraries that it is linked to.
add_program() {
  strip -o "$root/t/$2" "$1"
  ldd "$1" | grep -o '/[^ ]*' | xargs cp -Lu --parents -t "$root"
}

# Fetches a kernel, to $work/debian/boot/vmlinuz-*, and busybox.
fetch_kernel() {
  local kernel
  kernel=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
  (cd "$work" && apt-get download "$kernel" busybox-static >/dev/null &&
    for deb in *.deb; do dpkg-deb -x "$deb" debian; done)
  cp "$work/debian/bin/busybox" "$root/bin/"
}

# Writes the root's init, with the commands of standard input on the serial line, and packs the root into FILE.
pack_root() {
  {
    cat <<'I'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
exec </dev/ttyS0 >/dev/ttyS0 2>&1
stty -onlcr
I
    cat
    echo 'echo "== the end"; sleep 1; poweroff -f'
  } >"$root/init"
  chmod +x "$root/init"
  (cd "$root" && find . | cpio -o -H newc --quiet) >"$1"
}
