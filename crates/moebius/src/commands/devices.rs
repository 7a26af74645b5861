//! `moebius devices`: the GPUs of this machine, what drives them, and why one cannot be used.

use std::io::Write;

use anyhow::Result;
use backend::cuda;

use crate::machine;
use crate::out::Out;

/// Prints one line a device; without a driver, one sentence.
pub fn run() -> Result<()> {
    let mut out = Out::lock();
    let found = match cuda::devices() {
        Ok(found) => found,
        Err(why) => {
            writeln!(out, "cuda: not usable: {why}")?;
            return Ok(());
        }
    };
    let compiler = found.compiler.as_deref().unwrap_or("not usable");
    writeln!(out, "cuda: driver for CUDA {}, NVRTC {compiler}, {} devices", found.driver, found.devices.len())?;
    for (i, device) in found.devices.iter().enumerate() {
        let [free, total] = [device.free_bytes, device.total_bytes].map(|n| machine::bytes(n as u64));
        let state = device.unusable.as_ref().map_or("usable".into(), |why| format!("not usable: {why}"));
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
