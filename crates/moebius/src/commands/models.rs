//! `moebius models`: the models that are on this machine already, and whether they run.

use std::io::Write;

use anyhow::Result;
use model::arch::{ARCHS, Arch};
use serde_json::json;

use crate::args::ModelsArgs;
use crate::find::{Caches, Found};
use crate::out::{Out, say};
use crate::{machine, out};

/// What a file's header says.
struct ModelRow {
    found: Found,
    bytes: u64,
    /// Its architecture, or why it does not run.
    runs: Result<String, String>,
}

pub fn run(args: &ModelsArgs) -> Result<()> {
    if args.supported {
        return supported(args.json);
    }
    let rows: Vec<ModelRow> = Caches::here().list().into_iter().map(row).collect();
    if args.json {
        let all: Vec<_> = rows
            .iter()
            .map(|row| {
                json!({
                    "name": row.found.name,
                    "source": row.found.source,
                    "path": row.found.path,
                    "bytes": row.bytes,
                    "architecture": row.runs.as_ref().ok(),
                    "error": row.runs.as_ref().err(),
                })
            })
            .collect();
        return Ok(writeln!(Out::lock(), "{}", out::json(&serde_json::to_string_pretty(&all)?))?);
    }
    if rows.is_empty() {
        say!("no models in the caches of Hugging Face, LM Studio or Ollama; `-m` takes any path")?;
    }
    let width = rows.iter().map(|row| row.found.name.chars().count()).max().unwrap_or(0).min(60);
    for ModelRow { found, bytes, runs } in &rows {
        let runs = match runs {
            Ok(arch) => arch.clone(),
            Err(why) => format!("does not run: {why}"),
        };
        say!("{:<width$}  {:>9}  {:<12}  {runs}", found.name, machine::bytes(*bytes), found.source)?;
    }
    Ok(())
}

/// Prints the table of architectures.
fn supported(as_json: bool) -> Result<()> {
    if as_json {
        let row = |arch: &Arch| json!({"models": arch.models, "gguf": arch.gguf, "folder": arch.folder});
        let rows: Vec<_> = ARCHS.iter().map(row).collect();
        return Ok(writeln!(Out::lock(), "{}", serde_json::to_string_pretty(&rows)?)?);
    }
    for arch in ARCHS {
        let mut names = arch.gguf.to_vec();
        names.extend(arch.folder.iter().filter(|name| !arch.gguf.contains(name)));
        say!("{}: {}", names.join(", "), arch.models)?;
    }
    say!("\nGGUF files, and folders of MLX and Hugging Face. docs/models.md lists their types and what is missing.")
}

fn row(found: Found) -> ModelRow {
    let checkpoint = checkpoint::open(&found.path).map_err(|error| error.to_string());
    let bytes = checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.data_bytes() as u64);
    let runs = checkpoint.and_then(|checkpoint| match model::build(&checkpoint) {
        Ok(plan) => Ok(plan.arch.to_string()),
        Err(error) => Err(error.to_string()),
    });
    ModelRow { found, bytes, runs }
}
