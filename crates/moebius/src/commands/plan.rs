//! `moebius plan`: what the engine will compute, what lives where, and the memory it needs.

use anyhow::Result;

use crate::args::PlanArgs;
use crate::load::{self, EngineSetup};
use crate::machine::bytes;

pub fn run(args: &PlanArgs) -> Result<()> {
    let model = load::open(args.model.model.as_deref())?;
    let setup = EngineSetup::from(&args.engine);
    let positions = setup.context(&model.plan)?;
    let limits = setup.engine_limits(&model.plan, positions)?;
    let (backend, _) = setup.backend(&model.checkpoint, &model.plan)?;
    let plan = if args.unfused { model.plan } else { backend.lower(model.plan)? };
    println!("{}", *plan);

    let cache = setup.cache_bytes(&plan);
    let buffers = model::plan::memory::place(&plan, limits.max_tokens, limits.max_outputs).bytes as u64;
    let weights = model.checkpoint.data_bytes() as u64;
    println!("weights by kind");
    for (kind, n) in plan.weight_bytes() {
        println!("  {:<12} {:>10}", kind.name(), bytes(n as u64));
    }
    println!("memory");
    println!("  weights      {:>10}  mapped from {}, read when touched", bytes(weights), model.checkpoint.name());
    println!(
        "  cache        {:>10}  {} for each of {positions} positions",
        bytes(cache.position * positions as u64),
        bytes(cache.position)
    );
    if let Some(window) = plan.window() {
        let n = (limits.n_window_pages * backend::PAGE) as u64;
        println!(
            "  windows      {:>10}  {} for each of {n} positions; a sequence keeps {window}, checkpoints and chunks take the rest",
            bytes(cache.window_position * n),
            bytes(cache.window_position)
        );
    }
    if cache.state > 0 {
        println!(
            "  states       {:>10}  {} for the sequence and each of {} checkpoints",
            bytes(cache.state * limits.n_states as u64),
            bytes(cache.state),
            limits.n_states - 1
        );
    }
    println!("  buffers      {:>10}  for {} tokens in a step", bytes(buffers), limits.max_tokens);
    println!("  together     {:>10}", bytes(weights + cache.total(&limits) + buffers));
    if let Some(free) = crate::machine::free_memory() {
        println!("  free now     {:>10}", bytes(free as u64));
    }
    println!("a decoded token reads {} of weights", bytes(plan.bytes_per_token() as u64));
    Ok(())
}
