//! `moebius pull`: a model from Hugging Face into its cache.

use anyhow::Result;

use crate::args::PullArgs;
use crate::find::Caches;
use crate::hub::{Hub, Wanted};
use crate::out::say;

pub fn run(args: &PullArgs) -> Result<()> {
    let wanted = Wanted::parse(&args.name, &args.revision)?;
    let hub = Hub::here()?;
    let path = match Caches::here().find(&args.name) {
        // What is there is all that can be had.
        Ok(path) if hub.is_offline() => path,
        _ => hub.pull(&wanted)?,
    };
    say!("{}", path.display())
}
