//! `moebius man`: manual pages from the table of flags, one for the program and one for each command.

use std::path::Path;

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::args::Cli;
use crate::out::{self, say};

pub fn run(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("failed to make the folder {}", folder.display()))?;
    let cli = Cli::command();
    let mut pages = vec![cli.clone()];
    for sub in cli.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let name = format!("{}-{}", cli.get_name(), sub.get_name());
        let shown = format!("{} {}", cli.get_name(), sub.get_name());
        pages.push(sub.clone().name(name).bin_name(shown).version(crate::version::short()));
    }
    for page in &pages {
        let path = folder.join(format!("{}.1", page.get_name()));
        let mut text = Vec::new();
        clap_mangen::Man::new(page.clone()).render(&mut text).context("failed to write a manual page")?;
        out::file(&path, |out| out.write_all(&text))?;
    }
    say!("wrote {} pages into {}", pages.len(), folder.display())
}
