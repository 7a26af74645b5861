#!/usr/bin/env bash
# numa.sh: proves --numa on a machine of two NUMA nodes that QEMU makes, under a kernel of Debian's: asks the kernel
# where the pages of the program and the CPUs of its threads are. It shows where things go, not how fast that is. Run by
# hand.
set -euo pipefail
cd "$(dirname "$0")/.."

. tools/guest.sh
needs qemu-system-x86 cpio
CARGO_PROFILE_RELEASE_DEBUG=0 cargo build --locked --release -p moebius
add_program target/release/moebius moebius
cp models/*.gguf "$root/t/model.gguf"
fetch_kernel
pack_root "$work/initrd" <<'I'
ip link set lo up 2>/dev/null
# Prints MODE, the policy and the PAGES-OF-NODE-0 and PAGES-OF-NODE-1 of anonymous memory, and each thread's CPUs.
look() {
  mode=$1
  shift
  /t/moebius bench -m /t/model.gguf -t 4 -p 0 -n 64 -r 100000 --backend cpu --copy-weights all "$@" >/tmp/out 2>&1 &
  pid=$!
  until grep -q "ready in" /tmp/out; do sleep 1; done
  sleep 2
  awk -v mode="$mode" '
    /anon=/ { policy = $2; for (i = 3; i <= NF; i++) if ($i ~ /^N[01]=/) n[substr($i, 2, 1)] += substr($i, 4) }
    END { print "pages", mode, policy, n[0] + 0, n[1] + 0 }' /proc/$pid/numa_maps
  for thread in /proc/$pid/task/*; do
    awk -v mode="$mode" '/^Name:/ { name = $2 } /^Cpus_allowed_list:/ { print "thread", mode, name, $2 }' $thread/status
  done
  kill $pid
  wait $pid
}
echo "nodes $(cat /sys/devices/system/node/has_memory)"
look default
look distribute --numa distribute
look isolate --numa isolate
look numactl --numa numactl
I

: >"$work/serial"
timeout 900 qemu-system-x86_64 -accel tcg -cpu max -smp 4 -m 2G -nodefaults -no-reboot -display none \
  -object memory-backend-ram,id=m0,size=1G -numa node,cpus=0-1,memdev=m0 \
  -object memory-backend-ram,id=m1,size=1G -numa node,cpus=2-3,memdev=m1 \
  -kernel "$work"/debian/boot/vmlinuz-* -initrd "$work/initrd" -append "console=ttyS0 quiet panic=-1" \
  -serial "file:$work/serial" </dev/null || true
cat "$work/serial"
grep -q "== the end" "$work/serial" || { echo "it did not come to its end"; exit 1; }
awk '
  function expect(holds, what) { if (!holds) { print "WRONG: " what; wrong = 1 } }
  { sub(/\r$/, "") }
  $1 == "pages" { policy[$2] = $3; here[$2] = $4; there[$2] = $5 }
  $1 == "thread" { allowed[$2 " " $NF]++; threads[$2]++ }
  END {
    d = "distribute"
    total = here[d] + there[d]
    expect(policy[d] == "interleave:0-1" && total > 4000 && here[d] > 0.4 * total && there[d] > 0.4 * total,
      "distribute halves the memory")
    expect(allowed[d " 0-1"] >= 1 && allowed[d " 2-3"] == 2, "distribute divides the threads")
    i = "isolate"
    total = here[i] + there[i]
    expect(policy[i] ~ /^prefer:[01]$/ && total > 4000 && (here[i] > 0.95 * total || there[i] > 0.95 * total),
      "isolate keeps the memory on one node")
    expect(allowed[i (here[i] > there[i] ? " 0-1" : " 2-3")] == threads[i],
      "isolate keeps all threads on the node of the memory")
    for (m in threads) if (m == "default" || m == "numactl")
      expect(allowed[m " 0-3"] == threads[m] && policy[m] == "default", m " leaves memory and threads alone")
    expect(length(threads) == 4, "all were seen")
    if (!wrong) print "NUMA: all as it should be"
    exit wrong
  }' "$work/serial"
