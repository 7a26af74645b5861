//! From a file name to something that runs: checkpoint, plan, program, engine.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow, bail, ensure};
use backend::cpu::{CacheType, Cpu, Isa};
use backend::cuda::split::{Host, Moves, Split};
use backend::cuda::{self, Cuda};
use backend::experts::layout::Layout;
use backend::metal::{self, Metal};
use backend::reference::Reference;
use backend::residency::{Policy, Residency};
use backend::{Backend, Batch, Footprint, InputSums, InputTrace, Limits, Part, Program, Tables};
use checkpoint::{Checkpoint, Kind};
use engine::folder;
use engine::formats::Format;
use engine::sampler::{Mirostat, SamplerParams};
use engine::scheduler::{Engine, Options, Pooling};
use engine::template::{Chat, ChatTemplate};
use engine::tokenizer::{Encode, Tokenizer};
use model::plan::{Plan, ValidPlan};
use serde_json::Value;

use crate::args::{BackendKind, CacheArg, CopyArg, EngineArgs, IsaArg, MovesArg, SamplingArgs, StepArgs};
use crate::device::{self, Device, Prefer};
use crate::memory::{self, Budget, Fit, Units, Wish};
use crate::out::note;
use crate::predict::Rates;
use crate::quantize::importance::Sums;
use crate::{embedded, input, machine, out, prompts, sampling};

/// An open model: its header, and what it computes.
pub struct Model {
    pub checkpoint: Arc<Checkpoint>,
    /// As the architecture wrote it; a backend lowers it.
    pub plan: ValidPlan,
    pub embedded: bool,
    /// A chat template in place of its own.
    pub template: Option<String>,
}

impl Model {
    /// The same, with the chat template of a file where one is named.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn with_template(self, file: Option<&Path>) -> Result<Model> {
        let template = file.map(input::text).transpose()?;
        Ok(Model { template: template.or(self.template), ..self })
    }
}

/// Opens the file named, or the embedded model. Reads headers only.
pub fn open(path: Option<&Path>) -> Result<Model> {
    let checkpoint = Arc::new(embedded::open(path)?);
    let plan = model::build(&checkpoint)?;
    Ok(Model { checkpoint, plan, embedded: path.is_none(), template: None })
}

/// What decides how a model runs.
#[derive(Clone, Debug)]
pub struct EngineSetup {
    pub threads: Option<usize>,
    pub ctx: Option<usize>,
    /// What computes.
    pub device: Device,
    pub step: StepArgs,
    pub prefix_cache: bool,
    /// Maximum number of sequences computed at a time.
    pub sequences: usize,
    /// Whether fewer will do where memory is short.
    pub fewer_will_do: bool,
    /// Positions of the cache over all of them; what `sequences` need and memory holds when `None`.
    pub cache_tokens: Option<usize>,
    /// Memory kept for requests and connections, in bytes; counts under `--memory` only.
    pub requests_bytes: usize,
    /// Memory that the process takes besides models, in bytes; what it takes now when `None`.
    pub resident_bytes: Option<usize>,
    /// Where prompt caches survive the engine.
    pub prompts: Option<prompts::Folder>,
    /// Whether inputs of products are to be summed, for which all of them have to be kept.
    pub sums_inputs: bool,
}

impl EngineSetup {
    /// For one conversation at a time, on the device that is named or preferred.
    ///
    /// # Errors
    /// As [`Device::choose`].
    pub fn of(args: &EngineArgs, prefer: Prefer) -> Result<EngineSetup> {
        Ok(EngineSetup {
            threads: args.threads,
            ctx: args.ctx,
            device: Device::choose(args.backend, prefer, args.device, device::of_cpu(&args.step))?,
            step: args.step,
            prefix_cache: true,
            sequences: 1,
            fewer_will_do: false,
            cache_tokens: None,
            requests_bytes: 0,
            resident_bytes: None,
            prompts: None,
            sums_inputs: false,
        })
    }

    /// The same on the CPU, which takes the place of a GPU.
    fn on_cpu(&self, why: &anyhow::Error) -> EngineSetup {
        EngineSetup { device: Device::cpu_because(out::chain(why)), ..self.clone() }
    }

    /// Whether the CPU takes the place of the device where that cannot be used: nobody named the GPU, or said how much
    /// of it may be taken.
    fn may_fall_back(&self) -> bool {
        self.device.chosen.is_some() && self.step.gpu_memory.is_none()
    }

    /// The backend and the name that tables show for it.
    fn backend(&self, checkpoint: &Checkpoint, plan: &Plan) -> Result<(Box<dyn Backend>, String)> {
        if self.kind() == BackendKind::Reference {
            return Ok((Box::new(Reference), "reference".into()));
        }
        let cache = self.cache();
        if self.kind() == BackendKind::Metal {
            if let Some(why) = metal::device().map_or_else(Some, |device| device.unusable) {
                bail!("use Metal: {why}");
            }
            let maps_weights = !matches!(self.step.copy_weights, CopyArg::All | CopyArg::Dense);
            let mut metal = Metal::system(cache, maps_weights);
            metal.tuning = tested(&metal, plan)?;
            if self.sums_inputs {
                metal.tuning.off = metal::Off::ALL;
            }
            return Ok((Box::new(metal), "Metal".into()));
        }
        if self.kind() == BackendKind::Cuda {
            return Ok((Box::new(self.cuda()), "CUDA".into()));
        }
        let cpu = self.cpu(self.residency(checkpoint, plan))?;
        Ok((Box::new(cpu), cpu_name(&cpu)))
    }

    /// The GPU, with all weights.
    pub fn cuda(&self) -> Cuda {
        let cubins = machine::cache_folder().map(|folder| folder.join("cuda"));
        // For work on kernels: sources that take the place of the embedded ones.
        let kernels = std::env::var_os("MOEBIUS_KERNELS").map(Into::into);
        let (device, cache, ahead) = (self.device.ordinal, self.cache(), machine::kernels_folder());
        let progress = Some(cuda::Progress(machine::show_compiling));
        Cuda { device, cache, cubins, kernels, ahead, progress, host: None }
    }

    /// What makes a GPU with so many bytes of routed experts, the CPU beside it.
    fn split_cuda(&self) -> Result<impl Fn(usize) -> Cuda> {
        let residency = if self.step.copy_weights == CopyArg::All { Policy::CopyAll } else { Policy::Mapped };
        let (cuda, cpu, moves) = (
            self.cuda(),
            self.cpu(residency)?,
            match self.step.hot_experts {
                MovesArg::Auto => Moves::WhenFaster,
                MovesArg::Never => Moves::Never,
                MovesArg::Always => Moves::Always,
            },
        );
        Ok(move |room| Cuda { host: Some(Host { room, copies_from: None, cpu, moves }), ..cuda.clone() })
    }

    /// Whether routed experts may stay in host memory: the model has some, and a GPU computes.
    fn may_split(&self, plan: &Plan) -> Result<bool> {
        let is_cuda = self.kind() == BackendKind::Cuda;
        ensure!(
            is_cuda || self.step.gpu_memory.is_none(),
            "keep within --gpu-memory: that is for NVIDIA GPUs, add --backend cuda"
        );
        Ok(is_cuda && plan.has_experts())
    }

    /// The GPU and its plan where it does not hold all weights and routed experts can stay in host memory. A GPU that
    /// nobody named has to hold a context of a habit's length besides.
    pub fn split(&self, checkpoint: &Checkpoint, plan: &ValidPlan) -> Result<Option<(Cuda, ValidPlan, Budget, Fit)>> {
        if !self.may_split(plan)? {
            return Ok(None);
        }
        let cuda = self.cuda();
        let plan = cuda.lower(plan.clone())?;
        let (budget, wish) = (self.budget(&plan), self.wish());
        let is_enough = |fit: &Fit| !self.may_fall_back() || fit.is_roomy(&wish, plan.n_ctx_train);
        let whole = memory::fit(&cuda, &plan, &wish, budget);
        let budget = match budget {
            Budget::Free(None) => return Ok(None),
            Budget::Free(Some(free))
                if whole.as_ref().is_ok_and(|fit| fit.footprint.total() <= free && is_enough(fit)) =>
            {
                return Ok(None);
            }
            Budget::Promise { .. } if whole.is_ok() => return Ok(None),
            Budget::Free(Some(bytes)) => Budget::Promise { bytes, overhead: 0 },
            promise @ Budget::Promise { .. } => promise,
        };
        match memory::fit_split(self.split_cuda()?, &plan, &wish, self.step.batch.is_some(), budget) {
            // What says more of a GPU that is too small comes later.
            Err(_) if self.may_fall_back() => Ok(None),
            Ok((_, fit)) if !is_enough(&fit) => Ok(None),
            fit => {
                let (cuda, fit) = fit?;
                Ok(Some((self.fit_host(checkpoint, cuda, &plan, fit.limits)?, plan, budget, fit)))
            }
        }
    }

    /// The same, with experts in host memory that `--memory` holds: all of them, or some, the others being read from
    /// disk when they are wanted.
    fn fit_host(&self, checkpoint: &Checkpoint, cuda: Cuda, plan: &ValidPlan, limits: Limits) -> Result<Cuda> {
        let (Some(_), Some(bytes), Some(host)) = (self.step.gpu_memory, self.step.memory, cuda.host) else {
            return Ok(cuda);
        };
        // What was read on its way to the GPU stays mapped as long as the host's half lives.
        let mapped = cuda.footprint(plan, limits).weights();
        let budget = Budget::new(Some(bytes), plan, self.requests_bytes + mapped, self.resident_bytes);
        if cuda.host_footprint(plan, limits).total() <= budget.bytes().unwrap_or(0) {
            return Ok(cuda);
        }
        ensure!(
            self.step.copy_weights == CopyArg::Auto && is_on_disk(checkpoint),
            "keep within --memory: experts can be read from disk where the model is in files of its own and \
             --copy-weights does not say where weights are to be"
        );
        let with = |slabs| {
            let cpu = Cpu { residency: Policy::Stream { slabs }, ..host.cpu };
            Cuda { host: Some(Host { cpu, ..host }), ..cuda.clone() }
        };
        memory::fit_host(with, plan, limits, budget)
    }

    /// What a split is expected to give, where it is the engine's own choice.
    ///
    /// # Errors
    /// The CPU alone is expected to be faster.
    fn predict(&self, plan: &Plan, split: &Split) -> Result<Option<Predicted>> {
        if !self.may_fall_back() || split.host().next().is_none() {
            return Ok(None);
        }
        let rates = Rates::measure(self.device.ordinal, machine::threads(self.threads)?, None)?;
        let (shared, alone) = (rates.shared(plan, split).0, rates.alone(plan));
        let name = self.device.chosen.as_deref().unwrap_or_default();
        ensure!(
            shared > alone,
            "the model does not fit {name}, and the CPU is expected to be faster alone: {alone:.1} tok/s against \
             {shared:.1} (--backend cuda takes both)"
        );
        Ok(Some(Predicted { shared, alone }))
    }

    /// A GPU that keeps within its promise for one sequence of `positions`, experts in host memory where it must.
    fn whole_split(&self, model: &Model, positions: usize) -> Result<Option<(Box<dyn Backend>, ValidPlan, Limits)>> {
        if !self.may_split(&model.plan)? || self.step.gpu_memory.is_none() {
            return Ok(None);
        }
        let cuda = self.cuda();
        let plan = cuda.lower(model.plan.clone())?;
        let (budget, batch) = (self.budget(&plan), self.step.batch(self.kind()));
        if let Ok(limits) = memory::fit_whole(&cuda, &plan, batch, positions, budget) {
            return Ok(Some((Box::new(cuda), plan, limits)));
        }
        let (cuda, limits) = memory::fit_whole_streamed(self.split_cuda()?, &plan, batch, positions, budget)?;
        Ok(Some((Box::new(self.fit_host(&model.checkpoint, cuda, &plan, limits)?), plan, limits)))
    }

    /// Elements of the cache.
    pub fn cache(&self) -> CacheType {
        match self.step.cache_type {
            CacheArg::F16 => CacheType::F16,
            CacheArg::F32 => CacheType::F32,
        }
    }

    /// The CPU with these residencies.
    fn cpu(&self, residency: Policy) -> Result<Cpu> {
        let isa = match self.step.isa {
            None => Isa::best(),
            Some(IsaArg::Scalar) => Isa::Scalar,
            Some(IsaArg::Avx2) => Isa::Avx2,
            Some(IsaArg::Avx512) => Isa::Avx512,
            Some(IsaArg::Amx) => Isa::Amx,
            Some(IsaArg::Neon) => Isa::Neon,
            Some(IsaArg::I8mm) => Isa::I8mm,
        };
        isa.check()?;
        let threads = machine::threads(self.threads)?;
        Ok(Cpu { isa, threads, cache: self.cache(), residency })
    }

    /// Whether experts may be streamed from disk: where a promise is to be kept, experts are in files, and the user
    /// does not say where weights are to be.
    fn may_stream(&self, checkpoint: &Checkpoint, plan: &Plan) -> bool {
        let is_free = self.kind() == BackendKind::Cpu && self.step.copy_weights == CopyArg::Auto;
        is_free && self.step.memory.is_some() && plan.has_experts() && is_on_disk(checkpoint)
    }

    /// What is decided where a promise does not hold all weights and experts can be streamed.
    fn prepare_streamed(&self, checkpoint: &Checkpoint, plan: &ValidPlan) -> Result<Option<Prepared>> {
        if !self.may_stream(checkpoint, plan) {
            return Ok(None);
        }
        let cpu = self.cpu(Policy::Mapped)?;
        let plan = cpu.lower(plan.clone())?;
        let (budget, wish) = (self.budget(&plan), self.wish());
        if memory::fit(&cpu, &plan, &wish, budget).is_ok() {
            return Ok(None);
        }
        let with = |slabs| Cpu { residency: Policy::Stream { slabs }, ..cpu };
        let batch = self.step.batch.unwrap_or_else(|| memory::streamed_batch(&with(0), &plan, &wish, budget));
        let (cpu, fit) = memory::fit_streamed(with, &plan, &Wish { batch, ..wish }, budget)?;
        let layout = cpu.layout(&plan);
        let (backend, name, device) = (Box::new(cpu), cpu_name(&cpu), self.device.clone());
        let (split, predicted, host_bytes) = (Split::none(), None, 0);
        let _open = None;
        Ok(Some(Prepared { backend, name, plan, budget, fit, host_bytes, layout, split, predicted, device, _open }))
    }

    /// What computes.
    fn kind(&self) -> BackendKind {
        self.device.kind
    }

    /// Which weights are copied: the user's choice, or what pays.
    fn residency(&self, checkpoint: &Checkpoint, plan: &Plan) -> Policy {
        match self.step.copy_weights {
            CopyArg::None => Policy::Mapped,
            CopyArg::Dense => Policy::CopyDense,
            CopyArg::All => Policy::CopyAll,
            CopyArg::Auto => Policy::choose(plan, checkpoint, machine::free_memory().unwrap_or(0)),
        }
    }

    /// What a user wants of the engine.
    pub fn wish(&self) -> Wish {
        Wish {
            ctx: self.ctx,
            sequences: self.sequences,
            fewer_will_do: self.fewer_will_do,
            cache_tokens: self.cache_tokens,
            batch: self.step.batch(self.kind()),
        }
    }

    /// The memory that the backend may take: the host's, or the device's.
    fn budget(&self, plan: &ValidPlan) -> Budget {
        match (self.kind(), self.step.memory) {
            (BackendKind::Metal, None) => {
                // The GPU wires mapped weights too, and 2 GiB are left to the rest of the machine.
                let bytes = metal::device().map_or(0, |device| device.budget_bytes).saturating_sub(2 << 30);
                Budget::Promise { bytes, overhead: 0 }
            }
            (BackendKind::Cuda, _) if self.step.gpu_memory.is_some() => Budget::Promise {
                bytes: self.step.gpu_memory.unwrap_or(0),
                overhead: driver_bytes(self.device.ordinal),
            },
            // Of the GPU alone, as long as nothing says what that is to hold.
            (BackendKind::Cuda | BackendKind::Metal, Some(bytes)) => Budget::Promise { bytes, overhead: 0 },
            (BackendKind::Cuda, None) => Budget::Free(free_on_device(self.device.ordinal)),
            (BackendKind::Cpu | BackendKind::Reference | BackendKind::Auto, memory) => {
                Budget::new(memory, plan, self.requests_bytes + self.prompts_bytes(plan), self.resident_bytes)
            }
        }
    }

    /// Memory for pieces of prompt caches on their way from and to a folder.
    fn prompts_bytes(&self, plan: &ValidPlan) -> usize {
        let Some(cpu) = self.prompts.as_ref().and_then(|_| self.cpu(Policy::Mapped).ok()) else { return 0 };
        let units = Units::of(&cpu, plan);
        prompts::MAX_BUFFERS * units.page.max(units.window_page).max(units.state)
    }

    /// A backend with streamed experts for one sequence of `positions`, where a promise does not hold all weights.
    fn whole_streamed(&self, model: &Model, positions: usize) -> Result<Option<(Box<dyn Backend>, ValidPlan, Limits)>> {
        if !self.may_stream(&model.checkpoint, &model.plan) {
            return Ok(None);
        }
        let cpu = self.cpu(Policy::Mapped)?;
        let plan = cpu.lower(model.plan.clone())?;
        let (budget, batch) = (Budget::new(self.step.memory, &plan, 0, None), self.step.batch(self.kind()));
        if memory::fit_whole(&cpu, &plan, batch, positions, budget).is_ok() {
            return Ok(None);
        }
        let with = |slabs| Cpu { residency: Policy::Stream { slabs }, ..cpu };
        let (cpu, limits) = memory::fit_whole_streamed(with, &plan, batch, positions, budget)?;
        Ok(Some((Box::new(cpu), plan, limits)))
    }

    /// The backend, the plan that it runs, and the limits that the memory holds. The CPU takes the place of a GPU that
    /// nobody named and that the model does not fit.
    pub fn prepare(&self, checkpoint: &Checkpoint, plan: ValidPlan) -> Result<Prepared> {
        if self.may_fall_back() {
            return match self.prepare_here(checkpoint, plan.clone()) {
                Ok(prepared) => Ok(prepared),
                Err(why) => self.on_cpu(&why).prepare_here(checkpoint, plan),
            };
        }
        self.prepare_here(checkpoint, plan)
    }

    fn prepare_here(&self, checkpoint: &Checkpoint, plan: ValidPlan) -> Result<Prepared> {
        if let (None, Some(bytes)) = (self.resident_bytes, machine::resident_memory()) {
            // One look at what the process takes, for all that is decided: a second one may find more.
            return EngineSetup { resident_bytes: Some(bytes), ..self.clone() }.prepare_here(checkpoint, plan);
        }
        if let Some(prepared) = self.prepare_streamed(checkpoint, &plan)? {
            return Ok(prepared);
        }
        let open = match self.kind() {
            BackendKind::Cuda => Some(cuda::Open::new(self.device.ordinal).map_err(|why| anyhow!("use CUDA: {why}"))?),
            _ => None,
        };
        if let Some((cuda, plan, budget, fit)) = self.split(checkpoint, &plan)? {
            let (split, layout, device) = (cuda.split(&plan), cuda.host_layout(&plan), self.device.clone());
            let predicted = self.predict(&plan, &split)?;
            let host_bytes = cuda.host_footprint(&plan, fit.limits).total() + fit.footprint.weights();
            let (backend, name, _open) = (Box::new(cuda), "CUDA".into(), open);
            return Ok(Prepared {
                backend,
                name,
                plan,
                budget,
                fit,
                host_bytes,
                layout,
                split,
                predicted,
                device,
                _open,
            });
        }
        let (backend, name) = self.backend(checkpoint, &plan)?;
        let plan = backend.lower(plan)?;
        let budget = self.budget(&plan);
        let fit = match (&open, budget) {
            (Some(open), Budget::Free(Some(free))) => {
                memory::fit_device(&*backend, &plan, &self.wish(), free, open.name(), self.may_fall_back())?
            }
            _ => memory::fit(&*backend, &plan, &self.wish(), budget)?,
        };
        let (layout, split, predicted, host_bytes) = (Layout::default(), Split::none(), None, 0);
        let (device, _open) = (self.device.clone(), open);
        Ok(Prepared { backend, name, plan, budget, fit, host_bytes, layout, split, predicted, device, _open })
    }

    /// The program of what is prepared. Where a GPU that nobody named fails to start, the CPU takes its place and
    /// `plan` is prepared anew.
    fn compile(
        &self,
        checkpoint: &Arc<Checkpoint>,
        prepared: Prepared,
        plan: ValidPlan,
    ) -> Result<(Prepared, Box<dyn Program>)> {
        let compile =
            |prepared: &Prepared| prepared.backend.compile(&prepared.plan, Arc::clone(checkpoint), prepared.fit.limits);
        match compile(&prepared) {
            Err(why) if self.may_fall_back() && prepared.device.chosen.is_some() => {
                drop(prepared);
                let prepared = self.on_cpu(&why.into()).prepare_here(checkpoint, plan)?;
                let program = compile(&prepared)?;
                Ok((prepared, program))
            }
            compiled => Ok((prepared, compiled?)),
        }
    }
}

/// Whether experts can be read from files while others run.
fn is_on_disk(checkpoint: &Checkpoint) -> bool {
    checkpoint.files().iter().all(|file| file.identity().is_some() || file.is_repacked())
}

/// What tables show for the CPU.
fn cpu_name(cpu: &Cpu) -> String {
    format!("CPU {}", cpu.isa.name())
}

/// Bytes that a model takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Of the host's memory, or of the one memory that a GPU shares with it.
    pub host: usize,
    /// Of a GPU's own.
    pub gpu: usize,
    /// Which one.
    pub ordinal: usize,
}

/// Bytes of a GPU that a program's kernels, graphs and tables take: 110 to 150 MB beside Qwen3-30B-A3B on an H200.
const KERNELS: usize = 192 << 20;

/// Bytes of a GPU that go to the driver beside a program: its context, kernels and graphs. What the context takes is
/// what is taken when the first model asks: later models of this process hold memory of their own.
fn driver_bytes(ordinal: usize) -> usize {
    static CONTEXTS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());
    /// What a context takes at most; where more is taken, others take it.
    const CONTEXT: usize = 640 << 20;
    let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, bytes)) = contexts.iter().find(|(known, _)| *known == ordinal) {
        return bytes + KERNELS;
    }
    let memory = cuda::Open::new(ordinal).ok().and_then(|open| open.memory());
    let taken = memory.map_or(CONTEXT, |(free, total)| total.saturating_sub(free)).min(CONTEXT);
    contexts.push((ordinal, taken));
    taken + KERNELS
}

/// Bytes that a model may take of a GPU: a sixteenth is left to kernels, graphs and others.
fn free_on_device(ordinal: usize) -> Option<usize> {
    // 0 where the device does not say.
    let free = cuda::Open::new(ordinal).ok()?.memory().map_or(0, |(free, _)| free);
    Some(free - free / 16)
}

/// Bytes that models may take together where nobody says, their files included; `usize::MAX` where that is unknown.
pub fn free_memory(device: &Device) -> Held {
    let free = || machine::free_memory().map(|free| free - free / 8);
    let (host, gpu) = match device.kind {
        BackendKind::Cuda => (free(), free_on_device(device.ordinal)),
        BackendKind::Metal => (metal::device().ok().map(|device| device.budget_bytes), None),
        BackendKind::Cpu | BackendKind::Reference | BackendKind::Auto => (free(), None),
    };
    let [host, gpu] = [host, gpu].map(|bytes| bytes.unwrap_or(usize::MAX));
    Held { host, gpu, ordinal: device.ordinal }
}

/// The kernels that are right on this Mac's GPU: products in every form with the types of a plan, and every other kind.
/// That all are is kept in the cache folder, by GPU, system, version and what a plan has.
fn tested(metal: &Metal, plan: &Plan) -> Result<metal::Tuning> {
    let device = metal::device().map_or_else(|why| why, |device| device.name);
    let system = sysinfo::System::long_os_version().unwrap_or_default();
    let mut types: Vec<String> = plan.weights.iter().map(|decl| decl.dtype.to_string()).collect();
    types.sort();
    types.dedup();
    let kinds = metal::kinds(plan).join(", ");
    let key = format!("{device}; {system}; {}; {}; {kinds}\n", env!("CARGO_PKG_VERSION"), types.join(" "));
    let kept = machine::cache_folder().map(|folder| folder.join("metal-tested"));
    let known = kept.as_ref().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
    if known.lines().any(|line| line == key.trim_end()) {
        return Ok(metal.tuning);
    }
    let (tuning, wrong) = metal.self_test(plan)?;
    wrong.iter().for_each(|why| note!("Metal: {why}"));
    if let (true, Some(path)) = (wrong.is_empty(), kept) {
        // Where nothing can be kept, the next start tries again.
        let folder = path.parent().map(std::fs::create_dir_all);
        let _ = folder.and_then(Result::ok).map(|()| std::fs::write(path, known + &key));
    }
    Ok(tuning)
}

/// Everything that is decided before a program is compiled.
pub struct Prepared {
    pub backend: Box<dyn Backend>,
    /// What tables show for the backend.
    pub name: String,
    /// As the backend lowered it.
    pub plan: ValidPlan,
    pub budget: Budget,
    pub fit: Fit,
    /// Bytes that a program on a GPU takes of the host's memory where it shares its experts: those there and their
    /// rows, and weights in files that went to the GPU.
    pub host_bytes: usize,
    /// The slabs of experts that are streamed; none where they are not.
    pub layout: Layout,
    /// Which routed experts lie on a GPU; none where all weights are in one place.
    pub split: Split,
    /// Why they do, where nobody asked for it.
    predicted: Option<Predicted>,
    /// What computes in the end.
    pub device: Device,
    /// Keeps the device's context until a program has its own hold.
    _open: Option<cuda::Open>,
}

/// Tokens a second of one sequence that are expected of a GPU and the CPU together, and of the CPU alone.
#[derive(Clone, Copy, Debug)]
struct Predicted {
    shared: f64,
    alone: f64,
}

impl Prepared {
    /// What the model will take.
    pub fn held(&self) -> Held {
        let (bytes, later) = (self.fit.footprint.total(), memory::later_bytes(self.plan.n_vocab));
        match self.device.kind {
            BackendKind::Cuda => {
                Held { host: self.host_bytes + later, gpu: bytes + KERNELS, ordinal: self.device.ordinal }
            }
            _ => Held { host: bytes + later, ..Held::default() },
        }
    }

    /// What computes where nobody said, and what is where when experts do not lie with the other weights: a sentence
    /// each.
    pub fn placement(&self) -> Vec<String> {
        if let (Some(name), Some(Predicted { shared, alone })) = (&self.device.chosen, self.predicted) {
            let parted = self.parted().unwrap_or_default();
            return vec![format!(
                "computing on {name} and the CPU, {shared:.1} tok/s expected, {alone:.1} on the CPU alone (--backend \
                 cpu takes that): {parted}"
            )];
        }
        [self.device.note(), self.parted()].into_iter().flatten().collect()
    }

    /// What is where when experts are streamed or stay in host memory.
    fn parted(&self) -> Option<String> {
        let Budget::Promise { bytes, .. } = self.budget else { return None };
        if self.split.host().next().is_some() {
            let shown = |n: usize| machine::bytes(n as u64);
            let [on_device, on_host] = self.split.bytes().map(shown);
            let dense = shown(self.fit.dense_bytes(&self.split));
            let (all, n_host) = (self.split.layers().len(), self.split.host().count());
            let place = match self.layout.layers.is_empty() {
                true => "stay in host memory".to_string(),
                false => {
                    let (n, all) = (self.layout.n_slabs(), self.layout.n_experts());
                    let slabs = shown(self.layout.slab_bytes());
                    format!("are read from disk but for {n} of {all} experts ({slabs}) in host memory")
                }
            };
            return Some(format!(
                "{} of GPU memory: {dense} of weights that every token reads and the routed experts of {} of {all} \
                 layers ({on_device}); those of {n_host} layers ({on_host}) {place}; a context of {} positions",
                shown(bytes),
                all - n_host,
                self.fit.limits.max_positions
            ));
        }
        if self.layout.layers.is_empty() {
            return None;
        }
        let dense = self.fit.footprint.bytes(|part| matches!(part, Part::Weights(_, Residency::Copied)));
        let [bytes, dense, slabs] = [bytes, dense, self.layout.slab_bytes()].map(|n| machine::bytes(n as u64));
        let (n, all) = (self.layout.n_slabs(), self.layout.n_experts());
        Some(format!(
            "--memory {bytes}: {dense} of weights that every token reads and {n} of {all} experts ({slabs}) in memory, \
             the other experts are read from disk; a context of {} positions",
            self.fit.limits.max_positions
        ))
    }
}

/// A model behind an engine, ready for requests.
pub struct Session {
    pub engine: Engine,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
    /// How the model marks thoughts and calls: by its template, or as Hermes does where that says nothing of calls.
    pub format: Format,
    pub template_knows_tools: bool,
    pub backend: String,
    /// What computes in the end.
    pub device: BackendKind,
    pub description: String,
    pub arch: String,
    /// `Q4_K_M`, or the weight type that most bytes are in.
    pub file_type: String,
    pub n_vocab: usize,
    pub n_params: u64,
    pub size_bytes: u64,
    pub weight_bytes_per_token: u64,
    /// What one more page or state takes.
    pub units: Units,
    /// What its program takes.
    pub footprint: Footprint,
    /// What it takes in all, by place.
    pub held: Held,
    pub limits: Limits,
    /// Maximum number of sequences computed at a time.
    pub sequences: usize,
    pub embedded: bool,
    /// What computes where nobody said, and where weights are when experts are streamed.
    pub placement: Vec<String>,
    /// What the user should know before the first answer.
    pub warning: Option<String>,
    /// Whether the model thinks first; as its template has it when `None`.
    pub think: Option<bool>,
    /// How it makes one vector of a text.
    pub pooling: Pooling,
    /// It was trained to say whether a document answers a query.
    pub reranks: bool,
    /// The prompt of such a question, where the file has one.
    pub rerank_template: Option<String>,
    sampling: SamplerParams,
}

/// Starts an engine for one conversation at a time, on a GPU where there is one.
pub fn start(model: Model, args: &EngineArgs) -> Result<Session> {
    start_with(model, &EngineSetup::of(args, Prefer::Gpu)?)
}

/// Starts an engine.
pub fn start_with(model: Model, setup: &EngineSetup) -> Result<Session> {
    let prepared = setup.prepare(&model.checkpoint, model.plan.clone())?;
    start_prepared(model, setup, prepared)
}

/// Starts an engine of what `setup` has prepared of the model.
pub fn start_prepared(model: Model, setup: &EngineSetup, prepared: Prepared) -> Result<Session> {
    let Model { checkpoint, plan, embedded, template } = model;
    let tokenizer = Arc::new(Tokenizer::load(&checkpoint)?);
    let source = match template {
        Some(source) => Some(source),
        None => folder::chat_template(&checkpoint)?,
    };
    let template = source.as_deref().map(|source| compile_template(source, &tokenizer)).transpose()?;
    let source = source.unwrap_or_default();
    let template_knows_tools = Format::detect(&source).has_calls();
    let format =
        if template_knows_tools { Format::detect(&source) } else { Format::detect(&format!("{source}<tool_call>")) };
    let sampling = sampling::of_model(&checkpoint, embedded)?;
    let (prepared, program) = setup.compile(&checkpoint, prepared, plan)?;
    let (placement, held) = (prepared.placement(), prepared.held());
    let Prepared { backend, name, plan, fit, device, .. } = prepared;
    let Fit { limits, sequences, footprint } = fit;
    let warning = (limits.max_positions > plan.n_ctx_train && setup.ctx.is_some()).then(|| {
        let (ctx, trained) = (limits.max_positions, plan.n_ctx_train);
        format!("the context of {ctx} is beyond the {trained} that the model was trained with: text there may be noise")
    });
    let text = |key: &str| checkpoint.meta().opt_str(key).ok().flatten().map(str::to_string);
    let options = Options { prefix_cache: setup.prefix_cache, max_running: sequences, ..Options::default() };
    let mut engine = Engine::new(program, tokenizer.clone(), options)?;
    if let Some(folder) = &setup.prompts {
        let how = format!("{} {:?}", backend.name(), setup.step.cache_type);
        let identity = prompts::identity(&checkpoint, &plan, &how)?;
        ensure!(
            engine.set_store(identity, Box::new(folder.open(identity)?)),
            "keep prompts in {} (--cache-dir): {name} cannot save its cache",
            folder.path.display()
        );
    }
    Ok(Session {
        engine,
        template,
        format,
        template_knows_tools,
        backend: name,
        device: device.kind,
        held,
        description: describe(&checkpoint, &plan, embedded),
        arch: plan.arch.to_string(),
        file_type: file_type(&checkpoint),
        n_vocab: plan.n_vocab,
        n_params: n_params(&checkpoint),
        size_bytes: checkpoint.data_bytes() as u64,
        weight_bytes_per_token: plan.bytes_per_token() as u64,
        units: Units::of(&*backend, &plan),
        footprint,
        limits,
        sequences,
        placement,
        warning,
        think: None,
        pooling: pooling(&checkpoint),
        reranks: reranks(&checkpoint),
        rerank_template: text("tokenizer.chat_template.rerank"),
        sampling,
        embedded,
        tokenizer,
    })
}

impl Session {
    /// Tokens of a prompt taken as it is; names of special tokens in it count as those tokens.
    pub fn encode_raw(&self, prompt: &str) -> Vec<u32> {
        self.tokenizer.encode(prompt, Encode { add_special: true, parse_special: true })
    }

    /// Tokens of a conversation, the opening of the answer behind it.
    pub fn encode_chat(&self, messages: Vec<Value>) -> Result<Vec<u32>> {
        let template = self.template.as_ref().context("render the conversation: the model has no chat template")?;
        let messages = Value::Array(messages);
        // Templates have two names for the switch.
        let think = |on: bool| ["enable_thinking", "thinking"].map(|name| (name.to_string(), on.into()));
        let kwargs = self.think.map(|on| think(on).into_iter().collect());
        let text = template.render(&Chat { kwargs: kwargs.as_ref(), ..Chat::new(&messages) })?;
        let mut tokens = self.tokenizer.encode(&text, Encode { add_special: true, parse_special: true });
        // Templates that write the begin-of-text token themselves would get it twice.
        if let Some(bos) = self.tokenizer.bos()
            && tokens.starts_with(&[bos, bos])
        {
            tokens.remove(0);
        }
        Ok(tokens)
    }

    /// Whether a prompt ends inside a thought, so that the answer begins with it.
    pub fn opens_thought(&self, tokens: &[u32]) -> bool {
        // The mark and the blanks behind it are in the last few.
        let tail = &tokens[tokens.len().saturating_sub(16)..];
        self.format.opens_thought(&self.tokenizer.decode(tail))
    }

    /// `qwen3moe Q4_K_M`-like: architecture and type.
    pub fn short_name(&self) -> String {
        format!("{} {}", self.arch, self.file_type)
    }

    /// The model's own sampling.
    pub fn default_sampling(&self) -> SamplerParams {
        // DRY may repeat across the usual breaks between sentences and fields.
        let breakers = ["\n", ":", "\"", "*"].map(|text| self.tokenizer.encode(text, Encode::default()));
        SamplerParams { dry_breakers: breakers.to_vec(), ..self.sampling.clone() }
    }

    /// The user's sampling parameters over the model's defaults.
    pub fn sampling(&self, args: &SamplingArgs) -> Result<SamplerParams> {
        let mut params = self.default_sampling();
        apply(args, &mut params);
        params.seed = args.seed.unwrap_or_else(clock_seed);
        Ok(params)
    }
}

/// A seed from the clock, for text that differs from run to run.
fn clock_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64
}

/// Puts the user's parameters over the defaults.
fn apply(args: &SamplingArgs, params: &mut SamplerParams) {
    macro_rules! set {
        ($($field:ident = $arg:ident),* $(,)?) => { $(if let Some(value) = args.$arg { params.$field = value; })* };
    }
    set!(
        temperature = temperature,
        dynatemp_range = dynatemp_range,
        dynatemp_exponent = dynatemp_exponent,
        top_k = top_k,
        top_p = top_p,
        min_p = min_p,
        typical_p = typical,
        top_n_sigma = top_n_sigma,
        xtc_probability = xtc_probability,
        xtc_threshold = xtc_threshold,
        penalty_repeat = repeat_penalty,
        penalty_last_n = repeat_last_n,
        penalty_frequency = frequency_penalty,
        penalty_presence = presence_penalty,
        dry_multiplier = dry_multiplier,
        dry_base = dry_base,
        dry_allowed_length = dry_allowed_length,
        mirostat_tau = mirostat_tau,
        mirostat_eta = mirostat_eta,
    );
    params.mirostat = match args.mirostat {
        0 => Mirostat::Off,
        1 => Mirostat::V1,
        _ => Mirostat::V2,
    };
    params.logit_bias.extend_from_slice(&args.logit_bias);
}

/// The model's own chat template, if it has one.
pub fn template(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
    let Some(source) = folder::chat_template(checkpoint)? else { return Ok(None) };
    Ok(Some(compile_template(&source, tokenizer)?))
}

/// A template for the model of this tokenizer.
fn compile_template(source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate> {
    let token = |id: Option<u32>| {
        let bytes = id.and_then(|id| tokenizer.token_bytes(id)).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    };
    Ok(ChatTemplate::new(source, &token(tokenizer.bos()), &token(tokenizer.eos()))?)
}

/// GGUF's number of how states are pooled (`llama_pooling_type` in llama.cpp's llama.h).
fn pooling_type(checkpoint: &Checkpoint) -> Option<i128> {
    let meta = checkpoint.meta();
    let arch = meta.opt_str("general.architecture").ok().flatten()?;
    meta.get(&format!("{arch}.pooling_type"))?.to_int()
}

/// How a model makes one vector of a text: as its file says, else from the last token, as decoders are trained.
fn pooling(checkpoint: &Checkpoint) -> Pooling {
    match pooling_type(checkpoint) {
        Some(1) => Pooling::Mean,
        Some(2) => Pooling::First,
        _ => Pooling::Last,
    }
}

/// Whether a model ranks documents: its file says so, or its name does.
fn reranks(checkpoint: &Checkpoint) -> bool {
    let meta = checkpoint.meta();
    let name = meta.opt_str("general.name").ok().flatten().unwrap_or_default();
    let has_template = meta.get("tokenizer.chat_template.rerank").is_some();
    has_template
        || pooling_type(checkpoint) == Some(4)
        || [name, checkpoint.name()].iter().any(|name| name.to_lowercase().contains("rerank"))
}

/// Parameters of all tensors.
pub fn n_params(checkpoint: &Checkpoint) -> u64 {
    checkpoint.tensors().iter().map(|t| t.shape.iter().map(|&d| d as u64).product::<u64>()).sum()
}

/// `qwen3moe Q4_K_M`-like: architecture and type, behind the embedded model's name.
pub fn describe(checkpoint: &Checkpoint, plan: &Plan, embedded: bool) -> String {
    let kind = format!("{} {}", plan.arch, file_type(checkpoint));
    if embedded { format!("{} {kind}", embedded::NAME) } else { kind }
}

/// How a file is quantised: what it says of itself (`general.file_type`, numbered as `llama_ftype` in llama.cpp's
/// llama.h), else the weight type that most bytes are in.
pub fn file_type(checkpoint: &Checkpoint) -> String {
    #[rustfmt::skip]
    const NAMES: [&str; 39] = [
        "F32", "F16", "Q4_0", "Q4_1", "", "", "", "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S",
        "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL",
        "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "MXFP4",
    ];
    let said = checkpoint.meta().get("general.file_type").and_then(|value| value.to_int());
    let said = said.and_then(|n| NAMES.get(usize::try_from(n).ok()?)).filter(|name| !name.is_empty());
    if let Some(name) = said {
        return name.to_string();
    }
    let mut bytes = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        *bytes.entry(tensor.dtype).or_insert(0usize) += tensor.total_bytes();
    }
    bytes.iter().max_by_key(|(_, bytes)| **bytes).map_or(String::new(), |(dtype, _)| dtype.name().to_string())
}

/// One sequence fed to a program token by token, for commands that want logits and not text.
pub struct Sequence {
    program: Box<dyn Program>,
    /// As the backend lowered it.
    plan: ValidPlan,
    batch: Batch,
    pages: Vec<u32>,
    position: usize,
}

impl Sequence {
    /// Compiles the model for a sequence of at most `positions`.
    pub fn start(model: &Model, args: &EngineArgs, positions: usize) -> Result<Sequence> {
        Sequence::start_with(model, &EngineSetup::of(args, Prefer::Cpu)?, positions)
    }

    /// The same, with a setup of the caller's.
    pub fn start_with(model: &Model, setup: &EngineSetup, positions: usize) -> Result<Sequence> {
        let (sequence, device) = match Sequence::start_here(model, setup, positions) {
            Err(why) if setup.may_fall_back() => {
                let setup = setup.on_cpu(&why);
                (Sequence::start_here(model, &setup, positions)?, setup.device)
            }
            started => (started?, setup.device.clone()),
        };
        device.note().iter().for_each(|line| note!("{line}"));
        Ok(sequence)
    }

    fn start_here(model: &Model, setup: &EngineSetup, positions: usize) -> Result<Sequence> {
        let parted = match setup.whole_split(model, positions)? {
            Some(split) => Some(split),
            None => setup.whole_streamed(model, positions)?,
        };
        let (backend, plan, limits) = match parted {
            Some(parted) => parted,
            None => {
                let (backend, _) = setup.backend(&model.checkpoint, &model.plan)?;
                let plan = backend.lower(model.plan.clone())?;
                let budget = Budget::new(setup.step.memory, &plan, 0, None);
                let limits = memory::fit_whole(&*backend, &plan, setup.step.batch(setup.kind()), positions, budget)?;
                (backend, plan, limits)
            }
        };
        let program = backend.compile(&plan, Arc::clone(&model.checkpoint), limits)?;
        Ok(Sequence {
            program,
            plan,
            batch: Batch::default(),
            pages: (0..limits.n_pages as u32).collect(),
            position: 0,
        })
    }

    /// Width of a logits row.
    pub fn n_vocab(&self) -> usize {
        self.program.n_vocab()
    }

    /// The same, to sum the squares of what matrices are multiplied with from now on.
    ///
    /// # Errors
    /// As [`Sequence::start`], and where not all of a step is computed in one place, or nothing is kept of it.
    pub fn start_summing(model: &Model, args: &EngineArgs, positions: usize) -> Result<Sequence> {
        let setup = EngineSetup { sums_inputs: true, ..EngineSetup::of(args, Prefer::Cpu)? };
        let mut sequence = Sequence::start_with(model, &setup, positions)?;
        sequence.trace_inputs(InputTrace::All);
        ensure!(
            !sequence.program.inputs().is_empty(),
            "sum inputs: the reference does not, nor a GPU beside experts in host memory; try --backend cpu"
        );
        Ok(sequence)
    }

    /// Which inputs are summed from now on.
    pub fn trace_inputs(&mut self, trace: InputTrace) {
        self.program.trace_inputs(trace);
    }

    /// Tokens of the expert that the fewest tokens were forced through, among those that no other token reached; `None`
    /// where every expert was chosen.
    pub fn fewest_forced(&self) -> Option<u64> {
        let of = |sums: &InputSums| {
            let unchosen = sums.counts.iter().zip(&sums.forced).filter(|(n, forced)| n == forced);
            unchosen.map(|(n, _)| *n).min()
        };
        self.program.inputs().iter().filter_map(of).min()
    }

    /// Those sums by the names of tensors in GGUF files, and the number of columns of each.
    ///
    /// # Errors
    /// A sum is not finite: the model broke down.
    pub fn inputs(&self, checkpoint: &Checkpoint) -> Result<BTreeMap<String, (Sums, usize)>> {
        let mut found = BTreeMap::new();
        let all = self.program.inputs().iter().flat_map(|sums| sums.weights.iter().map(move |&w| (w, sums)));
        for (w, sums) in all {
            let decl = self.plan.weight(w);
            // Matrices that a file keeps in one tensor have one input.
            let mut tensors: Vec<&str> = decl.source.tensors().collect();
            tensors.dedup();
            let name = match *tensors.as_slice() {
                [one] if checkpoint.kind() == Kind::Gguf => one,
                _ => &decl.name,
            };
            let squares: Vec<f32> = sums.squares.iter().map(|&v| v as f32).collect();
            ensure!(squares.iter().all(|v| v.is_finite()), "sum inputs of {name}: the sum is not finite");
            let [counts, forced] = [&sums.counts, &sums.forced].map(|all| all.iter().map(|&n| n as f32).collect());
            found.insert(name.to_string(), (Sums { squares, counts, forced }, decl.shape[decl.shape.len() - 1]));
        }
        Ok(found)
    }

    /// Starts over; what the cache holds is overwritten.
    pub fn rewind(&mut self) {
        self.position = 0;
    }

    /// Computes `tokens` after what was fed before; `each` gets every position's logits.
    pub fn feed(&mut self, tokens: &[u32], each: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.feed_from(tokens, self.position, each)
    }

    /// The same, with logits only from position `from` on.
    pub fn feed_from(
        &mut self,
        tokens: &[u32],
        from: usize,
        mut each: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let n_vocab = self.n_vocab();
        for chunk in tokens.chunks(self.program.limits().max_tokens) {
            let start = self.position;
            let skip = from.saturating_sub(start).min(chunk.len());
            self.batch.clear();
            let tables = Tables { pages: &self.pages, window_pages: &self.pages, ..Tables::default() };
            self.batch.push(chunk, start, tables, skip..chunk.len());
            let output = self.program.step(&self.batch)?;
            if let Some(fault) = output.faults.first() {
                return Err((*fault).into());
            }
            for (i, row) in output.logits.chunks_exact(n_vocab).enumerate() {
                each(start + skip + i, row)?;
            }
            self.position += chunk.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_cpu_runs_is_the_fused_plan() {
        let plain = open(None).unwrap().plan;
        let fused = Cpu::default().lower(plain.clone()).unwrap();
        assert!(fused.ops.len() < plain.ops.len(), "{} ops of {}", fused.ops.len(), plain.ops.len());
    }
}
