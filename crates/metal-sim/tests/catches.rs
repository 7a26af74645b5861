//! What the simulator must find: small kernels, each right until one thing is planted in it.
#![allow(clippy::unwrap_used)]

#[path = "../../../tests/fixtures.rs"]
mod fixtures;

use std::time::Duration;

use backend::metal::gpu::{Buf, Cmd, Gpu, GpuError, List, Pipe, Span, Unit, Use};
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
