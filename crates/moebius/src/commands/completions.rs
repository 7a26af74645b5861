//! `moebius completions`: a completion script, made from the table of flags.

use clap::CommandFactory;

use crate::args::Cli;

pub fn run(shell: clap_complete::Shell) {
    clap_complete::generate(shell, &mut Cli::command(), "moebius", &mut std::io::stdout());
}
