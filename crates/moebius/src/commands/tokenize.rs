//! `moebius tokenize`: text to ids and back.

use std::io::Write;

use anyhow::{Context, Result, bail};
use engine::tokenizer::{Encode, Tokenizer};

use crate::args::TokenizeArgs;
use crate::out::{self, Out};
use crate::{embedded, input};

pub fn run(args: &TokenizeArgs) -> Result<()> {
    let checkpoint = embedded::open(args.model.path()?.as_deref())?;
    let tokenizer = Tokenizer::load(&checkpoint)?;
    let text = match (&args.text, &args.file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => input::text(path)?,
        (None, None) => input::stdin()?,
    };
    let mut out = Out::lock();
    if args.decode {
        let ids = parse_ids(&text)?;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= tokenizer.n_vocab()) {
            bail!("failed to decode: token id {id} is outside the vocabulary of {}", tokenizer.n_vocab());
        }
        let text = tokenizer.decode(&ids);
        return match args.json {
            true => out::json_line(&text),
            false => Ok(out.text(&text)?),
        };
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

/// Ids with blanks or commas between them, in brackets or not: a JSON array is fine too.
fn parse_ids(text: &str) -> Result<Vec<u32>> {
    text.split(|c: char| c.is_whitespace() || matches!(c, ',' | '[' | ']'))
        .filter(|word| !word.is_empty())
        .map(|word| {
            word.parse()
                .with_context(|| format!("failed to read token id {:?}", word.chars().take(40).collect::<String>()))
        })
        .collect()
}
