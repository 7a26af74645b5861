#!/usr/bin/env bash
# avx512.sh [TEST[:FILTER]]...: runs tests of crates/cpu and crates/conformance with AVX-512 on a machine without it: in Bochs, which
# emulates a Tiger Lake, under a kernel of Debian's. Without names it is the test of the kernels: every one against the
# scalar dot product, bit for bit. it:cpu_law::instruction_sets is that of whole models, against AVX2: scalar code differs
# from both in this emulator, though not on a machine. Emulation takes minutes where the machine takes a second, so it is
# run by hand.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- kernels

. tools/guest.sh
needs bochs isolinux syslinux-common xorriso cpio
mkdir -p "$work/iso/isolinux"
for test; do
  name=${test%%:*}
  program=$(CARGO_PROFILE_RELEASE_DEBUG=0 cargo test --locked --release --no-run -p moebius-cpu -p conformance --test "$name" 2>&1 |
    tee /dev/stderr | sed -n 's/^ *Executable .*(\(.*\))$/\1/p')
  add_program "$program" "$name"
done
cp -r --parents "$PWD/crates/conformance/tests/data" "$root"

fetch_kernel
cp "$work"/debian/boot/vmlinuz-* "$work/iso/vmlinuz"
pack_root "$work/iso/initrd" <<I
export MOEBIUS_WITNESS=avx2
run() { echo "== \$*"; "\$@" || echo "FAILED: status \$?"; }
run grep -m 1 -o avx512_vnni /proc/cpuinfo
for test in $*; do run /t/\${test%%:*} --test-threads 1 \$(echo "\$test" | cut -s -d : -f 2-); done
I
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$work/iso/isolinux/"
# What is cleared: FSRM (580), since Linux takes ERMS for granted beside it, which it finds switched off here; PKU (515) and the
# compacted forms of XSAVE (321, 323), whose layout in Bochs 2.7 it refuses, and AVX with them.
cat >"$work/iso/isolinux/isolinux.cfg" <<'I'
default linux
label linux
 kernel /vmlinuz
 append initrd=/initrd console=ttyS0 quiet nokaslr mitigations=off tsc=reliable lpj=1000000 nosmp noapic clearcpuid=580,515,323,321
I
xorriso -as mkisofs -quiet -o "$work/linux.iso" -b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot -boot-load-size 4 \
  -boot-info-table "$work/iso" 2>/dev/null

cat >"$work/bochsrc" <<C
megs: 512
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model=tigerlake, ips=100000000
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path=$work/linux.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$work/serial
display_library: rfb, options="timeout=0"
log: $work/log
panic: action=fatal
# Without a sound card the sound thread of Debian's Bochs overflows a buffer.
sound: driver=dummy
clock: sync=none, time0=utc
C
echo c >"$work/go" # Debian's Bochs has its debugger, which waits for a command.
: >"$work/serial"
tail -f "$work/serial" &
trap 'kill $! 2>/dev/null; rm -rf "$work"' EXIT
# The screen is one for VNC, so it gets a separate network without a route.
unshare --map-root-user --net bochs -q -f "$work/bochsrc" -rc "$work/go" </dev/null >"$work/out" 2>&1 || true
sleep 1

found=$(cat "$work/serial")
case $found in
  *FAILED* | *panicked*) echo "something failed"; exit 1 ;;
  *avx512_vnni*"== the end"*) echo "AVX-512: all passed" ;;
  *) echo "it did not come to its end"; tail -n 5 "$work/log" "$work/out"; exit 1 ;;
esac
