//! `moebius run`: one prompt, one answer.

use std::io::IsTerminal;

use anyhow::{Context, Result, anyhow, bail};
use engine::formats::{Ask, Format};
use engine::grammar::{self, Constraint, Grammars, Rule};
use engine::scheduler::{FinishReason, Request};

use crate::answer::{Interrupt, Interrupted, generate, streamed_summary, summary};
use crate::args::{RunArgs, Switch};
use crate::load::{self, Session};
use crate::out::note;
use crate::show::Show;
use crate::{find, input};

pub fn run(args: &RunArgs) -> Result<()> {
    let prompt = prompt(args)?;
    if prompt.trim().is_empty() {
        bail!("run: the prompt is empty");
    }
    let path = args.model.model.as_deref().map(|path| find::resolve_or_pull(path, args.pull)).transpose()?;
    let model = load::open(path.as_deref())?;
    let model = model.with_template(args.template.chat_template_file.as_deref())?;
    if model.embedded && !args.quiet {
        note!("{}", crate::embedded::notice());
    }
    let mut session = load::start(model, &args.engine)?;
    session.think = args.template.think.map(|switch| switch == Switch::On);
    session.placement.iter().filter(|_| !args.quiet).for_each(|placement| note!("{placement}"));
    session.warning.iter().for_each(|warning| note!("warning: {warning}"));
    let ignored = [("--system", args.system.is_some()), ("--think", args.template.think.is_some())];
    for (flag, _) in ignored.iter().filter(|(_, is_set)| *is_set && session.template.is_none()) {
        note!("warning: the model has no chat template: {flag} is left out, and the prompt goes to it as it is");
    }
    let raw = args.raw || session.template.is_none();
    let tokens = if raw {
        session.encode_raw(&prompt)
    } else {
        let mut messages = Vec::new();
        if let Some(system) = &args.system {
            messages.push(serde_json::json!({"role": "system", "content": system}));
        }
        messages.push(serde_json::json!({"role": "user", "content": prompt}));
        session.encode_chat(messages)?
    };
    // A raw prompt has no template's marks, and neither has its answer.
    let format = if raw { Format::PLAIN } else { session.format };
    let opened = !raw && session.opens_thought(&tokens);
    let mut request = Request::new(tokens);
    request.constraint = constraint(args, &session, format, opened)?;
    let has_form = request.constraint.is_some();
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
    if !args.quiet {
        note!("{}", summary(&answer.usage, answer.reason));
        let stats = session.engine.stats();
        stats.streamed.iter().for_each(|streamed| note!("{}", streamed_summary(streamed, stats.tokens)));
    }
    match answer.reason {
        FinishReason::Cancelled => Err(Interrupted.into()),
        FinishReason::Length | FinishReason::ContextFull if has_form => {
            bail!("complete the answer: it was cut before its form was complete (see -n and --ctx)")
        }
        _ => Ok(()),
    }
}

/// The constraint on the answer, if any.
fn constraint(args: &RunArgs, session: &Session, format: Format, opened: bool) -> Result<Option<Constraint>> {
    let rule = match (&args.json_schema, &args.grammar, &args.regex) {
        (Some(path), ..) => {
            let schema = serde_json::from_str(&input::text(path)?);
            let schema = schema.with_context(|| format!("read the JSON of {}", path.display()))?;
            Rule::JsonSchema(if args.open_objects { schema } else { grammar::closed(schema) })
        }
        (_, Some(path), _) => {
            let text = input::text(path)?;
            match grammar::is_gbnf(&text) {
                true => grammar::from_gbnf(&text).map_err(|why| anyhow!("read GBNF from {}: {why}", path.display()))?,
                false => Rule::Lark(text),
            }
        }
        (.., Some(regex)) => Rule::Regex(regex.clone()),
        _ => return Ok(None),
    };
    let grammars = Grammars::new(session.tokenizer.clone(), 1)?;
    let grammars = match crate::trial::process() {
        Some(trial) => grammars.with_trial(trial),
        None => grammars,
    };
    let ask = Ask { content: Some(&rule), opened, ..Ask::default() };
    Ok(format.constraint(&ask, &session.tokenizer, &grammars)?)
}

/// The prompt from where the user put it.
fn prompt(args: &RunArgs) -> Result<String> {
    if let Some(text) = args.text.as_ref().or(args.prompt.as_ref()) {
        return Ok(text.clone());
    }
    if let Some(path) = &args.file {
        return input::text(path);
    }
    if std::io::stdin().is_terminal() {
        bail!("find a prompt: give it as an argument, with -p, in a file with -f, or on stdin (or use `moebius chat`)");
    }
    input::stdin()
}
