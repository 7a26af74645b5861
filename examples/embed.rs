//! Embeds the engine in a program: `cargo run --release --example embed -- "Why is the sky blue?"`.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use backend::{Backend, Limits};
use cpu::Cpu;
use engine::folder::chat_template;
use engine::scheduler::{EventKind, Events, Options, Request};
use engine::template::{Chat, ChatTemplate, Message};
use engine::tokenizer::{Encode, Tokenizer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let question = std::env::args().nth(1).unwrap_or_else(|| "Why is the sky blue?".into());
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/fable-29m-a10m-q4_k_m.gguf");

    // The header becomes a plan, and plan and weights become a program with room for 1,024 positions.
    let checkpoint = Arc::new(checkpoint::open(&file)?);
    let cpu = Cpu::default();
    let plan = cpu.lower(model::build(&checkpoint)?)?;
    let limits = Limits { max_tokens: 128, max_outputs: 1, n_pages: 32, max_positions: 1024, ..Limits::default() };
    let program = cpu.compile(&plan, checkpoint.clone(), limits)?;

    let tokenizer = Arc::new(Tokenizer::load(&checkpoint)?);
    let template = chat_template(&checkpoint)?.ok_or("the model has no chat template")?;
    let messages = Message::to_json(&[Message::new("user", question)]);
    let prompt = ChatTemplate::new(&template, "", "")?.render(&Chat::new(&messages))?;
    let tokens = tokenizer.encode(&prompt, Encode { add_special: true, parse_special: true });

    // Any number of requests may be submitted; each step computes a part of all of them.
    let mut engine = engine::Engine::new(program, tokenizer, Options::default())?;
    engine.submit(Request { max_new_tokens: 200, ..Request::new(tokens) })?;
    let mut events = Events::new();
    while engine.step(&mut events)? || !events.is_empty() {
        for event in events.iter() {
            match event.kind {
                EventKind::Token { text, .. } => print!("{text}"),
                EventKind::Failed(error) => return Err(error.clone().into()),
                _ => {}
            }
        }
        std::io::stdout().flush()?;
        events.clear();
    }
    println!();
    Ok(())
}
