//! The command line: arguments in, text out. The only crate that knows terminals, files named by a user and the clock.
//!
//! The program is [`main`]; [`local`] is a model in the hands of another program, which the Python package, the C
//! library and workers of Dynamo use. No other crate may call more than these two.

// What is written goes through `out`: these panic when a stream is closed or full.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod answer;
mod args;
mod commands;
mod compare;
mod compat;
mod config;
mod convert;
mod device;
mod embedded;
mod find;
mod hub;
mod ink;
mod input;
mod load;
mod machine;
mod memory;
mod out;
mod predict;
mod prompts;
mod quantize;
mod routes;
mod sampling;
mod serve;
mod show;
mod trial;
mod version;

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};

use args::{Cli, Command};

pub use out::chain as causes;
pub use serve::local;
pub use trial::start_with as try_grammars_with;

/// The allocator that every program around this crate installs: it counts what the threads of templates hold, as their
/// second bound.
pub use sys::meter::Meter as Allocator;

/// Runs a command line, whose first word is the program's name; its exit status.
pub fn main(args: Vec<OsString>) -> u8 {
    #[cfg(windows)]
    sys::windows::set_up();
    let typed: Vec<String> = args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
    let translated = match compat::translate(args) {
        Ok(translated) => translated,
        Err(why) => {
            out::note!("moebius: {why}");
            return 2;
        }
    };
    let config::Settled { command, args, presets, .. } = match config::settle(Cli::command(), translated.args) {
        Ok(settled) => settled,
        Err(why) => {
            out::note!("moebius: {why}");
            return 2;
        }
    };
    let parsed = command.try_get_matches_from(&args).and_then(|all| Ok((Cli::from_arg_matches(&all)?, all)));
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(said) => return explain(&said, &typed),
    };
    if let Some(said) = names_twice(&matches) {
        return explain(&said, &typed);
    }
    let own = presets.into_iter().map(|preset| {
        let cli = Cli::from_arg_matches(&preset.parse(&args)?)?;
        Ok((preset, cli.command))
    });
    let own: Vec<_> = match own.collect() {
        Ok(own) => own,
        Err(said) => return explain(&said, &typed),
    };
    translated.notes.iter().for_each(|note| out::note!("moebius: {note}"));
    for (name, near) in config::unknown_variables(&Cli::command()) {
        let near = near.map(|near| format!("; {near} is one")).unwrap_or_default();
        out::note!("moebius: warning: the variable {name} is no setting{near}");
    }
    machine::use_kernels(cli.kernels.clone(), cli.compiled_kernels.clone());
    cli.cuda_arch.into_iter().for_each(gpu::cuda::use_older_arch);
    // Before any thread is started: threads inherit where they run and where their memory is.
    let numa = matches.subcommand().and_then(|(_, given)| given.try_get_one("numa").ok().flatten());
    if let Some(note) = numa.and_then(|&numa| machine::settle_on_nodes(numa)) {
        out::note!("moebius: {note}");
    }
    let result = match &cli.command {
        Command::Run(args) => commands::run::run(args),
        Command::Chat(args) => commands::chat::run(args),
        Command::Serve(args) => serve::run(args, &own),
        Command::Bench(args) => commands::bench::run(args),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Plan(args) => commands::plan::run(args),
        Command::Logits(args) => commands::logits::run(args),
        Command::Tokenize(args) => commands::tokenize::run(args),
        Command::Render(args) => commands::render::run(args),
        Command::Perplexity(args) => commands::perplexity::run(args),
        Command::Compare(args) => commands::compare::run(args),
        Command::Imatrix(args) => commands::imatrix::run(args),
        Command::Quantize(args) => commands::quantize::run(args),
        Command::Convert(args) => commands::convert::run(args),
        Command::Pull(args) => commands::pull::run(args),
        Command::Models(args) => commands::models::run(args),
        Command::Devices => commands::devices::run(),
        Command::TryGrammar => trial::run(),
        Command::Health(args) => commands::health::run(args),
        Command::Config(args) => commands::config::run(args, Cli::command()),
        Command::Man { folder } => commands::man::run(folder),
        Command::Completions { shell } => commands::completions::run(*shell),
    };
    end(result.and_then(|()| out::flush()), 0)
}

/// Help and the version on stdout, mistakes of the command line on stderr.
fn explain(said: &clap::Error, typed: &[String]) -> u8 {
    let code = u8::try_from(said.exit_code()).unwrap_or(2);
    match said.print() {
        // Nobody hears about the mistake, but that there was one.
        _ if said.use_stderr() => {
            let hint = hint(said.kind(), typed).or_else(|| of_variable(said));
            hint.iter().for_each(|hint| out::note!("{hint}"));
            code
        }
        Ok(()) => end(out::flush(), code),
        Err(error) => end(Err(out::at_stdout(error).into()), code),
    }
}

/// Refuses a model with -m next to one without: only what is typed counts, as variables and files give way.
fn names_twice(matches: &clap::ArgMatches) -> Option<clap::Error> {
    let (_, given) = matches.subcommand()?;
    let is_typed = |id: &str| {
        given.try_contains_id(id).is_ok_and(|is_there| is_there)
            && given.value_source(id) == Some(clap::parser::ValueSource::CommandLine)
    };
    let why = "a model with -m cannot be used with one without\n";
    (is_typed("named") && is_typed("model")).then(|| clap::Error::raw(ErrorKind::ArgumentConflict, why))
}

/// Returns what somebody may have meant who knows other programs.
fn hint(kind: ErrorKind, typed: &[String]) -> Option<String> {
    let first = typed.get(1)?;
    match kind {
        ErrorKind::InvalidSubcommand if let Some(hint) = of_ollama(first) => Some(hint.into()),
        _ if first.starts_with('-') => Some(
            "the command comes first: moebius run -m FILE \"Hello\", moebius chat -m FILE, moebius serve -m FILE"
                .into(),
        ),
        ErrorKind::InvalidSubcommand => Some(format!("to answer a prompt: moebius run {first:?}")),
        ErrorKind::UnknownArgument if first == "run" => {
            Some(match typed.get(2).filter(|t| find::looks_like_model(t)) {
                Some(model) => format!("the model follows -m: moebius run -m {model} \"hello world\""),
                None => "put the prompt in quotes: moebius run \"hello world\"".into(),
            })
        }
        _ => None,
    }
}

/// Returns the variable that a wrong value came from.
fn of_variable(said: &clap::Error) -> Option<String> {
    use clap::error::{ContextKind, ContextValue};
    let text = |kind| match said.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    };
    let (flag, value) = (text(ContextKind::InvalidArg)?, text(ContextKind::InvalidValue)?);
    let name = config::variable(flag.strip_prefix("--")?.split([' ', '=']).next()?);
    (std::env::var(&name).ok().as_ref() == Some(value)).then(|| format!("the value is that of the variable {name}"))
}

/// Returns what to do instead of a command of Ollama's that is none here.
fn of_ollama(command: &str) -> Option<&'static str> {
    Some(match command {
        "ps" => "GET /api/ps of a running server lists its loaded models; `moebius models` lists downloaded ones",
        "show" => "to show what a model is: moebius inspect -m MODEL",
        "rm" => "`moebius models` prints where each file is stored; delete it there",
        "stop" => "Ctrl-C or systemctl stops a server; POST /models/unload unloads one of several models",
        "create" | "cp" => "a name with settings for a model is a [preset.NAME] in ~/.config/moebius/config.toml",
        "push" => "moebius uploads nothing; `hf upload` does",
        _ => return None,
    })
}

/// Says why a command failed; `code` is that of success.
fn end(result: anyhow::Result<()>, code: u8) -> u8 {
    match result {
        Ok(()) => code,
        Err(error) if out::is_broken_pipe(&error) => code,
        // As a shell reports a program that Ctrl-C has ended.
        Err(error) if error.is::<answer::Interrupted>() => 130,
        Err(error) => {
            out::note!("moebius: {}", out::chain(&error));
            1
        }
    }
}
