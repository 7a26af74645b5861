//! The choice of the device that computes: a GPU if there is one that can hold the model, else the CPU. Made once,
//! before a model is prepared.

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail};
use gpu::cuda::{self, NoDevice};
use gpu::metal;

use crate::args::{BackendKind, CopyArg, StepArgs};
use crate::machine;

/// Default devices of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefer {
    /// An NVIDIA GPU, if there is one that can hold the model. Metal must be named: it is untested on real hardware.
    Gpu,
    /// The CPU: commands that measure models, not machines.
    Cpu,
}

/// Backends, once `auto` is resolved. What differs between them outside of their crates is said here and in
/// `load/setup.rs`, where a new kind fails to compile until it is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    Reference,
    Cpu,
    Cuda,
    Metal,
}

impl Chosen {
    /// Returns the maximum number of tokens of a step, if all weights are in memory.
    pub fn batch(self, step: &StepArgs) -> usize {
        step.batch.unwrap_or(match self {
            Chosen::Cuda => 2048,
            Chosen::Reference | Chosen::Cpu | Chosen::Metal => 512,
        })
    }

    /// Returns whether the CPU's cores compute.
    pub fn is_host(self) -> bool {
        match self {
            Chosen::Reference | Chosen::Cpu => true,
            Chosen::Cuda | Chosen::Metal => false,
        }
    }
}

/// The device that computes.
#[derive(Clone, Debug)]
pub struct Device {
    pub kind: Chosen,
    /// Number of the CUDA device.
    pub ordinal: usize,
    /// Name of a GPU that was not asked for: the CPU replaces it if it cannot be used.
    pub chosen: Option<String>,
    /// Why the CPU computes instead of a GPU.
    pub why: Option<String>,
}

impl Device {
    /// Returns a backend that was named.
    pub fn named(kind: Chosen) -> Device {
        Device { kind, ordinal: 0, chosen: None, why: None }
    }

    /// Returns the CPU, in place of a GPU.
    pub fn cpu_because(why: String) -> Device {
        Device { why: Some(why), ..Device::named(Chosen::Cpu) }
    }

    /// Chooses from what was named and what is available. `ordinal` is the number of a CUDA device, `of_cpu` a flag of
    /// the command line that only concerns the CPU.
    ///
    /// # Errors
    /// The GPU that was named is missing or unusable.
    pub fn choose(
        named: Option<BackendKind>,
        prefer: Prefer,
        ordinal: Option<usize>,
        of_cpu: Option<&str>,
    ) -> Result<Device> {
        let find = |ordinal| cuda::find(ordinal, machine::kernels_folder().is_some());
        Device::choose_from(named, prefer, ordinal, of_cpu, find)
    }

    /// Returns the same, with the machine's devices found by `find`.
    fn choose_from(
        named: Option<BackendKind>,
        prefer: Prefer,
        ordinal: Option<usize>,
        of_cpu: Option<&str>,
        find: impl Fn(usize) -> Result<String, NoDevice>,
    ) -> Result<Device> {
        let number = ordinal.unwrap_or(0);
        let cuda = Device { ordinal: number, ..Device::named(Chosen::Cuda) };
        let is_asked = named.is_some();
        match (named, prefer) {
            (Some(BackendKind::Reference), _) => Ok(Device::named(Chosen::Reference)),
            (Some(BackendKind::Cpu), _) | (None, Prefer::Cpu) => Ok(Device::named(Chosen::Cpu)),
            (Some(BackendKind::Metal), _) => Ok(Device::named(Chosen::Metal)),
            (Some(BackendKind::Cuda), _) => match find(number) {
                Ok(_) => Ok(cuda),
                Err(why) => bail!("failed to use CUDA device {number}: {why}"),
            },
            (Some(BackendKind::Auto), _) if let Some(name) = usable_metal() => {
                Ok(Device { chosen: Some(name), ..Device::named(Chosen::Metal) })
            }
            (Some(BackendKind::Auto), _) | (None, Prefer::Gpu) => match (find(number), of_cpu) {
                (Ok(_), Some(flag)) => {
                    Ok(Device::cpu_because(format!("{flag} only concerns the CPU (--backend cuda selects the GPU)")))
                }
                (Ok(name), None) => Ok(Device { chosen: Some(name), ..cuda }),
                (Err(NoDevice::Unusable(why)), _) => Ok(Device::cpu_because(why)),
                (Err(why), _) if ordinal.is_some() => bail!("failed to use CUDA device {number} (--device): {why}"),
                // A machine without a GPU is worth a word only to those who asked for one.
                (Err(why), _) if is_asked => Ok(Device::cpu_because(why.to_string())),
                (Err(_), _) => Ok(Device::named(Chosen::Cpu)),
            },
        }
    }

    /// Returns what the user should know of the choice.
    pub fn note(&self) -> Option<String> {
        let on_gpu = self.chosen.as_ref().map(|name| format!("computing on {name} (--backend cpu selects the CPU)"));
        on_gpu.or_else(|| self.why.as_ref().map(|why| format!("computing on the CPU: {why}")))
    }
}

/// Returns the name of the Mac's GPU, if it is usable.
fn usable_metal() -> Option<String> {
    metal::device().ok().filter(|device| device.unusable.is_none()).map(|device| device.name)
}

/// Returns the first flag of a step that means something on the CPU alone.
pub fn of_cpu(step: &StepArgs) -> Option<&'static str> {
    let flags = [
        ("--isa", step.isa.is_some()),
        ("--copy-weights", step.copy_weights != CopyArg::Auto),
        // With both, the one is about what the GPU leaves to the CPU.
        ("--memory", step.memory.is_some() && step.gpu_memory.is_none()),
    ];
    flags.into_iter().find_map(|(flag, is_given)| is_given.then_some(flag))
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
pub const KERNELS: usize = 192 << 20;

/// Bytes of a GPU that go to the driver beside a program: its context, kernels and graphs. What the context takes is
/// what is taken when the first model asks: later models of this process hold memory of their own.
pub fn driver_bytes(ordinal: usize) -> usize {
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
pub fn free_on_device(ordinal: usize) -> Option<usize> {
    // 0 where the device does not say.
    let free = cuda::Open::new(ordinal).ok()?.memory().map_or(0, |(free, _)| free);
    Some(free - free / 16)
}

/// Bytes that models may take together where nobody says, their files included; `usize::MAX` where that is unknown.
pub fn free_memory(device: &Device) -> Held {
    let (host, gpu) = match device.kind {
        Chosen::Cuda => (machine::usable_memory(), free_on_device(device.ordinal)),
        Chosen::Metal => (metal::device().ok().map(|device| device.budget_bytes), None),
        Chosen::Cpu | Chosen::Reference => (machine::usable_memory(), None),
    };
    let [host, gpu] = [host, gpu].map(|bytes| bytes.unwrap_or(usize::MAX));
    Held { host, gpu, ordinal: device.ordinal }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Found = Result<String, NoDevice>;

    fn one(ordinal: usize) -> Found {
        match ordinal {
            0 => Ok("Card".into()),
            _ => Err(NoDevice::Number(format!("there is no CUDA device {ordinal}: there are 0 (Card)"))),
        }
    }

    fn none(_: usize) -> Found {
        Err(NoDevice::None("no driver".into()))
    }

    fn old(_: usize) -> Found {
        Err(NoDevice::Unusable("the driver is too old".into()))
    }

    #[test]
    fn who_computes_and_what_is_said_of_it() {
        use BackendKind::{Auto, Cpu, Cuda};
        let card = Some("computing on Card (--backend cpu selects the CPU)");
        let no_driver = Some("computing on the CPU: no driver");
        let too_old = Some("computing on the CPU: the driver is too old");
        let flag = Some("computing on the CPU: --isa only concerns the CPU (--backend cuda selects the GPU)");
        // Named, preferred, number, a flag of the CPU, what there is; what computes and the note, or the error.
        type Case = (
            Option<BackendKind>,
            Prefer,
            Option<usize>,
            Option<&'static str>,
            fn(usize) -> Found,
            Result<(Chosen, Option<&'static str>), &'static str>,
        );
        let cases: &[Case] = &[
            (None, Prefer::Gpu, None, None, one, Ok((Chosen::Cuda, card))),
            (None, Prefer::Gpu, Some(0), None, one, Ok((Chosen::Cuda, card))),
            (None, Prefer::Gpu, None, Some("--isa"), one, Ok((Chosen::Cpu, flag))),
            (None, Prefer::Gpu, None, Some("--isa"), none, Ok((Chosen::Cpu, None))),
            (None, Prefer::Gpu, None, None, none, Ok((Chosen::Cpu, None))),
            (None, Prefer::Gpu, None, None, old, Ok((Chosen::Cpu, too_old))),
            (None, Prefer::Cpu, None, None, one, Ok((Chosen::Cpu, None))),
            (Some(Auto), Prefer::Cpu, None, None, one, Ok((Chosen::Cuda, card))),
            (Some(Auto), Prefer::Cpu, None, None, none, Ok((Chosen::Cpu, no_driver))),
            (Some(Cpu), Prefer::Gpu, Some(5), None, one, Ok((Chosen::Cpu, None))),
            (Some(Cuda), Prefer::Gpu, None, Some("--isa"), one, Ok((Chosen::Cuda, None))),
            (Some(Cuda), Prefer::Gpu, None, None, none, Err("failed to use CUDA device 0: no driver")),
            (Some(Cuda), Prefer::Gpu, None, None, old, Err("failed to use CUDA device 0: the driver is too old")),
            (
                Some(Cuda),
                Prefer::Gpu,
                Some(1),
                None,
                one,
                Err("failed to use CUDA device 1: there is no CUDA device 1: there are 0 (Card)"),
            ),
            (
                None,
                Prefer::Gpu,
                Some(3),
                None,
                one,
                Err("failed to use CUDA device 3 (--device): there is no CUDA device 3: there are 0 (Card)"),
            ),
            (None, Prefer::Gpu, Some(0), None, none, Err("failed to use CUDA device 0 (--device): no driver")),
        ];
        for &(named, prefer, ordinal, flag, find, ref wanted) in cases {
            let found = Device::choose_from(named, prefer, ordinal, flag, find);
            let found = found.map(|device| (device.kind, device.note())).map_err(|e| e.to_string());
            let found = match &found {
                Ok((kind, note)) => Ok((*kind, note.as_deref())),
                Err(why) => Err(why.as_str()),
            };
            assert_eq!(found, *wanted, "{named:?} {prefer:?} {ordinal:?} {flag:?}");
        }
    }
}
