//! `moebius run`: one prompt, one answer.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use engine::formats::Format;
use engine::grammar::{self, Constraint, Rule};
use engine::images::Pictures;
use engine::scheduler::{FinishReason, Request};
use serde_json::{Value, json};

use crate::answer::{Interrupt, Interrupted, drafts_summary, generate, streamed_summary, summary};
use crate::args::RunArgs;
use crate::load::{self, EngineSetup, Sequence, Session, Shown, Whole};
use crate::out::note;
use crate::show::Show;
use crate::{find, input, routes};

pub fn run(args: &RunArgs) -> Result<()> {
    let prompt = prompt(args)?;
    if prompt.trim().is_empty() {
        bail!("the prompt is empty");
    }
    let path = args.model.path()?;
    let model = load::open(path.as_deref())?.stretched(args.engine.step.rope_scaling)?;
    let model = model.with_template(args.template.chat_template_file.as_deref())?;
    if model.embedded && !args.quiet {
        note!("{}", crate::embedded::notice());
    }
    let setup = EngineSetup::drafting(&args.engine, args.draft.clone())?;
    let model = if args.image.is_empty() { model } else { model.seeing(&args.sight)? };
    let mut session = load::start_with(model, &setup)?;
    Whole::refuse(session.whole)?;
    session.set_thoughts(&args.template);
    session.placement.iter().filter(|_| !args.quiet).for_each(|placement| note!("{placement}"));
    session.warnings.iter().for_each(|warning| note!("warning: {warning}"));
    let ignored = [
        ("--system", args.system.is_some()),
        ("--think", args.template.think.is_some()),
        ("--think-budget", args.template.think_budget.is_some()),
    ];
    for (flag, _) in ignored.iter().filter(|(_, is_set)| *is_set && session.template.is_none()) {
        note!("warning: the model has no chat template: ignoring {flag} and passing the prompt unchanged");
    }
    let raw = args.raw || session.template.is_none();
    let mut pictures = None;
    let tokens = if !args.image.is_empty() {
        let (tokens, seen) = images(args, &session, &prompt, raw)?;
        pictures = Some(Arc::new(seen));
        tokens
    } else if raw {
        session.encode_raw(&prompt)
    } else {
        session.encode_chat(messages(args, &prompt))?
    };
    // A raw prompt has no template's marks, and neither has its answer.
    let format = if raw { Format::PLAIN } else { session.format };
    let opened = !raw && session.opens_thought(&tokens);
    let traced = args.trace_experts.as_ref().map(|path| (path, tokens.clone()));
    if traced.is_some() {
        routes::has_experts(session.engine.routers())?;
    }
    let mut request = Request::new(tokens);
    request.pictures = pictures;
    request.constraint = constraint(args, &session, format, opened)?;
    let has_form = args.json_schema.is_some() || args.grammar.is_some() || args.regex.is_some();
    request.shown = format.shown(&session.tokenizer);
    request.max_new_tokens = args.n_predict.unwrap_or(usize::MAX);
    request.sampling = session.sampling(&args.sampling)?;
    request.stop_strings = args.stop.clone();
    request.ignore_eos = args.ignore_eos;

    let interrupt = Interrupt::install()?;
    session.engine.set_interrupt(interrupt.flag());
    let mut show = Show::new(format, opened, args.quiet);
    let answer = generate(&mut session.engine, request, &interrupt, |piece| show.push(piece))?;
    show.finish()?;
    if let Some((file, prompt)) = traced.filter(|_| answer.reason != FinishReason::Cancelled) {
        let tokens = [prompt, answer.tokens].concat();
        let model = load::open(path.as_deref())?.stretched(args.engine.step.rope_scaling)?;
        let mut sequence = Sequence::start(&model, &args.engine, tokens.len())?;
        let routers = sequence.routers().to_vec();
        routes::write(file, &routers, |writer| writer.feed(&mut sequence, &tokens, tokens.len(), |_, _| ()))?;
    }
    if !args.quiet {
        note!("{}", summary(&answer.usage, answer.reason));
        let stats = session.engine.stats();
        drafts_summary(&stats).iter().for_each(|line| note!("{line}"));
        stats.streamed.iter().for_each(|streamed| note!("{}", streamed_summary(streamed, stats.tokens)));
    }
    match answer.reason {
        FinishReason::Cancelled => Err(Interrupted.into()),
        FinishReason::Length | FinishReason::ContextFull if has_form => {
            bail!("failed to complete the answer: it was cut off before it satisfied its constraint (see -n and --ctx)")
        }
        _ => Ok(()),
    }
}

/// Returns the tokens of a prompt that begins with images, and the images.
fn images(args: &RunArgs, session: &Session, prompt: &str, raw: bool) -> Result<(Vec<u32>, Pictures)> {
    ensure!(args.trace_experts.is_none(), "--trace-experts cannot be used with --image");
    let eyes = session.eyes()?;
    let shown = args.image.iter().map(|path| Shown::open(path)).collect::<Result<Vec<_>>>()?;
    let marked = shown.iter().map(|image| image.mark.as_str()).chain([prompt]).collect::<String>();
    let text = if raw { marked } else { session.render(messages(args, &marked))? };
    eyes.encode(&session.tokenizer, &text, &shown.iter().collect::<Vec<_>>())
}

/// The conversation of a prompt.
fn messages(args: &RunArgs, prompt: &str) -> Vec<Value> {
    let system = args.system.iter().map(|system| json!({"role": "system", "content": system}));
    system.chain([json!({"role": "user", "content": prompt})]).collect()
}

/// Returns the constraint on the answer, if any.
fn constraint(args: &RunArgs, session: &Session, format: Format, opened: bool) -> Result<Option<Constraint>> {
    let rule = match (&args.json_schema, &args.grammar, &args.regex) {
        (Some(value), ..) => {
            let (text, name) = file_or_text(value, |text| text.starts_with('{'))?;
            let schema = serde_json::from_str(&text);
            let schema = schema.with_context(|| format!("failed to read the JSON of {name}"))?;
            Rule::JsonSchema(if args.open_objects { schema } else { grammar::closed(schema) })
        }
        (_, Some(value), _) => {
            let is_grammar = |text: &str| text.contains("::=") || text.starts_with("start:") || text.contains('\n');
            Rule::grammar(file_or_text(value, is_grammar)?.0)
        }
        (.., Some(regex)) => Rule::Regex(regex.clone()),
        _ => return session.constraint(format, None, opened),
    };
    session.constraint(format, Some(&rule), opened)
}

/// Returns the text of a file, or the value itself where it is such a text and no file has that name; and what errors
/// call it.
fn file_or_text(value: &Path, is_text: impl Fn(&str) -> bool) -> Result<(String, String)> {
    let text = value.to_string_lossy();
    match is_text(text.trim_start()) && !value.exists() {
        true => Ok((text.into_owned(), "the flag's value".into())),
        false => Ok((input::text(value)?, value.display().to_string())),
    }
}

/// Returns the prompt from where the user put it: what is typed, then a file, then stdin, with empty lines between.
fn prompt(args: &RunArgs) -> Result<String> {
    let typed = args.text.as_ref().or(args.prompt.as_ref());
    if let (Some(text), None) = (&args.text, &args.model.model)
        && find::looks_like_model(text)
    {
        bail!("{text} looks like a model: did you mean -m {text}? (-p {text} asks it as a prompt)");
    }
    let file = args.file.as_deref().map(input::text).transpose()?;
    let is_alone = typed.is_none() && file.is_none();
    if is_alone && std::io::stdin().is_terminal() {
        bail!("no prompt: give one as an argument, with -p, in a file with -f, or on stdin (or use `moebius chat`)");
    }
    let piped = if is_alone { Some(input::stdin()?) } else { input::piped()? };
    let parts = [typed.cloned(), file, piped];
    let parts: Vec<String> = parts.into_iter().flatten().filter(|part| !part.trim().is_empty()).collect();
    Ok(parts.join("\n\n"))
}
