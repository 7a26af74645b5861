//! Every backend and how near it must come: the one table that the tests of ops, of golden logits and of the law read.
//! A new backend is a line in [`rows`].

use std::sync::Arc;

use backend::Backend;
use backend::reference::Reference;
use backend::residency::Policy;
use backend::{CacheType, KvType};
use cpu::{Cpu, Isa};
use gpu::commands::{Buf, Caps, Gpu, GpuError, List, Mapped, Pipe, Span, Ticket, Times, Unit};
use gpu::cuda::split::{Host, Moves};
use gpu::cuda::{self, Cuda};
use gpu::metal::{Metal, Tuning};
use metal_sim::{Moment, Options, Schedule, Sim};
use model::plan::Plan;
use quant::WeightType;
use quant::act::ActKind;

use crate::hand_on;

/// A backend of the table.
pub type Shared = Arc<dyn Backend + Send + Sync>;

/// A backend with what is demanded of it.
#[derive(Clone)]
pub struct Row {
    /// Name in messages.
    pub name: String,
    pub backend: Shared,
    /// The types in blocks that its cache is of: it is held to a reference that rounds its cache to them, and refuses
    /// caches whose heads are no whole blocks.
    pub blocks: Option<CacheType>,
    /// The row before it that gives the same bits on every plan.
    pub twin: Option<String>,
    /// How far the output of an op may be off the reference's.
    pub ops: Ops,
    /// How far golden logits may be off; none where another row says as much.
    pub logits: Option<Logits>,
    /// How far the logits of a random model of f32 weights may be off the reference's, as a whole (relative L2); none
    /// where rounding may send a token to other experts.
    pub model: Option<f64>,
    /// The same between two cuts of a prompt into chunks, or two batches around it; 0 demands the same bits.
    pub cut: f64,
    /// Ops that the backend is not written for: it must refuse a plan that holds one, by its name.
    pub not_yet: &'static [&'static str],
    /// Maximum number of tokens of a case that are run, in whole steps: a simulated device takes long.
    pub tokens: usize,
    /// A simulated device, which runs a sample of the cases.
    pub is_simulated: bool,
}

/// The most that an op's output may be off: the norm of a row's difference over the norm of the row.
#[derive(Clone, Copy)]
pub struct Ops {
    /// Ops without matrices.
    pub plain: f64,
    /// Ops that multiply with a weight of this type.
    pub weight: fn(WeightType) -> f64,
    /// Ops that read a cache.
    pub cached: f64,
    /// Whether cases without a cache say anything that another row does not.
    pub only_cached: bool,
}

/// The most that golden logits may be off: the RMS of the difference over the standard deviation of the exact logits.
#[derive(Clone, Copy)]
pub struct Logits {
    /// For bf16 files, whose weights are exact.
    pub bf16: f64,
    /// For quantized files.
    pub quantized: Quantized,
}

/// The most that logits of a quantized file may be off.
#[derive(Clone, Copy)]
pub enum Quantized {
    /// This much: for backends that compute with plain activations.
    AtMost(f64),
    /// As much as llama.cpp is, which quantizes activations too: the figure of the file's card. Where there is none,
    /// `bytes` for types that meet activations of 8 bits and bf16's tolerance for the others.
    LlamaCpp { bytes: f64 },
}

/// The table.
pub fn rows() -> Vec<Row> {
    let row = |name: &str, backend: Shared, ops: Ops, logits| {
        let model = if ops.only_cached { None } else { Some(2e-5) };
        Row {
            name: name.into(),
            backend,
            blocks: None,
            twin: None,
            ops,
            logits,
            model,
            cut: 0.0,
            not_yet: &[],
            tokens: usize::MAX,
            is_simulated: false,
        }
    };
    let exact = Ops { plain: 0.0, weight: |_| 0.0, cached: 0.0, only_cached: false };
    let ops = Ops { plain: CPU_PLAIN, weight: cpu_weight, cached: 3e-6, only_cached: false };
    // 1.8e-6 and 1.7e-3 are measured of attention.
    let half = Ops { cached: 3e-3, only_cached: true, ..ops };
    let reference = Logits { bf16: 1e-5, quantized: Quantized::AtMost(1e-4) };
    // llama.cpp is off by 0.011 to 0.038 on files whose types meet activations of 8 bits.
    let cpu = Logits { bf16: 2e-3, quantized: Quantized::LlamaCpp { bytes: 3e-2 } };
    let mut rows = vec![
        row("reference", Arc::new(Reference), exact, Some(reference)),
        row("cpu scalar, f32 cache", Arc::new(cpu_with(Isa::Scalar, 1, CacheType::F32)), ops, None),
        row("cpu scalar, f16 cache", Arc::new(cpu_with(Isa::Scalar, 1, CacheType::F16)), half, None),
    ];
    for isa in isas().filter(|&isa| isa != Isa::Scalar) {
        for (i, (cache, ops)) in [(CacheType::F32, ops), (CacheType::F16, half)].into_iter().enumerate() {
            // The other instruction sets give the best one's bits, which is enough for golden logits.
            let logits = (isa == Isa::best() && cache == CacheType::F16).then_some(cpu);
            let twin = Some(rows[1 + i].name.clone());
            let name = format!("cpu {isa}, {} cache", ["f32", "f16"][i]);
            rows.push(Row { twin, ..row(&name, Arc::new(cpu_with(isa, 2, cache)), ops, logits) });
        }
    }
    if let Some(row) = rows.get_mut(2).filter(|_| Isa::best() == Isa::Scalar) {
        row.logits = Some(cpu);
    }
    // Queries and shares become integers of 16 bits; 1.1e-4 is measured of attention.
    let blocks = Ops { cached: 2e-4, only_cached: true, ..ops };
    for cache in BLOCKS {
        let first = format!("cpu scalar, {cache} cache");
        let is_enough = |isa: &Isa| cache.k == cache.v || [Isa::Scalar, Isa::best()].contains(isa);
        for isa in isas().filter(is_enough) {
            let name = format!("cpu {isa}, {cache} cache");
            let twin = (isa != Isa::Scalar).then(|| first.clone());
            let backend = Arc::new(cpu_with(isa, 1 + usize::from(twin.is_some()), cache));
            rows.push(Row { twin, blocks: Some(cache), ..row(&name, backend, blocks, None) });
        }
    }
    rows.extend(cuda_rows());
    chosen(rows)
}

/// Caches of blocks.
pub const BLOCKS: [CacheType; 5] = [
    CacheType::Q8_0,
    CacheType { k: KvType::Q8_0, v: KvType::F32 },
    CacheType { k: KvType::F16, v: KvType::Q8_0 },
    CacheType::Q4_0,
    CacheType { k: KvType::Q8_0, v: KvType::Q4_0 },
];

impl Row {
    /// Whether the row's cache can hold what the plan puts there. Rows of blocks differ from others in caches alone:
    /// they have nothing to do with plans without one.
    pub fn fits(&self, plan: &Plan) -> bool {
        self.blocks.is_none_or(|cache| !plan.caches.is_empty() && cache.misfit(plan).is_none())
    }
}

/// The table for single ops, with what is too slow for all else.
pub fn rows_of_ops() -> Vec<Row> {
    match std::env::var("MOEBIUS_BACKEND").as_deref() {
        Ok("metal") => metal_rows(),
        Ok(_) => rows(),
        Err(_) => rows().into_iter().chain(metal_rows()).collect(),
    }
}

/// One backend by itself: on a machine with a GPU the others have been run elsewhere.
fn chosen(mut rows: Vec<Row>) -> Vec<Row> {
    if let Ok(name) = std::env::var("MOEBIUS_BACKEND") {
        rows.retain(|row| row.backend.name() == name);
        assert!(!rows.is_empty(), "no backend {name} here");
    }
    rows
}

/// The first GPU, with a cache of this type; says so where there is none.
pub fn gpu(cache: CacheType) -> Option<Cuda> {
    let arch = std::env::var("MOEBIUS_CUDA_ARCH").ok().and_then(|arch| arch.parse().ok());
    arch.into_iter().for_each(cuda::use_older_arch);
    let found = cuda::devices();
    match &found {
        Ok(found) if found.devices.first().is_some_and(|device| device.unusable.is_none()) => {
            let cubins = Some(std::env::temp_dir().join("moebius-test-cubins"));
            let [kernels, ahead] =
                ["MOEBIUS_KERNELS", "MOEBIUS_CUBINS"].map(|name| std::env::var_os(name).map(Into::into));
            Some(Cuda { cache, cubins, kernels, ahead, ..Cuda::default() })
        }
        _ => {
            println!("skipped cuda: {found:?}");
            None
        }
    }
}

/// A GPU in every type of cache. Products of many rows round activations to bf16, those of few rows to 8 or 16 bits
/// with quantized weights, so a near tie may go to other experts in another cut.
fn cuda_rows() -> Vec<Row> {
    let row = |name: &str, cache, ops, logits| {
        let backend: Shared = Arc::new(gpu(cache)?);
        Some(Row {
            name: name.into(),
            backend,
            blocks: None,
            twin: None,
            ops,
            logits,
            model: None,
            cut: 3e-2,
            not_yet: &[],
            tokens: usize::MAX,
            is_simulated: false,
        })
    };
    let ops = Ops { plain: 1e-5, weight: cuda_weight, cached: 1e-5, only_cached: false };
    let half = Ops { cached: 4e-3, only_cached: true, ..ops };
    let logits = Logits { bf16: 2e-2, quantized: Quantized::LlamaCpp { bytes: 3e-2 } };
    let rows =
        [row("cuda, f32 cache", CacheType::F32, ops, None), row("cuda, f16 cache", CacheType::F16, half, Some(logits))];
    // Experts on the host, copied for prompts.
    let hosted = gpu(CacheType::F16).map(|gpu| {
        let host = Some(Host { room: 0, copies_from: Some(30), cpu: Cpu::default(), moves: Moves::Never });
        let row = row("cuda, f16 cache, experts on the host", CacheType::F16, half, Some(logits))?;
        Some(Row { backend: Arc::new(Cuda { host, ..gpu }), ..row })
    });
    // Prompts read the numbers of blocks rounded to f16.
    let blocks = Ops { cached: 1e-3, only_cached: true, ..ops };
    let blocks = [CacheType::Q8_0, CacheType { k: KvType::F16, v: KvType::Q8_0 }].map(|cache| {
        let row = row(&format!("cuda, {cache} cache"), cache, blocks, None)?;
        Some(Row { blocks: Some(cache), ..row })
    });
    rows.into_iter().chain(hosted).chain(blocks).flatten().collect()
}

/// A simulated Apple GPU with a cache of this type, which runs as these options say; skips where there is no clang.
pub fn simulated(cache: CacheType, options: Options) -> Option<Metal> {
    if let Err(why) = metal_sim::clang::Clang::find() {
        super::fixtures::skip(why);
        return None;
    }
    let open = move || match Sim::new(options.clone()) {
        Ok(sim) => Ok(Box::new(sim) as Box<dyn Gpu>),
        Err(why) => Err(GpuError::Lost(format!("{why:#}"))),
    };
    Some(Metal { open: Arc::new(open), cache, maps_weights: false, tuning: Tuning::default() })
}

/// A simulated GPU of which one kernel is changed.
struct Rewritten {
    sim: Sim,
    kernel: &'static str,
    from: &'static str,
    to: &'static str,
}

impl Gpu for Rewritten {
    hand_on!(sim: caps alloc map write read threads submit wait);
    fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError> {
        let mut units = units.to_vec();
        if !self.from.is_empty() {
            for unit in units.iter_mut().filter(|unit| unit.kernel == self.kernel) {
                assert!(unit.source.contains(self.from), "{} has changed: no {}", self.kernel, self.from);
                unit.source = unit.source.replace(self.from, self.to);
            }
        }
        self.sim.build(&units)
    }
}

/// The backend on a simulated GPU on which one text replaces another in a kernel's source, headers included; there is
/// a clang.
pub fn rewritten(options: Options, kernel: &'static str, from: &'static str, to: &'static str) -> Metal {
    let open = move || {
        let sim = Sim::new(options.clone()).map_err(|why| GpuError::Lost(format!("{why:#}")))?;
        Ok(Box::new(Rewritten { sim, kernel, from, to }) as Box<dyn Gpu>)
    };
    Metal { open: Arc::new(open), cache: CacheType::F32, maps_weights: false, tuning: Tuning::default() }
}

/// `MOEBIUS_WIDE` asks for more than there is time for at each change.
pub fn wide() -> bool {
    std::env::var_os("MOEBIUS_WIDE").is_some()
}

/// Orders of threads that the simulated GPU runs in: forward, and with `MOEBIUS_SCHEDULES=all` every other, for which
/// there is no time at each change. All must give the same bits.
pub fn schedules() -> &'static [Schedule] {
    let n = if std::env::var_os("MOEBIUS_SCHEDULES").is_some() { Schedule::ALL.len() } else { 1 };
    &Schedule::ALL[..n]
}

/// A GPU that runs in this order: lists of every other one run in `wait`, and each draws its own random numbers.
pub fn scheduled(schedule: Schedule) -> Options {
    let moment = if (schedule as usize).is_multiple_of(2) { Moment::Submit } else { Moment::Wait };
    Options { schedule, moment, seed: 1 + schedule as u32, ..Options::default() }
}

/// The Metal backend on a simulated GPU, in every type of cache and in every order of threads that is asked for.
/// Activations are f32 throughout.
pub fn metal_rows() -> Vec<Row> {
    let row = |cache: CacheType, schedule: Schedule, ops| {
        // Small matrices too take the forms of large ones.
        let tuning = Tuning { many: 5, ..Tuning::default() };
        let backend: Shared = Arc::new(Metal { tuning, ..simulated(cache, scheduled(schedule))? });
        let name = |schedule| format!("metal {schedule:?}, {cache:?} cache").to_lowercase();
        Some(Row {
            name: name(schedule),
            backend,
            blocks: cache.has_blocks().then_some(cache),
            twin: (schedule != Schedule::Forward).then(|| name(Schedule::Forward)),
            ops,
            logits: None,
            model: Some(2e-5),
            cut: 2e-5,
            not_yet: &[],
            tokens: if wide() { usize::MAX } else { 40 },
            is_simulated: true,
        })
    };
    let ops = Ops { plain: 1e-5, weight: |_| 1e-5, cached: 1e-5, only_cached: false };
    let half = Ops { cached: 3e-3, only_cached: true, ..ops };
    let blocks = Ops { only_cached: true, ..ops };
    let caches = [(CacheType::F32, ops), (CacheType::F16, half), (CacheType::Q8_0, blocks)];
    let rows = caches.into_iter().flat_map(|(cache, ops)| schedules().iter().map(move |&order| (cache, order, ops)));
    rows.filter_map(|(cache, order, ops)| row(cache, order, ops)).collect()
}

/// What rounded activations cost a GPU, by the type of the weights that they meet.
fn cuda_weight(t: WeightType) -> f64 {
    match t.act() {
        ActKind::F32 | ActKind::Block32 => 6e-3,
        ActKind::Byte32 | ActKind::Block256 => 2e-2,
    }
}

/// Rows that the golden logits are run on.
pub fn golden() -> impl Iterator<Item = (Row, Logits)> {
    rows().into_iter().filter_map(|row| row.logits.map(|logits| (row, logits)))
}

/// The table without rows whose bits another gives.
pub fn distinct() -> Vec<Row> {
    let mut rows = rows();
    let twins: Vec<String> = rows.iter().filter_map(|row| row.twin.clone()).collect();
    rows.retain(|row| !twins.contains(&row.name));
    rows
}

/// Every weight type, or those that `MOEBIUS_TYPES` names: on a GPU the kernels of all take long to compile.
pub fn types() -> impl Iterator<Item = WeightType> {
    let names = std::env::var("MOEBIUS_TYPES").ok();
    let is_named = move |t: &WeightType| {
        names.as_ref().is_none_or(|names| names.split_whitespace().any(|name| name == t.to_string()))
    };
    WeightType::ALL.into_iter().filter(is_named)
}

/// What quantized activations cost the CPU, by the type of the weights that they meet; after each line the largest
/// error of a row in the cases (`cargo test -p conformance --test it ops:: -- --nocapture` prints it).
fn cpu_weight(t: WeightType) -> f64 {
    match t {
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => CPU_PLAIN, // 1.8e-7
        WeightType::NVFP4 | WeightType::NVFP4_SCALED | WeightType::F8_E4M3 => CPU_PLAIN,
        // Activations of 16 bits.
        WeightType::Q8_0 => 4e-5,                                 // 2.3e-5
        WeightType::Affine(affine) if affine.bits() == 8 => 4e-5, // 2.3e-5
        // Activations of 8 bits.
        WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q5_0 | WeightType::Q5_1 => 8e-3, // 5.9e-3
        WeightType::IQ4_NL | WeightType::IQ4_XS => 8e-3,                                   // 5.1e-3
        WeightType::MXFP4 | WeightType::MXFP4_PLANAR => 8e-3,                              // 6.5e-3
        WeightType::Q2_K | WeightType::Q3_K | WeightType::Q4_K => 8e-3,                    // 5.1e-3
        WeightType::Q5_K | WeightType::Q6_K => 8e-3,                                       // 6.7e-3
        WeightType::Affine(_) => 8e-3,                                                     // 6.3e-3
        WeightType::IQ2_XXS | WeightType::IQ2_XS | WeightType::IQ2_S => 8e-3,
        WeightType::IQ3_XXS | WeightType::IQ3_S => 9e-3, // 8.4e-3, in a row of 5
        WeightType::IQ1_S | WeightType::IQ1_M | WeightType::TQ1_0 | WeightType::TQ2_0 => 8e-3,
    }
}

/// The most that the CPU's ops without matrices are off; 7e-7 is measured.
const CPU_PLAIN: f64 = 1e-6;

/// Instruction sets of this machine.
pub fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

/// A CPU; where weights lie makes no difference.
pub fn cpu_with(isa: Isa, threads: usize, cache: CacheType) -> Cpu {
    let streamed = Policy::Stream { slabs: 0 };
    let residency = [Policy::CopyAll, Policy::Mapped, Policy::CopyDense, streamed][(isa as usize + threads) % 4];
    Cpu { isa, threads, cache, residency }
}
