//! The command line: arguments in, text out. The only crate that knows terminals, files named by a user and the clock.

// What is written goes through `out`: these panic when a stream is closed or full.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod answer;
mod args;
mod commands;
mod compare;
mod compat;
mod embedded;
mod find;
mod input;
mod load;
mod machine;
mod memory;
mod out;
mod quantize;
mod serve;
mod show;
mod trial;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

/// Counts what the threads of templates hold, as their second bound.
#[global_allocator]
static ALLOCATOR: backend::meter::Meter = backend::meter::Meter;

fn main() -> ExitCode {
    let translated = match compat::translate(std::env::args_os()) {
        Ok(translated) => translated,
        Err(why) => {
            out::note!("moebius: {why}");
            return ExitCode::from(2);
        }
    };
    let cli = match Cli::try_parse_from(&translated.args) {
        Ok(cli) => cli,
        Err(said) => return explain(&said),
    };
    translated.notes.iter().for_each(|note| out::note!("moebius: {note}"));
    let result = match &cli.command {
        Command::Run(args) => commands::run::run(args),
        Command::Chat(args) => commands::chat::run(args),
        Command::Serve(args) => serve::run(args),
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
        Command::Models(args) => commands::models::run(args),
        Command::Devices => commands::devices::run(),
        Command::TryGrammar => trial::run(),
        Command::Completions { shell } => commands::completions::run(*shell),
    };
    end(result.and_then(|()| out::flush()), ExitCode::SUCCESS)
}

/// Help and the version on stdout, mistakes of the command line on stderr.
fn explain(said: &clap::Error) -> ExitCode {
    let code = ExitCode::from(u8::try_from(said.exit_code()).unwrap_or(2));
    match said.print() {
        // Nobody hears about the mistake, but that there was one.
        _ if said.use_stderr() => code,
        Ok(()) => end(out::flush(), code),
        Err(error) => end(Err(out::at_stdout(error).into()), code),
    }
}

/// Says why a command failed; `code` is that of success.
fn end(result: anyhow::Result<()>, code: ExitCode) -> ExitCode {
    match result {
        Ok(()) => code,
        Err(error) if out::is_broken_pipe(&error) => code,
        // As a shell reports a program that Ctrl-C has ended.
        Err(error) if error.is::<answer::Interrupted>() => ExitCode::from(130),
        Err(error) => {
            out::note!("moebius: failed to {}", out::chain(&error));
            ExitCode::FAILURE
        }
    }
}
