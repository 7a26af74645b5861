//! `moebius inspect`: the contents of a model file. Reads the header, never the weights.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Result;
use backend::{Backend, Kinds, PAGE};
use checkpoint::{Checkpoint, Kind, TensorInfo, Unreadable, Value};
use cpu::Cpu;
use engine::tokenizer::Tokenizer;
use serde_json::{Map, Value as Json, json};

use crate::args::InspectArgs;
use crate::memory::Units;
use crate::out::{Out, say};
use crate::{embedded, load, machine, out, sampling};

/// Context whose memory is shown beside that of a position.
const SHOWN_CTX: usize = 8192;

pub fn run(args: &InspectArgs) -> Result<()> {
    let path = match &args.file {
        Some(path) => Some(path.clone()),
        None => args.model.path()?,
    };
    let checkpoint = embedded::open(path.as_deref())?;
    let mut report = report(&checkpoint)?;
    if args.json {
        if args.metadata {
            let all = checkpoint.meta().iter().map(|(key, value)| (key.to_string(), scalar(value)));
            report.insert("metadata".into(), all.collect::<Map<_, _>>().into());
        }
        if args.tensors {
            report.insert("tensors".into(), checkpoint.tensors().iter().map(tensor_json).collect());
            let other = |t: &Unreadable| json!({"name": t.name, "type": t.dtype, "shape": t.shape, "why": t.why});
            report.insert("unreadable_tensors".into(), checkpoint.unreadable().iter().map(other).collect());
        }
        return Ok(writeln!(Out::lock(), "{}", out::json(&serde_json::to_string_pretty(&report)?))?);
    }
    for (key, value) in &report {
        match value {
            Json::Object(map) if !map.is_empty() => {
                say!("{}", title(key))?;
                map.iter().try_for_each(|(key, value)| say!("  {:<24} {}", title(key), shown(key, value)))?;
            }
            value => say!("{:<26} {}", title(key), shown(key, value))?,
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

/// Returns what is known of a file, in numbers; keys name their units.
fn report(checkpoint: &Checkpoint) -> Result<Map<String, Json>> {
    let meta = checkpoint.meta();
    let text = |key: &str| meta.opt_str(key).ok().flatten().map(str::to_string);
    let arch = text("general.architecture").or_else(|| text("model_type")).unwrap_or_else(|| "(none)".into());
    // A file that cannot run is shown too, with the reason.
    let plan = model::build(checkpoint);
    let mut out = Map::new();
    let mut add = |key: &str, value: Json| drop(out.insert(key.into(), value));
    add("file", json!(checkpoint.name()));
    add("kind", json!(checkpoint.kind().name()));
    add("name", json!(text("general.name")));
    add("architecture", json!(arch));
    add("type", json!(load::file_type(checkpoint)));
    add("runs", json!(plan.is_ok()));
    if let Err(error) = &plan {
        add("why_not", json!(error.to_string()));
    }
    add("parameters", json!(load::n_params(checkpoint)));
    if let Ok(plan) = &plan {
        add("active_parameters", json!(plan.active_params()));
    }
    add("weight_bytes", json!(checkpoint.data_bytes()));
    add("files", json!(checkpoint.files().iter().filter(|file| !file.is_repacked()).count()));
    if let Ok(plan) = plan {
        let cpu = Cpu::default();
        let (trained, plan) = (plan.n_ctx_train, cpu.lower(plan)?);
        let units = Units::of(&cpu, &plan, 0);
        let memory = units.read_per_token(SHOWN_CTX as u64);
        add(
            "context",
            json!({
                "trained": trained,
                "position_bytes": units.page / PAGE,
                "window_bytes": Kinds::of(&plan).window.unwrap_or(0) * units.window_page / PAGE,
                "state_bytes": units.state,
                (format!("bytes_at_{SHOWN_CTX}")): memory,
            }),
        );
    }
    add("sampling", sampling::json(&sampling::of_model(checkpoint)?));
    add("sampling_recommended", json!(sampling::recommended_names(checkpoint)?.join(", ")));

    let prefix = format!("{arch}.");
    let is_gguf = checkpoint.kind() == Kind::Gguf;
    // Of a folder, the numeric keys at the top level.
    let dims = meta.iter().filter_map(|(key, value)| match is_gguf {
        true => Some((key.strip_prefix(&prefix)?.to_string(), scalar(value))),
        false => (!key.contains('.') && value.to_number().is_some()).then(|| (key.to_string(), scalar(value))),
    });
    add("dimensions", dims.collect::<Map<_, _>>().into());
    add("weight_types", mix(checkpoint, |t| t.dtype.name().to_string()));
    add("weights_by_use", mix(checkpoint, kind));
    if !checkpoint.unreadable().is_empty() {
        let mut types: Vec<&str> = checkpoint.unreadable().iter().map(|t| t.dtype.as_str()).collect();
        let n = types.len();
        types.sort_unstable();
        types.dedup();
        add("unreadable", json!({"tensors": n, "types": types}));
    }
    add("tokenizer", if is_gguf { tokenizer(checkpoint) } else { folder_tokenizer(checkpoint) });
    match engine::folder::chat_template(checkpoint) {
        Ok(template) => add("template_characters", json!(template.map(|template| template.chars().count()))),
        Err(error) => add("template_error", json!(error.to_string())),
    }
    Ok(out)
}

/// Tensors and bytes by a name, most bytes first.
fn mix(checkpoint: &Checkpoint, name: impl Fn(&TensorInfo) -> String) -> Json {
    let mut sums: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let entry = sums.entry(name(tensor)).or_default();
        entry.0 += 1;
        entry.1 += tensor.total_bytes() as u64;
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
    sums.into_iter()
        .map(|(name, (n, bytes))| (name, json!({"tensors": n, "bytes": bytes})))
        .collect::<Map<_, _>>()
        .into()
}

/// Returns the purpose of a tensor, by its name in GGUF files and folders.
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

fn folder_tokenizer(checkpoint: &Checkpoint) -> Json {
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

fn tokenizer(checkpoint: &Checkpoint) -> Json {
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

fn scalar(value: &Value) -> Json {
    match value {
        Value::Bool(v) => json!(v),
        Value::Str(text) => json!(text.as_str()),
        Value::F32(_) | Value::F64(_) => value.to_f32().map_or(Json::Null, sampling::number),
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

/// Returns a key for people.
fn title(key: &str) -> String {
    match key {
        "position_bytes" => "KV cache per token".into(),
        "window_bytes" => "KV cache of windows".into(),
        "state_bytes" => "state per sequence".into(),
        key => match key.strip_prefix("bytes_at_") {
            Some(tokens) => format!("KV cache at {tokens}"),
            None => key.replace('_', " "),
        },
    }
}

/// Returns a value for people, by what its key says of its unit.
fn shown(key: &str, value: &Json) -> String {
    let bytes = |value: &Json| value.as_u64().map(machine::bytes);
    match value {
        Json::Null => "-".into(),
        Json::Bool(value) => if *value { "yes" } else { "no" }.into(),
        Json::String(text) => text.clone(),
        Json::Object(map) => match (bytes(&value["bytes"]), map.get("tensors")) {
            (Some(bytes), Some(n)) => format!("{bytes} in {n} tensors"),
            _ => value.to_string(),
        },
        value if key.contains("bytes") => bytes(value).unwrap_or_else(|| value.to_string()),
        value if key.contains("parameters") => value.as_u64().map_or_else(|| value.to_string(), machine::count),
        value => value.to_string(),
    }
}

fn tensor_json(t: &TensorInfo) -> Json {
    json!({"name": t.name, "type": t.dtype.name(), "shape": t.shape, "file": t.file, "offset": t.offset, "bytes": t.total_bytes()})
}
