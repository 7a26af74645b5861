//! What the simulator must find: small kernels, each right until one thing is planted in it.
#![allow(clippy::unwrap_used)]

#[path = "../../../tests/fixtures.rs"]
mod fixtures;

use std::time::Duration;

use gpu::commands::{Buf, Cmd, Gpu, GpuError, List, Pipe, Span, Unit, Use};
use metal_sim::clang::Clang;
use metal_sim::{Call, Fault, Moment, Options, Schedule, Sim};

const N: u32 = 256;
const SECOND: Duration = Duration::from_secs(1);

/// A simulated GPU, where there is a clang.
fn sim(options: Options) -> Option<Sim> {
    if let Err(why) = Clang::find() {
        fixtures::skip(why);
        return None;
    }
    Some(Sim::new(options).unwrap())
}

fn unit(source: &str, kernel: &'static str) -> Unit {
    let source = format!("#include <metal_stdlib>\nusing namespace metal;\n{source}");
    Unit { name: kernel.into(), source, kernel }
}

/// A list of dispatches over buffers of `N` floats.
struct Bench {
    sim: Sim,
    bufs: Vec<Buf>,
    list: List,
}

impl Bench {
    fn new(options: Options, n_bufs: usize) -> Option<Bench> {
        let mut sim = sim(options)?;
        let bufs = (0..n_bufs).map(|_| sim.alloc(4 * u64::from(N), "numbers").unwrap()).collect();
        Some(Bench { sim, bufs, list: List::default() })
    }

    fn span(&self, buf: usize) -> Span {
        Span { buf: self.bufs[buf], at: 0, len: 4 * u64::from(N) }
    }

    fn build(&mut self, source: &str, kernel: &'static str) -> Result<Pipe, GpuError> {
        Ok(self.sim.build(&[unit(source, kernel)])?[0])
    }

    fn fill(&mut self, buf: usize, value: impl Fn(u32) -> f32) {
        let bytes: Vec<u8> = (0..N).flat_map(|i| value(i).to_le_bytes()).collect();
        self.sim.write(self.span(buf), &bytes).unwrap();
    }

    fn dispatch(&mut self, pipe: Pipe, bound: &[(usize, Use)], n: u32, grid: u32) {
        self.list.cmds.push(Cmd::Pipe(pipe));
        for (slot, &(buf, used)) in bound.iter().enumerate() {
            self.list.cmds.push(Cmd::Bind { slot: slot as u8, span: self.span(buf), used });
        }
        self.list.params(bound.len() as u8, &[n]);
        self.list.cmds.push(Cmd::Groups { grid: [grid, 1, 1], threads: 64 });
    }

    fn run(&mut self) -> Result<(), GpuError> {
        let ticket = self.sim.submit(&self.list)?;
        self.sim.wait(ticket, SECOND).map(drop)
    }

    fn read(&mut self, buf: usize) -> Result<Vec<f32>, GpuError> {
        let mut bytes = vec![0; 4 * N as usize];
        self.sim.read(self.span(buf), &mut bytes)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}

/// Sums of 64 numbers each, spread again over them: threadgroup memory, barriers, collectives.
const SUMS: &str = "
struct Params { uint n; };
kernel void sums(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                 constant Params& p [[buffer(2)]], uint t [[thread_index_in_threadgroup]],
                 uint g [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                 uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float part[2];
    threadgroup float each[64];
    const uint i = g * 64 + t;
    float v = i < p.n ? x[i] : 0.0;
    float s = simd_sum(v);
    if (lane == 0) part[sg] = s;
    each[t] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = part[0] + part[1];
    float other = each[63 - t];
    if (i < p.n) y[i] = total + other;
}
";

/// What the kernel computes.
fn sums(x: &[f32]) -> Vec<f32> {
    (0..x.len()).map(|i| x[i / 64 * 64..][..64].iter().sum::<f32>() + x[i / 64 * 64 + 63 - i % 64]).collect()
}

#[test]
fn a_right_kernel_passes_in_every_schedule_with_the_same_bits() {
    for schedule in Schedule::ALL {
        for moment in [Moment::Submit, Moment::Wait] {
            let Some(mut bench) = Bench::new(Options { schedule, moment, ..Options::default() }, 3) else { return };
            let pipe = bench.build(SUMS, "sums").unwrap();
            let x = |i: u32| (i * 37 % 64) as f32 - 20.0;
            bench.fill(0, x);
            bench.dispatch(pipe, &[(0, Use::Read), (1, Use::Write)], N, N / 64);
            bench.list.cmds.push(Cmd::Barrier);
            bench.dispatch(pipe, &[(1, Use::Read), (2, Use::Write)], N, N / 64);
            bench.run().unwrap_or_else(|e| panic!("{schedule:?}: {e}"));
            let x: Vec<f32> = (0..N).map(x).collect();
            assert_eq!(bench.read(2).unwrap(), sums(&sums(&x)), "{schedule:?} {moment:?}");
            let stats = bench.sim.stats();
            assert_eq!((stats.dispatches, stats.barriers, stats.needless_barriers), (2, 1, 0));
        }
    }
}

/// Texts that replace one another in a right kernel, and the kind of report that must come of it.
const PLANTED: &[(&str, &str, &str)] = &[
    ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", "[race]"),
    ("mem_flags::mem_threadgroup", "mem_flags::mem_none", "[fence]"),
    ("mem_flags::mem_threadgroup", "mem_flags::mem_device", "[fence]"),
    ("threadgroup_barrier(", "simdgroup_barrier(", "[race]"),
    ("threadgroup_barrier(", "if (t < 40) threadgroup_barrier(", "[barrier-divergent]"),
    ("float s = simd_sum(v)", "float s = v; if (lane < 7) s = simd_sum(v)", "[simd-divergent]"),
    ("each[t] = v;", "each[t + 1] = v;", "[undefined]"),
    ("each[t] = v;", "(&each[0])[t + 1] = v;", "[out-of-bounds]"),
    ("each[t] = v;", "if (t > 0) each[t] = v;", "[unwritten]"),
    ("i < p.n ? x[i] : 0.0", "x[i + 1]", "[out-of-bounds]"),
    ("i < p.n ? x[i] : 0.0", "*(device const float*)((device const char*)x + 4 * i - i % 2)", "[misaligned]"),
    ("if (i < p.n) y[i] = total + other;", "if (i + 1 < p.n) y[i] = total + other;", "[undeclared]"),
    ("y[i] = total + other;", "y[i] += total;", "[undeclared]"),
    ("y[i] = total + other;", "y[i / 2] = y[i / 2 + 128] = total;", "[race"),
    ("y[i] = total + other;", "y[i % 128] = y[128 + i % 128] = total;", "[race-threadgroups]"),
    ("y[i] = total + other;", "y[i] = total; if (i < 128) y[i + 128] = total;", "[race-threadgroups]"),
    ("y[i] = total + other;", "y[i] = total; ((device float*)x)[i] = total;", "[undeclared]"),
    ("float total", "int wild = int(v * 1e30); float total = wild; total", "[undefined]"),
    ("y[i] = total + other;", "y[i] = float(half(total * 100.0));", "[half-overflow]"),
    ("float s = simd_sum(v)", "half h = half(v); h = h * h * h; float s = simd_sum(float(h))", "[half-overflow]"),
    ("each[t] = v;", "each[t] = float(half4(v, v, v, 1e3 * v).w);", "[half-overflow]"),
    ("float total", "uint shifted = 1u << (t + p.n); float total = shifted; total", "[undefined]"),
];

#[test]
fn every_planted_mistake_is_found() {
    for &(from, to, kind) in PLANTED {
        let Some(mut bench) = Bench::new(Options::default(), 2) else { return };
        assert_eq!(SUMS.matches(from).count(), 1, "{from}");
        let pipe = bench.build(&SUMS.replace(from, to), "sums").unwrap_or_else(|e| panic!("{to}: {e}"));
        bench.fill(0, |i| (i + 1) as f32);
        bench.dispatch(pipe, &[(0, Use::Read), (1, Use::Write)], N, N / 64);
        let error = bench.run().expect_err(to).to_string();
        assert!(error.contains(kind), "`{from}` became `{to}`: {kind} wanted:\n{error}");
        // Nothing runs on a GPU that has failed.
        assert!(bench.read(1).is_err());
    }
}

/// Halves to their last number, infinities and NaN are no overflow.
#[test]
fn halves_hold_what_is_no_more_than_their_largest() {
    let Some(mut bench) = Bench::new(Options::default(), 2) else { return };
    let source = SUMS.replace("y[i] = total + other;", "y[i] = float(half(x[i]));");
    let pipe = bench.build(&source, "sums").unwrap();
    // 65520 is the least number that rounds to infinity.
    let x = [1.0, -65504.0, 65519.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-9, 0.1];
    bench.fill(0, |i| x[i as usize % 8]);
    bench.dispatch(pipe, &[(0, Use::Read), (1, Use::Write)], N, N / 64);
    bench.run().unwrap();
    let y = bench.read(1).unwrap();
    assert_eq!(y[..5], [1.0, -65504.0, 65504.0, f32::INFINITY, f32::NEG_INFINITY]);
    assert!(y[5].is_nan() && y[6] == 0.0 && y[7] == 0.099_975_586, "{y:?}");
}

/// What threads of a threadgroup leave for each other in device memory.
const SHARE: &str = "
struct Params { uint n; };
kernel void share(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  constant Params& p [[buffer(2)]], uint t [[thread_index_in_threadgroup]],
                  uint g [[threadgroup_position_in_grid]]) {
    device float* own = y + g * 64;
    own[t] = x[g * 64 + t];
    threadgroup_barrier(mem_flags::mem_device);
    const float other = own[63 - t];
    threadgroup_barrier(mem_flags::mem_device);
    own[t] = other;
}
";

/// Device memory that other threads read wants a fence of device memory.
#[test]
fn device_memory_wants_its_own_fence() {
    for (from, to, kind) in [
        ("", "", None),
        ("(mem_flags::mem_device);\n    const", "(mem_flags::mem_threadgroup);\n    const", Some("[fence]")),
        ("(mem_flags::mem_device);\n    own", "(mem_flags::mem_none);\n    own", Some("[fence]")),
        ("threadgroup_barrier(mem_flags::mem_device);\n    const", "const", Some("[race]")),
    ] {
        let Some(mut bench) = Bench::new(Options::default(), 2) else { return };
        let source = if from.is_empty() { SHARE.to_string() } else { SHARE.replace(from, to) };
        let pipe = bench.build(&source, "share").unwrap();
        bench.fill(0, |i| i as f32);
        bench.dispatch(pipe, &[(0, Use::Read), (1, Use::Write)], N, N / 64);
        match (bench.run(), kind) {
            (Ok(()), None) => assert_eq!(bench.read(1).unwrap()[..2], [63.0, 62.0]),
            (Err(e), Some(kind)) if e.to_string().contains(kind) => {}
            (found, _) => panic!("`{from}` became `{to}`: {found:?}, {kind:?} wanted"),
        }
    }
}

/// Reads one buffer, writes another: for lists of several dispatches.
const COPY: &str = "
struct Params { uint n; };
kernel void copy(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                 constant Params& p [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i < p.n) y[i] = 0.5 * x[i];
}
";

/// Two halves of a word that one thread wrote are of two threads behind a barrier, and without it they meet.
#[test]
fn halves_of_a_word_change_hands_behind_a_barrier() {
    const HALVES: &str = "
struct Params { uint n; };
kernel void halves(device float* y [[buffer(0)]], constant Params& p [[buffer(1)]],
                   uint t [[thread_index_in_threadgroup]], uint g [[threadgroup_position_in_grid]]) {
    threadgroup half pairs[128];
    pairs[2 * t] = half(t);
    pairs[2 * t + 1] = half(t);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    pairs[2 * t] = half(1);
    pairs[2 * (t ^ 8) + 1] = half(2);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[g * 64 + t] = float(pairs[2 * t] + pairs[2 * t + 1]);
}
";
    const BETWEEN: &str = "threadgroup_barrier(mem_flags::mem_threadgroup);\n    pairs[2 * t] = half(1);";
    for (source, is_right) in [(HALVES.to_string(), true), (HALVES.replace(BETWEEN, ""), false)] {
        let Some(mut bench) = Bench::new(Options::default(), 1) else { return };
        let pipe = bench.build(&source, "halves").unwrap();
        bench.dispatch(pipe, &[(0, Use::Write)], N, N / 64);
        match bench.run() {
            Ok(()) => assert!(is_right && bench.read(0).unwrap().iter().all(|&y| y == 3.0)),
            Err(why) => assert!(!is_right && why.to_string().contains("[race]"), "{why}"),
        }
    }
}

#[test]
fn dispatches_that_meet_want_a_barrier() {
    let (r, w) = (Use::Read, Use::Write);
    // What the two dispatches bind, and the hazard where nothing parts them; with a barrier all are right.
    for (first, second, hazard) in [
        ([(0, r), (1, w)], [(1, r), (2, w)], Some("read of byte 0 of slot 0")),
        ([(0, r), (1, w)], [(2, r), (0, w)], Some("write of byte 0 of slot 1")),
        ([(0, r), (1, w)], [(2, r), (1, w)], Some("write of byte 0 of slot 1")),
        ([(0, r), (1, w)], [(0, r), (3, w)], None),
    ] {
        for barrier in [false, true] {
            let Some(mut bench) = Bench::new(Options::default(), 4) else { return };
            let pipe = bench.build(COPY, "copy").unwrap();
            (0..3).for_each(|buf| bench.fill(buf, |i| i as f32));
            bench.dispatch(pipe, &first, N, N / 64);
            if barrier {
                bench.list.cmds.push(Cmd::Barrier);
            }
            bench.dispatch(pipe, &second, N, N / 64);
            match (bench.run(), hazard.filter(|_| !barrier)) {
                (Ok(()), None) => {}
                (Err(e), Some(hazard)) => {
                    let text = e.to_string();
                    assert!(text.contains("[hazard]") && text.contains(hazard), "{hazard} wanted:\n{text}");
                }
                (found, wanted) => panic!("{first:?} {second:?} barrier {barrier}: {found:?}, {wanted:?} wanted"),
            }
            assert_eq!(bench.sim.stats().needless_barriers, usize::from(barrier && hazard.is_none()));
        }
    }
}

/// Changes to a right list, and what the refusal says.
const BROKEN: &[(fn(&mut Vec<Cmd>), &str)] = &[
    (|cmds| without(cmds, 1), "slot 0 is not bound"),
    (|cmds| without(cmds, 0), "before a kernel is chosen"),
    (|cmds| cmds.truncate(cmds.len() - 1), "was not dispatched"),
    (|cmds| cmds.insert(3, Cmd::Barrier), "a barrier between"),
    (|cmds| cmds.insert(1, cmds[1]), "bound twice"),
    (|cmds| bind(cmds, 1, |slot, _, _| *slot = 31), "not one of 31"),
    (|cmds| bind(cmds, 1, |slot, _, _| *slot = 9), "slot 0 is not bound"),
    (|cmds| bind(cmds, 1, |_, span, _| span.len += 4), "of a buffer of 1024"),
    (|cmds| bind(cmds, 1, |_, span, _| (span.at, span.len) = (2, 100)), "begins at byte 2"),
    (|cmds| bind(cmds, 1, |_, span, _| span.len = 0), "bytes 0..+0"),
    (|cmds| bind(cmds, 1, |_, _, used| *used = Use::Write), "bound as Write, const is true"),
    (|cmds| bind(cmds, 2, |_, _, used| *used = Use::Read), "bound as Read, const is false"),
    (|cmds| bind(cmds, 2, |_, span, _| span.buf = Buf(0)), "share bytes"),
    (|cmds| bind(cmds, 2, |_, span, _| span.buf = Buf(7)), "buffer 7"),
    (|cmds| groups(cmds, |grid, _| grid[1] = 0), "a grid of"),
    (|cmds| groups(cmds, |_, threads| *threads = 32), "threadgroups of 32 threads"),
    (|cmds| groups(cmds, |_, threads| *threads = 80), "threadgroups of 80 threads"),
    (|cmds| groups(cmds, |_, threads| *threads = 1056), "threadgroups of 1056 threads"),
    (|cmds| cmds[3] = Cmd::Bytes { slot: 2, at: 0, len: 8 }, "8 bytes from 0 of 4"),
    (|cmds| cmds[3] = Cmd::Bytes { slot: 2, at: 0, len: 3 }, "gets 3 bytes of parameters, 4 wanted"),
    (|cmds| cmds[0] = Cmd::Pipe(Pipe(3)), "pipe 3 of 1"),
];

fn without(cmds: &mut Vec<Cmd>, at: usize) {
    cmds.remove(at);
}

fn bind(cmds: &mut [Cmd], at: usize, change: fn(&mut u8, &mut Span, &mut Use)) {
    if let Cmd::Bind { slot, span, used } = &mut cmds[at] {
        change(slot, span, used);
    }
}

fn groups(cmds: &mut [Cmd], change: fn(&mut [u32; 3], &mut u32)) {
    if let Some(Cmd::Groups { grid, threads }) = cmds.last_mut() {
        change(grid, threads);
    }
}

#[test]
fn lists_that_break_a_rule_are_refused() {
    for (change, why) in BROKEN {
        let Some(mut bench) = Bench::new(Options::default(), 2) else { return };
        let pipe = bench.build(COPY, "copy").unwrap();
        bench.fill(0, |i| i as f32);
        bench.dispatch(pipe, &[(0, Use::Read), (1, Use::Write)], N, N / 64);
        change(&mut bench.list.cmds);
        let error = bench.run().expect_err(why).to_string();
        assert!(error.contains(why), "{why} wanted: {error}");
    }
}

#[test]
fn the_host_keeps_its_hands_off_unfinished_lists() {
    for moment in [Moment::Wait, Moment::Submit] {
        let Some(mut bench) = Bench::new(Options { moment, ..Options::default() }, 3) else { return };
        let pipe = bench.build(COPY, "copy").unwrap();
        bench.fill(0, |i| i as f32);
        bench.dispatch(pipe, &[(0, Use::Read), (1, Use::Write)], N, N / 64);
        bench.sim.submit(&bench.list).unwrap();
        let read = bench.read(1);
        match moment {
            Moment::Wait => assert!(read.unwrap_err().to_string().contains("unfinished"), "too early"),
            Moment::Submit => assert_eq!(read.unwrap()[2], 1.0),
        }
    }
    let Some(mut bench) = Bench::new(Options::default(), 1) else { return };
    assert!(bench.read(0).unwrap_err().to_string().contains("nothing has written"));
    let Some(mut bench) = Bench::new(Options::default(), 2) else { return };
    let short = Span { len: 8, ..bench.span(0) };
    assert!(bench.sim.write(short, &[0; 4]).unwrap_err().to_string().contains("4 bytes for a span of 8"));
    let Some(mut bench) = Bench::new(Options::default(), 2) else { return };
    bench.sim.submit(&List::default()).unwrap();
    assert!(bench.sim.alloc(4, "more").unwrap_err().to_string().contains("once lists run"));
}

#[test]
fn calls_fail_on_demand() {
    for call in [Call::Alloc, Call::Build, Call::Submit, Call::Wait] {
        let fault = Some(Fault { call, after: 1 });
        let Some(mut sim) = sim(Options { fault, ..Options::default() }) else { return };
        let mut outcomes = [None, None];
        for outcome in &mut outcomes {
            *outcome = match call {
                Call::Alloc => sim.alloc(4, "memory").err(),
                Call::Build => sim.build(&[unit(COPY, "copy")]).err(),
                Call::Submit => sim.submit(&List::default()).err(),
                Call::Wait => sim.submit(&List::default()).and_then(|ticket| sim.wait(ticket, SECOND)).err(),
            };
        }
        assert!(outcomes[0].is_none() && outcomes[1].is_some(), "{call:?}: {outcomes:?}");
    }
}

/// Kernels that bring a GPU down end the runner, or their list, and never the test.
#[test]
fn kernels_that_crash_or_hang_are_errors() {
    let crash = COPY.replace("if (i < p.n)", "volatile uint z = 0; if (i / z < p.n)");
    let hang = COPY.replace("if (i < p.n)", "volatile uint z = 0; while (z == 0) {} if (i < p.n)");
    for (source, why) in [(crash, "division by zero"), (hang, "did not finish")] {
        let options = Options { moment: Moment::Wait, ..Options::default() };
        let Some(mut bench) = Bench::new(options, 2) else { return };
        let pipe = bench.build(&source, "copy").unwrap();
        bench.fill(0, |i| i as f32);
        bench.dispatch(pipe, &[(0, Use::Read), (1, Use::Write)], N, N / 64);
        let ticket = bench.sim.submit(&bench.list).unwrap();
        let error = bench.sim.wait(ticket, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains(why), "{why} wanted: {error}");
    }
}

#[test]
fn subnormals_are_zero() {
    let Some(mut bench) = Bench::new(Options::default(), 2) else { return };
    let pipe = bench.build(COPY, "copy").unwrap();
    bench.fill(0, |i| if i == 0 { 1.5 * f32::MIN_POSITIVE } else { 1e-30 });
    bench.dispatch(pipe, &[(0, Use::Read), (1, Use::Write)], N, N / 64);
    bench.run().unwrap();
    assert_eq!(bench.read(1).unwrap()[..2], [0.0, 5e-31]);
}

/// What Metal's front end refuses is refused here, by file and line.
#[test]
fn what_does_not_compile_is_refused_by_its_line() {
    for (from, to, why) in [
        ("0.5 * x[i]", "0.5 * x[j]", "j"),
        ("if (i < p.n)", "device float* z = &p; if (i < p.n)", "address spaces"),
        ("if (i < p.n)", "thread const float* z = x; if (i < p.n)", "address spaces"),
        ("if (i < p.n)", "x[0] = 1.0; if (i < p.n)", "read-only"),
        ("0.5 * x[i]", "double(x[i])", "double"),
    ] {
        let Some(mut bench) = Bench::new(Options::default(), 1) else { return };
        let error = bench.build(&COPY.replace(from, to), "copy").expect_err(to).to_string();
        assert!(error.contains(why) && error.contains(":7"), "{why} wanted: {error}");
    }
}
