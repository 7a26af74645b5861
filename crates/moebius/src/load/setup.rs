//! How a model is to run: what computes, where its weights lie, and the memory that is taken.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow, bail, ensure};
use backend::experts::layout::Layout;
use backend::reference::{Reference, Rounded};
use backend::residency::{Policy, Residency};
use backend::{Backend, Limits, Part, Program};
use checkpoint::Checkpoint;
use cpu::{Cpu, Isa};
use gpu::cuda::split::{Host, Moves, Split};
use gpu::cuda::{self, Cuda, CudaParts};
use gpu::metal::{self, Metal};
use model::plan::{Plan, ValidPlan};

use super::{Drafting, EncoderRoom, Model, Sight};
use crate::args::{CopyArg, DeviceList, DraftArg, DraftArgs, EngineArgs, IsaArg, MovesArg, StepArgs};
use crate::device::{self, Chosen, Device, Held, KERNELS, Prefer};
use crate::memory::{self, Budget, Fit, Units, Wish};
use crate::out::note;
use crate::predict::Rates;
use crate::{machine, out, prompts};

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
    /// Target for the time of a step that others wait for; zero is none, and a default's when `None`.
    pub step_time: Option<Duration>,
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
    /// What drafts tokens of answers.
    pub draft: DraftArgs,
    /// Memory that a draft model takes, in bytes.
    pub draft_bytes: usize,
    /// Memory that an image encoder takes.
    pub encoder: EncoderRoom,
}

impl EngineSetup {
    /// For one conversation at a time, on the device that is named or preferred.
    ///
    /// # Errors
    /// As [`Device::choose`].
    pub fn of(args: &EngineArgs, prefer: Prefer) -> Result<EngineSetup> {
        let device =
            Device::choose(args.backend, prefer, args.step.first_device(args.device)?, device::of_cpu(&args.step))?;
        Ok(EngineSetup { threads: args.threads, ctx: args.ctx, ..EngineSetup::on(device, args.step) })
    }

    /// As [`EngineSetup::of`], on a GPU where there is one, with drafts.
    ///
    /// # Errors
    /// As [`EngineSetup::of`].
    pub fn drafting(args: &EngineArgs, draft: DraftArgs) -> Result<EngineSetup> {
        Ok(EngineSetup { draft, ..EngineSetup::of(args, Prefer::Gpu)? })
    }

    /// Returns the same, with memory kept for an image encoder: on a GPU, and elsewhere where memory is promised.
    ///
    /// # Errors
    /// As [`Sight::room`].
    pub fn with_encoder(&self, sight: Option<&Sight>) -> Result<EngineSetup> {
        let encoder = sight.map_or(Ok(EncoderRoom::default()), |sight| sight.room(self))?;
        Ok(EngineSetup { encoder, ..self.clone() })
    }

    /// Maximum number of drafts of a sequence in a step.
    fn drafts(&self) -> usize {
        self.draft.n_max()
    }

    /// Refuses drafts that the device cannot verify.
    fn check_drafts(&self) -> Result<()> {
        let draft = match &self.draft.draft {
            DraftArg::Mtp => "mtp",
            DraftArg::Model(_) => "FILE",
            DraftArg::Off | DraftArg::Auto | DraftArg::Ngram => return Ok(()),
        };
        ensure!(self.step.devices.is_none(), "--draft {draft} requires one device, without --devices");
        Ok(())
    }

    /// Returns what a model's own layer for multi-token prediction is to do: on one device it may draft.
    pub fn head(&self) -> DraftArg {
        match &self.draft.draft {
            DraftArg::Auto if self.step.devices.is_some() => DraftArg::Off,
            draft => draft.clone(),
        }
    }

    /// Returns the settings for one conversation at a time on a device, with defaults for what is not said.
    pub fn on(device: Device, step: StepArgs) -> EngineSetup {
        EngineSetup {
            threads: None,
            ctx: None,
            device,
            step,
            prefix_cache: true,
            sequences: 1,
            fewer_will_do: false,
            step_time: None,
            cache_tokens: None,
            requests_bytes: 0,
            resident_bytes: None,
            prompts: None,
            sums_inputs: false,
            draft: DraftArgs::default(),
            draft_bytes: 0,
            encoder: EncoderRoom::default(),
        }
    }

    /// Returns the same on the CPU, which takes the place of a GPU.
    pub(super) fn on_cpu(&self, why: &anyhow::Error) -> EngineSetup {
        EngineSetup { device: Device::cpu_because(out::chain(why)), ..self.clone() }
    }

    /// Returns whether the CPU takes the place of the device where that cannot be used: the GPU was not named, nor was
    /// how much of it may be taken.
    pub(super) fn may_fall_back(&self) -> bool {
        self.device.chosen.is_some() && self.step.gpu_memory.is_none() && self.step.devices.is_none()
    }

    /// Returns the backend and the name that tables show for it.
    pub(super) fn backend(&self, checkpoint: &Checkpoint, plan: &Plan) -> Result<(Box<dyn Backend>, String)> {
        match self.kind() {
            Chosen::Reference if self.step.cache_type.has_blocks() => {
                Ok((Box::new(Rounded(self.step.cache_type)), "reference".into()))
            }
            Chosen::Reference => Ok((Box::new(Reference), "reference".into())),
            Chosen::Cpu => {
                let cpu = self.cpu(self.residency(checkpoint, plan))?;
                Ok((Box::new(cpu), cpu_name(&cpu)))
            }
            Chosen::Cuda => match self.cuda_parts() {
                Some(parts) => {
                    let name = format!("CUDA x{}", parts.devices.len());
                    Ok((Box::new(parts), name))
                }
                None => Ok((Box::new(self.cuda()), "CUDA".into())),
            },
            Chosen::Metal => Ok((Box::new(self.metal(plan)?), "Metal".into())),
        }
    }

    /// Returns the GPU of a Mac, with the kernels that pass their tests on it.
    pub(super) fn metal(&self, plan: &Plan) -> Result<Metal> {
        if let Some(why) = metal::device().map_or_else(Some, |device| device.unusable) {
            bail!("failed to use Metal: {why} (--backend cpu selects the CPU)");
        }
        let maps_weights = match self.step.copy_weights {
            CopyArg::Auto | CopyArg::None => true,
            CopyArg::Dense | CopyArg::All => false,
        };
        let mut metal = Metal::system(self.step.cache_type, maps_weights);
        metal.tuning = tested(&metal, plan)?;
        if self.sums_inputs {
            metal.tuning.off = metal::Off::ALL;
        }
        Ok(metal)
    }

    /// Returns the GPUs that were named, where several may be.
    fn devices(&self) -> &[usize] {
        self.step.devices.as_ref().map_or(&[], DeviceList::numbers)
    }

    /// Returns the GPUs that compute together; none where one does.
    pub fn cuda_parts(&self) -> Option<CudaParts> {
        let devices = self.devices();
        (devices.len() > 1).then(|| CudaParts { cuda: self.cuda(), devices: devices.to_vec() })
    }

    /// Returns the NVIDIA GPU, with all weights.
    pub fn cuda(&self) -> Cuda {
        let cubins = machine::cache_folder().map(|folder| folder.join("cuda"));
        let (kernels, ahead) = (machine::kernel_sources(), machine::kernels_folder());
        let (device, cache, progress) =
            (self.device.ordinal, self.step.cache_type, Some(cuda::Progress(machine::show_compiling)));
        Cuda { device, cache, cubins, kernels, ahead, progress, host: None }
    }

    /// Returns what makes a GPU with this many bytes of routed experts, the CPU alongside it.
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

    /// Returns whether routed experts may stay in host memory: the model has some, and a GPU computes.
    fn may_split(&self, plan: &Plan) -> Result<bool> {
        let is_cuda = self.kind() == Chosen::Cuda;
        ensure!(is_cuda || self.step.gpu_memory.is_none(), "--gpu-memory requires --backend cuda");
        Ok(is_cuda && plan.has_experts() && self.devices().len() < 2)
    }

    /// Returns the GPU and its plan where it does not hold all weights and routed experts can stay in host memory. A
    /// GPU that was not named has to hold a context of a habit's length besides.
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

    /// Returns the same, with experts in host memory that `--memory` holds: all of them, or some, the others being read
    /// from disk when they are requested.
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
            "--memory is too little for all experts: reading them from disk requires a model in files and no \
             --copy-weights"
        );
        let with = |slabs| {
            let cpu = Cpu { residency: Policy::Stream { slabs }, ..host.cpu };
            Cuda { host: Some(Host { cpu, ..host }), ..cuda.clone() }
        };
        memory::fit_host(with, plan, limits, budget)
    }

    /// Returns what a split is expected to give, where it is the engine's own choice.
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
             {shared:.1} (--backend cuda uses both)"
        );
        Ok(Some(Predicted { shared, alone }))
    }

    /// Returns a GPU that keeps within its promise for one sequence of `positions`, experts in host memory where it
    /// must.
    pub(super) fn whole_split(
        &self,
        model: &Model,
        positions: usize,
    ) -> Result<Option<(Box<dyn Backend>, ValidPlan, Limits)>> {
        if !self.may_split(&model.plan)? || self.step.gpu_memory.is_none() {
            return Ok(None);
        }
        let cuda = self.cuda();
        let plan = cuda.lower(model.plan.clone())?;
        let (budget, batch) = (self.budget(&plan), self.kind().batch(&self.step));
        if let Ok(limits) = memory::fit_whole(&cuda, &plan, batch, positions, budget) {
            return Ok(Some((Box::new(cuda), plan, limits)));
        }
        let (cuda, limits) = memory::fit_whole_streamed(self.split_cuda()?, &plan, batch, positions, budget)?;
        Ok(Some((Box::new(self.fit_host(&model.checkpoint, cuda, &plan, limits)?), plan, limits)))
    }

    /// Checks that the device can keep the plan's caches in the types that are asked for.
    pub fn check_cache(&self, plan: &Plan) -> Result<()> {
        let cache = self.step.cache_type;
        let misfit = match self.kind() {
            Chosen::Cpu | Chosen::Reference => cache.misfit(plan),
            Chosen::Cuda => cuda::cache_misfit(cache, plan),
            Chosen::Metal => metal::cache_misfit(cache, plan),
        };
        misfit.map_or(Ok(()), |what| Err(anyhow!("--cache-type {cache} cannot {what}")))
    }

    /// Returns the CPU with these residencies.
    pub(super) fn cpu(&self, residency: Policy) -> Result<Cpu> {
        let isa = match self.step.isa {
            None => Isa::best(),
            Some(IsaArg::Scalar) => Isa::Scalar,
            Some(IsaArg::Avx2) => Isa::Avx2,
            Some(IsaArg::Avx512) => Isa::Avx512,
            Some(IsaArg::Neon) => Isa::Neon,
            Some(IsaArg::I8mm) => Isa::I8mm,
        };
        isa.check()?;
        let threads = machine::threads(self.threads)?;
        Ok(Cpu { isa, threads, cache: self.step.cache_type, residency })
    }

    /// Returns whether experts may be streamed from disk: where a promise is to be kept, experts are in files, and the
    /// user does not say where weights are to be.
    fn may_stream(&self, checkpoint: &Checkpoint, plan: &Plan) -> bool {
        let is_free = self.kind() == Chosen::Cpu && self.step.copy_weights == CopyArg::Auto;
        is_free && self.step.memory.is_some() && plan.has_experts() && is_on_disk(checkpoint)
    }

    /// Returns what is decided where a promise does not hold all weights and experts can be streamed.
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
        // A prompt reads every expert that is not in memory once a step.
        let sizes = [4096, 2048, 1024];
        let batch = self.step.batch.unwrap_or_else(|| memory::long_batch(&with(0), &plan, &wish, budget, sizes));
        let (cpu, fit) = memory::fit_streamed(with, &plan, &Wish { batch, ..wish }, budget)?;
        let layout = cpu.layout(&plan);
        let (backend, name, device) = (Box::new(cpu), cpu_name(&cpu), self.device.clone());
        let (split, predicted, host_bytes) = (Split::none(), None, 0);
        let (draft, _open) = (None, None);
        Ok(Some(Prepared {
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
            draft,
            _open,
        }))
    }

    /// Returns what computes.
    pub(super) fn kind(&self) -> Chosen {
        self.device.kind
    }

    /// Returns which weights are copied: the user's choice, or what pays.
    fn residency(&self, checkpoint: &Checkpoint, plan: &Plan) -> Policy {
        match self.step.copy_weights {
            CopyArg::None => Policy::Mapped,
            CopyArg::Dense => Policy::CopyDense,
            CopyArg::All => Policy::CopyAll,
            CopyArg::Auto => Policy::choose(plan, checkpoint, machine::free_memory().unwrap_or(0)),
        }
    }

    /// Returns what a user wants of the engine.
    pub fn wish(&self) -> Wish {
        Wish {
            ctx: self.ctx,
            sequences: self.sequences,
            fewer_will_do: self.fewer_will_do,
            cache_tokens: self.cache_tokens,
            batch: self.kind().batch(&self.step),
            drafts: self.drafts(),
        }
    }

    /// Returns the memory that the backend may take: the host's, or the device's.
    fn budget(&self, plan: &ValidPlan) -> Budget {
        let [host, encoder] = self.encoder.on(self.kind());
        let gpu = encoder + self.draft_bytes;
        let rest = |free: Option<usize>| Budget::Free(free.map(|free| free.saturating_sub(gpu)));
        match (self.kind(), self.step.memory) {
            (Chosen::Metal, None) => {
                // The GPU wires mapped weights too, and 2 GiB are left to the rest of the machine.
                let bytes = metal::device().map_or(0, |device| device.budget_bytes).saturating_sub(2 << 30);
                Budget::Promise { bytes, overhead: gpu }
            }
            (Chosen::Cuda, _) if self.step.gpu_memory.is_some() => Budget::Promise {
                bytes: self.step.gpu_memory.unwrap_or(0),
                overhead: device::driver_bytes(self.device.ordinal) + gpu,
            },
            // Of the GPU alone, as long as nothing says what that is to hold.
            (Chosen::Cuda | Chosen::Metal, Some(bytes)) => Budget::Promise { bytes, overhead: gpu },
            (Chosen::Cuda, None) if self.devices().len() > 1 => {
                // Every device has to hold its part.
                let free: Option<Vec<usize>> = self.devices().iter().map(|&n| device::free_on_device(n)).collect();
                rest(free.and_then(|free| free.into_iter().min()))
            }
            (Chosen::Cuda, None) => rest(device::free_on_device(self.device.ordinal)),
            (Chosen::Cpu | Chosen::Reference, memory) => {
                let others = self.requests_bytes + self.prompts_bytes(plan) + self.draft_bytes + host;
                match Budget::new(memory, plan, others, self.resident_bytes) {
                    Budget::Free(free) => Budget::Free(free.map(|free| free.saturating_sub(self.draft_bytes))),
                    promise => promise,
                }
            }
        }
    }

    /// Memory for pieces of prompt caches on their way from and to a folder.
    fn prompts_bytes(&self, plan: &ValidPlan) -> usize {
        let Some(cpu) = self.prompts.as_ref().and_then(|_| self.cpu(Policy::Mapped).ok()) else { return 0 };
        let units = Units::of(&cpu, plan, self.drafts());
        prompts::MAX_BUFFERS * units.page.max(units.window_page).max(units.state)
    }

    /// Returns a backend with streamed experts for one sequence of `positions`, where a promise does not hold all
    /// weights.
    pub(super) fn whole_streamed(
        &self,
        model: &Model,
        positions: usize,
    ) -> Result<Option<(Box<dyn Backend>, ValidPlan, Limits)>> {
        if !self.may_stream(&model.checkpoint, &model.plan) {
            return Ok(None);
        }
        let cpu = self.cpu(Policy::Mapped)?;
        let plan = cpu.lower(model.plan.clone())?;
        let (budget, batch) = (Budget::new(self.step.memory, &plan, 0, None), self.kind().batch(&self.step));
        if memory::fit_whole(&cpu, &plan, batch, positions, budget).is_ok() {
            return Ok(None);
        }
        let with = |slabs| Cpu { residency: Policy::Stream { slabs }, ..cpu };
        let (cpu, limits) = memory::fit_whole_streamed(with, &plan, batch, positions, budget)?;
        Ok(Some((Box::new(cpu), plan, limits)))
    }

    /// Returns the backend, the plan that it runs, and the limits that the memory holds. The CPU takes the place of a
    /// GPU that was not named and that the model does not fit.
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
        ensure!(self.step.devices.is_none() || self.kind() == Chosen::Cuda, "--devices requires --backend cuda");
        self.check_drafts()?;
        self.check_cache(&plan)?;
        let draft = Drafting::open(self, checkpoint)?;
        // One look at what the process takes, for all that is decided: a second one may find more.
        let resident_bytes = self.resident_bytes.or_else(machine::resident_memory);
        let setup = EngineSetup { resident_bytes, ..self.clone() };
        match draft {
            Some(draft) => draft.alongside(&setup, |setup| setup.prepare_one(checkpoint, plan.clone())),
            None => setup.prepare_one(checkpoint, plan),
        }
    }

    /// As [`EngineSetup::prepare`], of a model by itself.
    fn prepare_one(&self, checkpoint: &Checkpoint, plan: ValidPlan) -> Result<Prepared> {
        if let Some(prepared) = self.prepare_streamed(checkpoint, &plan)? {
            return Ok(prepared);
        }
        let open = match self.kind() {
            Chosen::Cuda => {
                let open = cuda::Open::new(self.device.ordinal);
                Some(open.map_err(|why| anyhow!("failed to use CUDA: {why}"))?)
            }
            Chosen::Reference | Chosen::Cpu | Chosen::Metal => None,
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
                draft: None,
                _open,
            });
        }
        let (backend, name) = self.backend(checkpoint, &plan)?;
        let plan = backend.lower(plan)?;
        let (budget, mut wish) = (self.budget(&plan), self.wish());
        if open.is_some() && self.step.batch.is_none() {
            wish.batch = memory::long_batch(&*backend, &plan, &wish, budget, [8192, 4096]);
        }
        let fit = match (&open, budget) {
            (Some(open), Budget::Free(Some(free))) => {
                memory::fit_device(&*backend, &plan, &wish, free, open.name(), self.may_fall_back())?
            }
            _ => memory::fit(&*backend, &plan, &wish, budget)?,
        };
        let (layout, split, predicted, host_bytes) = (Layout::default(), Split::none(), None, 0);
        let (device, draft, _open) = (self.device.clone(), None, open);
        Ok(Prepared { backend, name, plan, budget, fit, host_bytes, layout, split, predicted, device, draft, _open })
    }

    /// Returns the program of what is prepared. Where a GPU that was not named fails to start, the CPU takes its place
    /// and `plan` is prepared anew.
    pub(super) fn compile(
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

/// Returns whether experts can be read from files while others run.
fn is_on_disk(checkpoint: &Checkpoint) -> bool {
    checkpoint.files().iter().all(|file| file.identity().is_some() || file.is_repacked())
}

/// Returns what tables show for the CPU.
fn cpu_name(cpu: &Cpu) -> String {
    format!("CPU {}", cpu.isa.name())
}

/// Returns the kernels that are right on this Mac's GPU: products in every form with the types of a plan, and every
/// other kind. That all are is kept in the cache folder, by GPU, system, version and what a plan has.
fn tested(metal: &Metal, plan: &Plan) -> Result<metal::Tuning> {
    let device = metal::device().map_or_else(|why| why, |device| device.name);
    let system = sysinfo::System::long_os_version().unwrap_or_default();
    let mut types: Vec<String> = plan.weights.iter().map(|decl| decl.dtype.to_string()).collect();
    types.sort();
    types.dedup();
    let kinds = metal::kinds(plan).join(", ");
    let key = format!("{device}; {system}; {}; {}; {kinds}\n", env!("CARGO_PKG_VERSION"), types.join(" "));
    let kept = machine::cache_folder().map(|folder| folder.join("metal-tested"));
    let known = kept.as_ref().and_then(|path| crate::input::found(path, 1 << 20).ok()).unwrap_or_default();
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
    /// The model that drafts, where another does.
    pub draft: Option<Drafting>,
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
    /// Returns the target for the time of a step, [`Duration::MAX`] for none: `wanted`, or what keeps answers fluent.
    /// A single sequence makes no other wait. Where experts are read from disk, short steps would read as many.
    pub fn step_time(&self, wanted: Option<Duration>) -> Duration {
        let default = match self.device.kind {
            _ if self.fit.sequences == 1 || !self.layout.layers.is_empty() => Duration::MAX,
            Chosen::Cuda | Chosen::Metal => Duration::from_millis(25),
            Chosen::Cpu | Chosen::Reference => Duration::from_millis(100),
        };
        match wanted {
            Some(Duration::ZERO) => Duration::MAX,
            wanted => wanted.unwrap_or(default),
        }
    }

    /// Returns what the model will take, its image encoder included.
    pub fn held(&self, encoder: EncoderRoom) -> Held {
        let [host, gpu] = encoder.on(self.device.kind);
        let drafting = self.draft.as_ref().map_or(0, |draft| draft.bytes);
        let (bytes, later) = (self.fit.footprint.total() + drafting, memory::later_bytes(self.plan.n_vocab));
        match self.device.kind {
            Chosen::Cuda => {
                Held { host: self.host_bytes + later + host, gpu: bytes + KERNELS + gpu, ordinal: self.device.ordinal }
            }
            Chosen::Reference | Chosen::Cpu | Chosen::Metal => {
                Held { host: bytes + later + host + gpu, ..Held::default() }
            }
        }
    }

    /// Returns what computes where no one said, and what is where when experts are not with the other weights: a
    /// sentence each.
    pub fn placement(&self) -> Vec<String> {
        if let (Some(name), Some(Predicted { shared, alone })) = (&self.device.chosen, self.predicted) {
            let parted = self.parted().unwrap_or_default();
            return vec![format!(
                "computing on {name} and the CPU, {shared:.1} tok/s expected, {alone:.1} on the CPU alone (--backend \
                 cpu selects that): {parted}"
            )];
        }
        let draft = self.draft.as_ref().map(Drafting::placement);
        [self.device.note(), self.parted(), draft].into_iter().flatten().collect()
    }

    /// Returns what is where when experts are streamed or stay in host memory.
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
                    format!("are read from disk, except for {n} of {all} experts ({slabs}) in host memory")
                }
            };
            return Some(format!(
                "{} of GPU memory: {dense} of weights that every token uses and the routed experts of {} of {all} \
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
            "--memory {bytes}: {dense} of weights that every token uses and {n} of {all} experts ({slabs}) in memory, \
             the other experts are read from disk; a context of {} positions",
            self.fit.limits.max_positions
        ))
    }
}
