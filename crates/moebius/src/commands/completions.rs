//! `moebius completions`: a completion script, made from the table of flags.

use std::io::Write;

use anyhow::Result;
use clap::CommandFactory;

use crate::args::Cli;
use crate::out::Out;

pub fn run(shell: clap_complete::Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "moebius", &mut script);
    Ok(Out::lock().write_all(&script)?)
}
