//! `moebius tokenize`: text to ids and back.

use std::io::{Read, Write};

use anyhow::{Context, Result, bail};
use engine::tokenizer::{Encode, Tokenizer};

use crate::args::TokenizeArgs;
use crate::embedded;

pub fn run(args: &TokenizeArgs) -> Result<()> {
    let checkpoint = embedded::open(args.model.model.as_deref())?;
    let tokenizer = Tokenizer::load(&checkpoint)?;
    let text = match &args.file {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?,
        None => {
            let mut text = String::new();
            std::io::stdin().lock().read_to_string(&mut text).context("read stdin")?;
            text
        }
    };
    let mut out = std::io::stdout().lock();
    if args.decode {
        let ids = parse_ids(&text)?;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= tokenizer.n_vocab()) {
            bail!("decode: token id {id} is outside the vocabulary of {}", tokenizer.n_vocab());
        }
        let text = tokenizer.decode(&ids);
        if args.json {
            writeln!(out, "{}", serde_json::to_string(&text)?)?;
        } else {
            write!(out, "{text}")?;
        }
        return Ok(());
    }
    let ids = tokenizer.encode(&text, Encode { add_special: args.add_special, parse_special: args.parse_special });
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&ids)?)?;
    } else {
        for id in ids {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            writeln!(out, "{id:>8}  {:?}", String::from_utf8_lossy(bytes))?;
        }
    }
    Ok(())
}

/// Ids separated by anything that is not a digit, so that a JSON array is fine too.
fn parse_ids(text: &str) -> Result<Vec<u32>> {
    text.split(|c: char| !c.is_ascii_digit())
        .filter(|word| !word.is_empty())
        .map(|word| word.parse().with_context(|| format!("read token id {word}")))
        .collect()
}
