//! `moebius-dynamo`: a worker of NVIDIA Dynamo.

use std::process::ExitCode;
use std::sync::Arc;

use moebius_dynamo::args::{Args, Parsed};
use moebius_dynamo::engine::Moebius;

// Templates and grammars are bounded by what their threads hold.
#[global_allocator]
static ALLOCATOR: moebius::Allocator = moebius::Allocator;

/// The job of a process that this program starts: grammars are tried where memory and time are limited.
const TRY_GRAMMAR: &str = "try-grammar";

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|word| word == TRY_GRAMMAR) {
        return ExitCode::from(moebius::main(std::env::args_os().collect()));
    }
    let args = match Args::parse(std::env::args_os()) {
        Ok(Parsed::Run(args)) => args,
        Ok(Parsed::Say(text)) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("moebius-dynamo: {why}");
            return ExitCode::from(2);
        }
    };
    // The runtime ends a process that takes longer to stop than it was told, whatever still runs.
    for (name, value) in args.variables() {
        if std::env::var_os(name).is_none() {
            // SAFETY: no thread has been started yet, so that none reads the environment.
            unsafe { std::env::set_var(name, value) };
        }
    }
    let config = args.worker();
    let result = config.and_then(|config| dynamo_backend_common::run(Arc::new(Moebius::new(*args)), config));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("moebius-dynamo: {}", moebius::causes(&why));
            ExitCode::FAILURE
        }
    }
}
