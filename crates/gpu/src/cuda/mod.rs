//! The CUDA backend: NVIDIA GPUs of compute capability 8.0 and up.
//!
//! The driver and the run-time compiler are loaded when they are there, so that one binary runs with and without them.
//! Kernels are compiled for the device when a plan first needs them and kept in a folder. A step of few tokens is a
//! graph, captured once for its counts. Results agree with the reference within a tolerance; the same run gives the
//! same bits.

mod args;
mod batch;
mod chosen;
mod compile;
mod delta;
mod drafts;
mod driver;
mod encode;
mod few;
mod few_launch;
mod fuse;
mod gate;
mod handover;
mod host;
pub mod hot;
mod launch;
mod lists;
mod matmul;
mod nodes;
mod nvrtc;
pub mod outline;
mod parts;
mod pick;
mod program;
mod sources;
pub mod split;
mod tables;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod times;
mod upload;
mod wide;

use std::path::PathBuf;
use std::sync::Arc;

use checkpoint::Checkpoint;
use model::plan::{Plan, ValidPlan, passes};

pub use compile::cache_misfit;
pub use driver::{NoDevice, use_older_arch};
pub use parts::{CudaParts, Traffic, traffic};

use self::split::{Host, Moves, Slots, Split};
use backend::CacheType;
use backend::experts::layout::Layout;
use backend::{Backend, CompileError, Footprint, Limits, Program};
use cpu::apart::Apart;

/// What footprints call the memory of a GPU.
pub const MEMORY: &str = "device memory";

/// An NVIDIA GPU.
#[derive(Clone, Debug, Default)]
pub struct Cuda {
    /// Number of the device.
    pub device: usize,
    /// Elements of the key-value cache.
    pub cache: CacheType,
    /// Folder where compiled kernels are kept; without it each program compiles its own.
    pub cubins: Option<PathBuf>,
    /// Folder of kernel sources that take the place of the embedded ones, for work on kernels.
    pub kernels: Option<PathBuf>,
    /// Folder of kernels that were compiled ahead ([`compile_ahead`]): for them no compiler is needed.
    pub ahead: Option<PathBuf>,
    /// Hears of kernels that are being compiled.
    pub progress: Option<Progress>,
    /// Where not all routed experts lie on the device: how many do, and what computes the others.
    pub host: Option<Host>,
}

impl Cuda {
    /// Where the routed experts of a plan lie.
    pub fn split(&self, plan: &Plan) -> Split {
        self.host.map_or_else(Split::none, |host| Split::new(plan, host.room))
    }

    /// Slots that single experts may take in place of whole layers.
    fn slots(&self, plan: &Plan, split: &Split) -> Vec<Slots> {
        let may_move = self.host.is_some_and(|host| host.moves != Moves::Never && !host.is_streamed());
        if may_move { split.slots(plan) } else { Vec::new() }
    }

    /// What a program takes of the host's memory: experts there, streamed or not, and the rows that it computes.
    pub fn host_footprint(&self, plan: &Plan, limits: Limits) -> Footprint {
        let split = self.split(plan);
        let Some(host) = self.host.filter(|_| split.host().next().is_some()) else {
            return Footprint::new("host memory");
        };
        host::footprint(&host, plan, &split, &self.slots(plan, &split), limits)
    }

    /// The slabs of experts that are streamed to the host's memory; none where all of them are there.
    pub fn host_layout(&self, plan: &Plan) -> Layout {
        let split = self.split(plan);
        let ops: Vec<usize> = split.host().map(|layer| layer.op).collect();
        self.host.map_or_else(Layout::default, |host| Apart::layout(&host.cpu, plan, &ops))
    }

    /// Bytes of the device's memory for the experts of a layer on their way; none where they are on disk.
    fn stage_bytes(&self, split: &Split, slots: &[Slots]) -> usize {
        let is_streamed = self.host.is_some_and(|host| host.is_streamed());
        if is_streamed { 0 } else { split.stage_bytes(!slots.is_empty()) }
    }
}

/// Hears how many modules are compiled, of how many that had to be; first of none.
#[derive(Clone, Copy)]
pub struct Progress(pub fn(usize, usize));

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Progress")
    }
}

/// Compiles the modules of a plan for cards of a compute capability into a folder, where they are not there yet. No
/// device is needed.
///
/// # Errors
/// There is no compiler, it does not know the card, or the folder cannot be written.
pub fn compile_ahead(plan: &outline::Outline<'_>, arch: u32, folder: &std::path::Path) -> Result<usize, String> {
    nvrtc::version()?;
    let texts = sources::Texts::new(None);
    let target = nvrtc::Target::exactly(arch)?;
    for key in plan.modules() {
        nvrtc::compile_ahead(key, &texts, target, folder)?;
    }
    Ok(plan.modules().len())
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError> {
        Ok(plan.rewrite(|plan| {
            passes::fuse(plan);
            passes::routers_as_floats(plan);
        })?)
    }

    fn footprint(&self, plan: &ValidPlan, limits: Limits) -> Footprint {
        compile::footprint(self, plan, limits)
    }

    fn compile(
        &self,
        plan: &ValidPlan,
        weights: Arc<Checkpoint>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, CompileError> {
        Ok(Box::new(compile::compile(self, plan, &weights, limits, None)?))
    }
}

/// A GPU of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Compute capability, e.g. 90.
    pub arch: u32,
    /// Multiprocessors.
    pub sms: usize,
    /// Bytes of memory that are free.
    pub free_bytes: usize,
    /// Bytes of memory in all.
    pub total_bytes: usize,
    /// Why the backend cannot use it.
    pub unusable: Option<String>,
}

/// What there is to compute with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices {
    /// CUDA version of the driver, e.g. `13.0`.
    pub driver: String,
    /// Version of the run-time compiler, or why there is none.
    pub compiler: Result<String, String>,
    /// In order of their numbers.
    pub devices: Vec<DeviceInfo>,
}

/// Bytes per second that a device's memory gives by its clock and width, where the driver says so.
pub fn bandwidth(device: usize) -> Option<f64> {
    driver::init().ok()?;
    driver::memory_bandwidth(device).ok().filter(|&rate| rate > 0.0)
}

/// Looks for the driver, the compiler and the devices.
///
/// # Errors
/// A sentence when there is no usable driver.
pub fn devices() -> Result<Devices, String> {
    let version = driver::init().map_err(|e| e.to_string())?;
    let n = driver::device_count().map_err(|e| e.to_string())?;
    let device = |i: usize| {
        let context = driver::Context::new(i).map_err(|e| e.to_string())?;
        let (free_bytes, total_bytes) = context.memory().map_err(|e| e.to_string())?;
        Ok(DeviceInfo {
            name: context.name.clone(),
            arch: context.arch,
            sms: context.sms,
            free_bytes,
            total_bytes,
            unusable: nvrtc::target(context.arch, false).err(),
        })
    };
    Ok(Devices {
        driver: driver::cuda_version(version),
        compiler: nvrtc::version().map(|(major, minor)| format!("{major}.{minor}")),
        devices: (0..n).map(device).collect::<Result<_, String>>()?,
    })
}

/// The name of a device that can compute. Makes no context, so it costs little. `is_ahead`: kernels may have been
/// compiled ahead, so that no compiler is needed.
///
/// # Errors
/// Why there is none.
pub fn find(ordinal: usize, is_ahead: bool) -> Result<String, NoDevice> {
    let unusable = |e: driver::DriverError| NoDevice::Unusable(e.to_string());
    driver::init()?;
    let n = driver::device_count().map_err(unusable)?;
    if n == 0 {
        return Err(NoDevice::None("the NVIDIA driver sees no device".into()));
    }
    if ordinal >= n {
        let names = (0..n).map(|i| Ok(format!("{i} ({})", driver::Properties::of(i)?.name)));
        let names = names.collect::<Result<Vec<_>, _>>().map_err(unusable)?;
        return Err(NoDevice::Number(format!("there is no CUDA device {ordinal}: there are {}", names.join(", "))));
    }
    let device = driver::Properties::of(ordinal).map_err(unusable)?;
    nvrtc::target(device.arch, is_ahead).map_err(|why| NoDevice::Unusable(format!("{}: {why}", device.name)))?;
    Ok(device.name)
}

/// What the choice of kernels on a device depends on.
///
/// # Errors
/// Why there is no such device.
pub fn card(ordinal: usize) -> Result<outline::Card, NoDevice> {
    driver::init()?;
    let device = driver::Properties::of(ordinal).map_err(|e| NoDevice::Unusable(e.to_string()))?;
    Ok(outline::Card { arch: device.arch, sms: device.sms, max_shared: device.max_shared })
}

/// A device kept open: to make its context anew takes longer than most of what is done with it at the start.
pub struct Open(Arc<driver::Context>);

impl Open {
    /// Opens a device by its number.
    ///
    /// # Errors
    /// A sentence.
    pub fn new(ordinal: usize) -> Result<Open, String> {
        driver::init().map_err(|e| e.to_string())?;
        Ok(Open(driver::Context::new(ordinal).map_err(|e| e.to_string())?))
    }

    /// Bytes of memory that are free, and of all, where the device says so.
    pub fn memory(&self) -> Option<(usize, usize)> {
        self.0.enter().and_then(|()| self.0.memory()).ok()
    }

    /// The card.
    pub fn name(&self) -> &str {
        &self.0.name
    }
}
