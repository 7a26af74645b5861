//! How a model makes one vector of a text, as its files say it: sentence-transformers' settings in a folder, or a key
//! of GGUF. What such a folder has after the pooling that is not computed is an error.

use checkpoint::{Checkpoint, DENSE, Kind, POOLING};
use serde_json::Value;

use crate::folder::{self, Error};
use crate::scheduler::Pooling;

const MODULES: &str = "modules.json";
/// Parts of a model that are computed here, or that requests decide about.
const KNOWN: [&str; 4] = ["Transformer", "Pooling", "Dense", "Normalize"];
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

/// Refuses modules of sentence-transformers that change the vector and that the plan, which reads the weights of those
/// in [`DENSE`], does not compute so.
fn modules(checkpoint: &Checkpoint) -> Result<(), Error> {
    let Some(file) = checkpoint.side_file(MODULES)? else { return Ok(()) };
    let error = |what: String| Error::File { file: file.name().into(), what };
    let list: Value = serde_json::from_str(file.text()).map_err(|why| error(why.to_string()))?;
    let list = list.as_array().ok_or_else(|| error("it is no list".into()))?;
    let show = |text: &str| format!("{:?}", text.chars().take(80).collect::<String>());
    let (mut dense, mut is_normalized) = (Vec::new(), false);
    for module in list {
        let kind = module["type"].as_str().unwrap_or_default();
        match kind.rsplit('.').next().unwrap_or_default() {
            "Dense" if is_normalized => {
                return Err(error("module Dense follows Normalize, which is not computed".into()));
            }
            "Dense" => dense.push(module["path"].as_str().unwrap_or_default()),
            "Normalize" => is_normalized = true,
            name if KNOWN.contains(&name) => {}
            _ => {
                let (kind, known) = (show(kind), KNOWN.join(", "));
                return Err(error(format!("module {kind} is not computed, only {known} are")));
            }
        }
    }
    let has_weights = |module: &&str| checkpoint.has(&format!("{module}.linear.weight"));
    let found: Vec<&str> = DENSE.into_iter().filter(has_weights).collect();
    if dense != found {
        let [listed, found] = [dense, found].map(|list| show(&list.join(", ")));
        return Err(error(format!("the modules Dense are {listed}, those with a model.safetensors are {found}")));
    }
    found.into_iter().try_for_each(|module| is_plain(checkpoint, module))
}

/// Refuses a matrix whose products are changed before the next module.
fn is_plain(checkpoint: &Checkpoint, module: &str) -> Result<(), Error> {
    let (file, values) = folder::values(checkpoint, &format!("{module}/config.json"))?;
    // What sentence-transformers takes where the file says nothing.
    let activation = values.get("activation_function").and_then(Value::as_str).unwrap_or("Tanh");
    if activation.rsplit('.').next() != Some("Identity") {
        let activation: String = activation.chars().take(80).collect();
        let what = format!("activation_function {activation:?} is not computed, only Identity is");
        return Err(Error::File { file, what });
    }
    match values.get("use_residual") {
        None | Some(Value::Null | Value::Bool(false)) => Ok(()),
        Some(_) => Err(Error::File { file, what: "use_residual is not computed".into() }),
    }
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
