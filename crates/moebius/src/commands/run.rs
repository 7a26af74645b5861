//! `moebius run`: one prompt, one answer.

use std::io::{IsTerminal, Read, Write};

use anyhow::{Context, Result, bail};
use engine::scheduler::Request;

use crate::answer::{Interrupt, generate, summary};
use crate::args::RunArgs;
use crate::load;

pub fn run(args: &RunArgs) -> Result<()> {
    let prompt = prompt(args)?;
    let model = load::open(args.model.model.as_deref())?;
    if model.embedded && !args.quiet {
        eprintln!("no -m: running the embedded {}, a tiny story and small-talk model", crate::embedded::NAME);
    }
    let mut session = load::start(model, &args.engine)?;
    let tokens = if args.raw || session.template.is_none() {
        session.encode_raw(&prompt)
    } else {
        let mut messages = Vec::new();
        if let Some(system) = &args.system {
            messages.push(serde_json::json!({"role": "system", "content": system}));
        }
        messages.push(serde_json::json!({"role": "user", "content": prompt}));
        session.encode_chat(messages)?
    };
    let mut request = Request::new(tokens);
    request.max_new_tokens = args.n_predict.unwrap_or(usize::MAX);
    request.sampling = session.sampling(&args.sampling)?;
    request.stop_strings = args.stop.clone();
    request.ignore_eos = args.ignore_eos;

    let interrupt = Interrupt::install()?;
    let mut out = std::io::stdout().lock();
    let answer = generate(&mut session.engine, request, &interrupt, |piece| {
        if !piece.is_empty() {
            out.write_all(piece.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    })?;
    if !answer.text.ends_with('\n') {
        writeln!(out)?;
    }
    if !args.quiet {
        eprintln!("{}", summary(&answer.usage, answer.reason));
    }
    Ok(())
}

/// The prompt from where the user put it.
fn prompt(args: &RunArgs) -> Result<String> {
    if let Some(text) = args.text.as_ref().or(args.prompt.as_ref()) {
        return Ok(text.clone());
    }
    if let Some(path) = &args.file {
        return std::fs::read_to_string(path).with_context(|| format!("read prompt file {}", path.display()));
    }
    let mut stdin = std::io::stdin().lock();
    if stdin.is_terminal() {
        bail!("find a prompt: give it as an argument, with -p, in a file with -f, or on stdin (or use `moebius chat`)");
    }
    let mut text = String::new();
    stdin.read_to_string(&mut text).context("read the prompt from stdin")?;
    Ok(text)
}
