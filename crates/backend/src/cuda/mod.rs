//! The CUDA backend: NVIDIA GPUs of compute capability 8.0 and up.
//!
//! The driver and the run-time compiler are loaded when they are there, so that one binary runs with and without them.
//! Kernels are compiled for the device when a plan first needs them and kept in a folder. A step of few tokens is a
//! graph, captured once for its counts. Results agree with the reference within a tolerance; the same run gives the
//! same bits.

mod args;
mod batch;
mod compile;
mod driver;
mod encode;
mod encode_batch;
mod few;
mod few_launch;
mod fuse;
mod handover;
mod host;
mod launch;
mod matmul;
mod nodes;
mod nvrtc;
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

use self::split::{Host, Split};
use crate::cpu::CacheType;
use crate::{Backend, CompileError, Footprint, Limits, Program};

/// What footprints call the memory of a GPU.
pub const MEMORY: &str = "device memory";

/// An NVIDIA GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cuda {
    /// Number of the device.
    pub device: usize,
    /// Elements of the key-value cache.
    pub cache: CacheType,
    /// Folder where compiled kernels are kept; without it each program compiles its own.
    pub cubins: Option<PathBuf>,
    /// Folder of kernel sources that take the place of the embedded ones, for work on kernels.
    pub kernels: Option<PathBuf>,
    /// Where not all routed experts lie on the device: how many do, and what computes the others.
    pub host: Option<Host>,
}

impl Cuda {
    /// Where the routed experts of a plan lie.
    pub fn split(&self, plan: &Plan) -> Split {
        self.host.map_or_else(Split::none, |host| Split::new(plan, host.room))
    }
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError> {
        Ok(plan.rewrite(passes::fuse)?)
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
        Ok(Box::new(compile::compile(self, plan, &weights, limits)?))
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
    let version = driver::init()?;
    let compiler = nvrtc::version();
    let n = driver::device_count().map_err(|e| e.to_string())?;
    let device = |i: usize| {
        let context = driver::Context::new(i).map_err(|e| e.to_string())?;
        let (free_bytes, total_bytes) = context.memory().map_err(|e| e.to_string())?;
        let target = match &compiler {
            Ok(_) => nvrtc::Target::new(context.arch).map(drop),
            Err(why) => Err(why.clone()),
        };
        Ok(DeviceInfo {
            name: context.name.clone(),
            arch: context.arch,
            sms: context.sms,
            free_bytes,
            total_bytes,
            unusable: target.err(),
        })
    };
    Ok(Devices {
        driver: driver::cuda_version(version),
        compiler: compiler.clone().map(|(major, minor)| format!("{major}.{minor}")),
        devices: (0..n).map(device).collect::<Result<_, String>>()?,
    })
}
