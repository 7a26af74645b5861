//! `moebius devices`: the GPUs of this machine, what drives them, and why one cannot be used.

use std::io::Write;

use anyhow::Result;
use gpu::{cuda, metal};

use crate::machine;
use crate::out::Out;

/// Prints one line a device; without a driver, one sentence.
pub fn run() -> Result<()> {
    let mut out = Out::lock();
    match metal::device() {
        Ok(device) => {
            let state = device.unusable.map_or("usable".into(), |why| format!("not usable: {why}"));
            let [budget, name] = [machine::bytes(device.budget_bytes as u64), device.name];
            writeln!(out, "metal: {name}, Apple family {}, up to {budget}: {state}", device.family)?;
        }
        Err(why) => writeln!(out, "metal: not usable: {why}")?,
    }
    let found = match cuda::devices() {
        Ok(found) => found,
        Err(why) => {
            writeln!(out, "cuda: not usable: {why}")?;
            return Ok(());
        }
    };
    let compiler = found.compiler.as_deref().unwrap_or("not usable");
    writeln!(out, "cuda: driver for CUDA {}, NVRTC {compiler}, {} devices", found.driver, found.devices.len())?;
    let ahead = machine::kernels_folder();
    for (i, device) in found.devices.iter().enumerate() {
        let [free, total] = [device.free_bytes, device.total_bytes].map(|n| machine::bytes(n as u64));
        let state = match (&device.unusable, &ahead) {
            (None, _) => "usable".into(),
            (Some(_), Some(folder)) if cuda::find(i, true).is_ok() => {
                format!("usable with the kernels in {}", folder.display())
            }
            (Some(why), _) => format!("not usable: {why}"),
        };
        writeln!(
            out,
            "cuda:{i}: {}, compute capability {}.{}, {} multiprocessors, {free} of {total} free: {state}",
            device.name,
            device.arch / 10,
            device.arch % 10,
            device.sms
        )?;
    }
    Ok(())
}
