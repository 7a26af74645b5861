//! The command line: arguments in, text out. The only crate that knows terminals, files named by a user and the clock.

mod answer;
mod args;
mod commands;
mod compare;
mod compat;
mod embedded;
mod find;
mod load;
mod machine;
mod memory;
mod serve;
mod show;
mod trial;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    let translated = match compat::translate(std::env::args_os()) {
        Ok(translated) => translated,
        Err(why) => {
            eprintln!("moebius: {why}");
            return ExitCode::from(2);
        }
    };
    let cli = Cli::parse_from(&translated.args);
    translated.notes.iter().for_each(|note| eprintln!("moebius: {note}"));
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
        Command::Models(args) => commands::models::run(args),
        Command::Devices => commands::devices::run(),
        Command::TryGrammar => trial::run(),
        Command::Completions { shell } => {
            commands::completions::run(*shell);
            Ok(())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // A reader that has seen enough (`moebius .. | head`) is not an error.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("moebius: failed to {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| cause.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe))
}
