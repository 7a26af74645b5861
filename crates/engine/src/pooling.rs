//! How a model makes one vector of a text, as its files say it: sentence-transformers' settings in a folder, or a key
//! of GGUF. What such a folder has after the pooling that is not computed is an error.

use checkpoint::{Checkpoint, Kind, POOLING};
use serde_json::Value;

use crate::folder::{self, Error};
use crate::scheduler::Pooling;

const MODULES: &str = "modules.json";
/// Parts of a model that are computed here, or that requests decide about.
const KNOWN: [&str; 3] = ["Transformer", "Pooling", "Normalize"];
const MODE: &str = "pooling_mode";

/// Returns how the states of a text's tokens become one; `None` where the files do not say.
///
/// # Errors
/// A file cannot be read, or asks for what is not computed.
pub fn pooling(checkpoint: &Checkpoint) -> Result<Option<Pooling>, Error> {
    match checkpoint.kind() {
        Kind::Gguf => Ok(of_gguf(checkpoint)),
        Kind::Mlx | Kind::Hf => {
            modules(checkpoint)?;
            of_folder(checkpoint)
        }
    }
}

/// GGUF's number of how states are pooled (`llama_pooling_type` in llama.cpp's llama.h).
pub fn gguf_pooling_type(checkpoint: &Checkpoint) -> Option<i128> {
    let meta = checkpoint.meta();
    let arch = meta.opt_str("general.architecture").ok().flatten()?;
    meta.get(&format!("{arch}.pooling_type"))?.to_int()
}

fn of_gguf(checkpoint: &Checkpoint) -> Option<Pooling> {
    match gguf_pooling_type(checkpoint)? {
        1 => Some(Pooling::Mean),
        2 => Some(Pooling::First),
        3 => Some(Pooling::Last),
        _ => None,
    }
}

/// Refuses modules of sentence-transformers that change the vector.
fn modules(checkpoint: &Checkpoint) -> Result<(), Error> {
    let Some(file) = checkpoint.side_file(MODULES)? else { return Ok(()) };
    let error = |what: String| Error::File { file: file.name().into(), what };
    let list: Value = serde_json::from_str(file.text()).map_err(|why| error(why.to_string()))?;
    let list = list.as_array().ok_or_else(|| error("it is no list".into()))?;
    for module in list {
        let kind = module["type"].as_str().unwrap_or_default();
        if !KNOWN.contains(&kind.rsplit('.').next().unwrap_or_default()) {
            let kind: String = kind.chars().take(80).collect();
            return Err(error(format!("module {kind:?} is not computed, only {} are", KNOWN.join(", "))));
        }
    }
    Ok(())
}

fn of_folder(checkpoint: &Checkpoint) -> Result<Option<Pooling>, Error> {
    let (file, values) = folder::values(checkpoint, POOLING)?;
    let of = |mode: &str| match mode {
        "cls_token" | "cls" => Some(Pooling::First),
        "mean_tokens" | "mean" => Some(Pooling::Mean),
        "lasttoken" => Some(Pooling::Last),
        _ => None,
    };
    // Older files have a flag for each mode, newer ones its name.
    let flags = values.iter().filter(|(_, value)| **value == Value::Bool(true));
    let named = values.get(MODE).and_then(Value::as_str);
    let modes: Vec<&str> = flags.filter_map(|(key, _)| key.strip_prefix("pooling_mode_")).chain(named).collect();
    match modes.as_slice() {
        [] => Ok(None),
        [mode] if let Some(pooling) = of(mode) => Ok(Some(pooling)),
        modes => {
            let modes: String = modes.join(", ").chars().take(80).collect();
            Err(Error::File { file, what: format!("{MODE} {modes} is not supported, cls, mean or lasttoken is") })
        }
    }
}
