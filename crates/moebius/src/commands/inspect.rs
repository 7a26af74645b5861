//! `moebius inspect`: the contents of a model file. Reads the header, never the weights.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Result;
use checkpoint::{Checkpoint, Kind, TensorInfo, Unreadable, Value};
use engine::tokenizer::Tokenizer;
use serde_json::{Map, json};

use crate::args::InspectArgs;
use crate::out::{Out, say};
use crate::{embedded, load, machine, out};

pub fn run(args: &InspectArgs) -> Result<()> {
    let path = args.file.as_deref().or(args.model.model.as_deref());
    let checkpoint = embedded::open(path)?;
    let report = report(&checkpoint);
    if args.json {
        let mut report = report;
        if args.metadata {
            let all = checkpoint.meta().iter().map(|(key, value)| (key.to_string(), json!(describe(value))));
            report.insert("metadata".into(), all.collect::<Map<_, _>>().into());
        }
        if args.tensors {
            report.insert("tensors".into(), checkpoint.tensors().iter().map(tensor_json).collect());
            let other = |t: &Unreadable| json!({"name": t.name, "type": t.dtype, "shape": t.shape, "why": t.why});
            report.insert("unreadable tensors".into(), checkpoint.unreadable().iter().map(other).collect());
        }
        return Ok(writeln!(Out::lock(), "{}", out::json(&serde_json::to_string_pretty(&report)?))?);
    }
    for (key, value) in &report {
        match value {
            serde_json::Value::Object(map) => {
                say!("{key}")?;
                for (key, value) in map {
                    say!("  {key:<24} {}", plain(value))?;
                }
            }
            value => say!("{key:<26} {}", plain(value))?,
        }
    }
    if args.metadata {
        say!("metadata")?;
        for (key, value) in checkpoint.meta().iter() {
            say!("  {key:<44} {}", describe(value))?;
        }
    }
    if args.tensors {
        say!("tensors")?;
        for t in checkpoint.tensors() {
            say!(
                "  {:<40} {:<8} {:<24} {}",
                t.name,
                t.dtype.name(),
                format!("{:?}", t.shape),
                machine::bytes(t.total_bytes() as u64)
            )?;
        }
        for t in checkpoint.unreadable() {
            say!("  {:<40} {:<8} {:<24} not readable: {}", t.name, t.dtype, format!("{:?}", t.shape), t.why)?;
        }
    }
    Ok(())
}

fn report(checkpoint: &Checkpoint) -> Map<String, serde_json::Value> {
    let meta = checkpoint.meta();
    let text = |key: &str| meta.opt_str(key).ok().flatten().map(str::to_string);
    let arch = text("general.architecture").or_else(|| text("model_type")).unwrap_or_else(|| "(none)".into());
    let mut out = Map::new();
    out.insert("file".into(), json!(checkpoint.name()));
    out.insert("kind".into(), json!(checkpoint.kind().name()));
    out.insert("name".into(), json!(text("general.name")));
    out.insert("architecture".into(), json!(arch));
    // A file that cannot run is shown too, with the reason.
    let runs = match model::build(checkpoint) {
        Ok(_) => "yes".to_string(),
        Err(error) => format!("no: {error}"),
    };
    out.insert("runs".into(), json!(runs));
    out.insert("parameters".into(), json!(load::n_params(checkpoint)));
    out.insert("weights".into(), json!(machine::bytes(checkpoint.data_bytes() as u64)));
    out.insert("files".into(), json!(checkpoint.files().len()));

    let prefix = format!("{arch}.");
    let is_gguf = checkpoint.kind() == Kind::Gguf;
    // Of a folder, the numeric keys at the top level.
    let dims = meta.iter().filter_map(|(key, value)| match is_gguf {
        true => Some((key.strip_prefix(&prefix)?.to_string(), scalar(value))),
        false => (!key.contains('.') && value.to_number().is_some()).then(|| (key.to_string(), scalar(value))),
    });
    out.insert("dimensions".into(), dims.collect::<Map<_, _>>().into());
    out.insert("weight types".into(), mix(checkpoint, |t| t.dtype.name().to_string()));
    out.insert("size by kind".into(), mix(checkpoint, kind));
    if !checkpoint.unreadable().is_empty() {
        let mut types: Vec<&str> = checkpoint.unreadable().iter().map(|t| t.dtype.as_str()).collect();
        let n = types.len();
        types.sort_unstable();
        types.dedup();
        out.insert("not readable".into(), json!(format!("{n} tensors of {}", types.join(", "))));
    }
    out.insert("tokenizer".into(), if is_gguf { tokenizer(checkpoint) } else { folder_tokenizer(checkpoint) });
    let template = match engine::folder::chat_template(checkpoint) {
        Ok(Some(template)) => format!("{} characters", template.chars().count()),
        Ok(None) => "none".into(),
        Err(error) => error.to_string(),
    };
    out.insert("chat template".into(), json!(template));
    out
}

/// Tensors and bytes by a name.
fn mix(checkpoint: &Checkpoint, name: impl Fn(&TensorInfo) -> String) -> serde_json::Value {
    let mut sums: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let entry = sums.entry(name(tensor)).or_default();
        entry.0 += 1;
        entry.1 += tensor.total_bytes() as u64;
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
    let text =
        sums.into_iter().map(|(name, (n, bytes))| (name, json!(format!("{} in {n} tensors", machine::bytes(bytes)))));
    text.collect::<Map<_, _>>().into()
}

/// The purpose of a tensor, by its name in GGUF files and folders.
fn kind(tensor: &TensorInfo) -> String {
    const KINDS: [(&str, &[&str]); 7] = [
        ("experts", &["_exps.", ".experts.", ".switch_mlp.", ".switch_glu."]),
        ("routers", &["ffn_gate_inp", ".mlp.gate.", ".router."]),
        ("norms", &["norm"]),
        ("attention", &["attn"]),
        ("dense mlp", &["ffn", ".mlp.", "shared_expert"]),
        ("embedding", &["token_embd", "embed_tokens"]),
        ("output", &["output", "lm_head"]),
    ];
    let kind = KINDS.iter().find(|(_, parts)| parts.iter().any(|part| tensor.name.contains(part)));
    kind.map_or("other", |(kind, _)| kind).to_string()
}

fn folder_tokenizer(checkpoint: &Checkpoint) -> serde_json::Value {
    let tokenizer = match Tokenizer::load(checkpoint) {
        Ok(tokenizer) => tokenizer,
        // A folder without one is worth looking into as well.
        Err(error) => return json!({"model": format!("none: {error}")}),
    };
    json!({
        "tokens": tokenizer.n_vocab(),
        "bos_token_id": tokenizer.bos(),
        "eos_token_id": tokenizer.eos(),
        "padding_token_id": tokenizer.pad(),
        "ends_of_generation": tokenizer.ends_of_generation(),
        "add_bos_token": tokenizer.add_bos(),
    })
}

fn tokenizer(checkpoint: &Checkpoint) -> serde_json::Value {
    let meta = checkpoint.meta();
    let mut out = Map::new();
    for key in ["model", "pre", "bos_token_id", "eos_token_id", "eot_token_id", "padding_token_id", "add_bos_token"] {
        if let Some(value) = meta.get(&format!("tokenizer.ggml.{key}")) {
            out.insert(key.into(), scalar(value));
        }
    }
    if let Ok(Some(tokens)) = meta.opt_strings("tokenizer.ggml.tokens") {
        out.insert("tokens".into(), json!(tokens.len()));
    }
    if let Ok(Some(merges)) = meta.opt_strings("tokenizer.ggml.merges") {
        out.insert("merges".into(), json!(merges.len()));
    }
    out.into()
}

fn scalar(value: &Value) -> serde_json::Value {
    match value {
        Value::Bool(v) => json!(v),
        Value::Str(text) => json!(text.as_str()),
        Value::F32(_) | Value::F64(_) => json!(value.to_f32()),
        _ => value.to_int().and_then(|v| i64::try_from(v).ok()).map_or_else(|| json!(describe(value)), |v| json!(v)),
    }
}

/// One line for any value.
fn describe(value: &Value) -> String {
    let text = match value {
        Value::Str(text) => format!("{:?}", text.as_str().unwrap_or("(not UTF-8)")),
        Value::Bool(v) => v.to_string(),
        Value::F32(v) => v.to_string(),
        Value::F64(v) => v.to_string(),
        _ => value.to_int().map_or_else(|| value.describe(), |v| v.to_string()),
    };
    if text.chars().count() <= 100 { text } else { format!("{}…", text.chars().take(99).collect::<String>()) }
}

fn plain(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Null => "-".into(),
        value => value.to_string(),
    }
}

fn tensor_json(t: &TensorInfo) -> serde_json::Value {
    json!({"name": t.name, "type": t.dtype.name(), "shape": t.shape, "file": t.file, "offset": t.offset, "bytes": t.total_bytes()})
}
