//! What a program of the CPU takes: the sizes of everything that compiling allocates, part by part.
//!
//! Each size comes from the function beside the constructor that allocates it. What is left out are the lists of ops
//! and the stacks of threads: some kilobytes an op and a thread.

use model::plan::cost::Kind;
use model::plan::{Op, Plan, Weight, memory};

use super::Cpu;
use super::compile::{self, Needs};
use super::copies;
use super::kernels::{Col, Scratch};
use super::ops::attention::{AttentionScratch, SplitStates};
use super::ops::choose::n_ranks;
use super::ops::experts::ExpertLists;
use super::ops::experts_streamed::lookahead_values;
use super::ops::rope::RopeTable;
use super::program::StepTokens;
use super::states::States;
use backend::experts::Streams;
use backend::footprint::{Footprint, Part};
use backend::residency::{Residencies, Residency};
use backend::{Batch, Fault, Limits};

/// The footprint of what [`super::compile::compile`] would make; see [`backend::Backend::footprint`].
pub fn footprint(cpu: &Cpu, plan: &Plan, limits: Limits) -> Footprint {
    let mut sum = Footprint::new("host memory");
    weights(&mut sum, plan, &Residencies::new(plan, cpu.residency));
    let layout = cpu.layout(plan);
    sum.add(Part::Weights(Kind::Experts, Residency::Streamed), Streams::bytes(&layout));

    for decl in &plan.caches {
        let part = if decl.window.is_some() { Part::Windows } else { Part::Cache };
        sum.add(part, compile::cache_bytes(decl, limits, cpu.cache).unwrap_or(usize::MAX));
    }
    let needs = Needs::of(plan, limits, cpu.cache);
    sum.add(Part::States, States::bytes(&plan.states, &needs.kept, limits.n_states).unwrap_or(usize::MAX));
    sum.add(Part::Activations, memory::place(plan, limits.max_tokens, limits.max_outputs).bytes);
    sum.add(Part::Activations, needs.spare.saturating_mul(4));
    sum.add(Part::Inputs, needs.acts_bytes());
    if !layout.layers.is_empty() {
        sum.add(Part::Inputs, needs.hidden_acts_bytes());
        sum.add(Part::Scratch, lookahead_values(&layout).saturating_mul(4));
    }

    plan.ropes.iter().for_each(|decl| sum.add(Part::Scratch, RopeTable::bytes(decl, limits.max_tokens)));
    sum.add(Part::Scratch, StepTokens::bytes(limits.max_tokens));
    sum.add(Part::Scratch, needs.head_cols.saturating_mul(size_of::<Col>()));
    sum.add(Part::Scratch, limits.max_tokens.max(limits.max_outputs).saturating_mul(size_of::<Col>()));
    sum.add(Part::Scratch, ExpertLists::bytes(needs.n_expert, needs.pairs));
    sum.add(Part::Scratch, limits.max_tokens.saturating_mul(size_of::<Fault>()));
    sum.add(Part::Scratch, Batch::bytes_of_room(limits));
    if plan.draft.is_some() {
        // Hidden states in the program's batch, and those that the engine keeps and sends.
        let rows = limits.max_tokens.saturating_mul(3).saturating_add(limits.max_outputs);
        sum.add(Part::Scratch, rows.saturating_mul(4 * plan.d_model));
        sum.add(Part::Scratch, Batch::bytes_of_room(limits));
    }

    let threads = cpu.threads.max(1);
    let attention = AttentionScratch::bytes(needs.unit_rows(), needs.d_k, needs.d_v);
    let numbers = needs.head_rows().saturating_add(needs.tried(limits));
    let worker = Scratch::BYTES.saturating_add(attention).saturating_add(numbers.saturating_mul(4));
    sum.add(Part::Workers, worker.saturating_mul(threads));
    sum.add(Part::Workers, SplitStates::bytes(threads, needs.unit_rows(), needs.d_v));
    sum.add(Part::Workers, n_ranks(plan, limits, threads).saturating_mul(size_of::<u64>()));
    sum
}

/// Matrices once, wherever they are used; vectors as often as ops decode them.
fn weights(sum: &mut Footprint, plan: &Plan, residencies: &Residencies) {
    let kinds = plan.kinds();
    for i in 0..plan.weights.len() {
        let w = Weight(i as u32);
        if residencies.is_matrix(w) {
            let bytes = match residencies.of(w) {
                Residency::Mapped => plan.weight(w).bytes(),
                Residency::Copied => copies::bytes_of(plan.weight(w)),
                // Counted as slabs.
                Residency::Streamed => 0,
            };
            sum.add(Part::Weights(kinds[i], residencies.of(w)), bytes);
        }
    }
    for op in plan.all_ops() {
        // Their numbers become part of the op.
        if let Op::ScaleBy { .. } | Op::Clamp { .. } = op {
            continue;
        }
        for w in op.weights().into_iter().filter(|&w| !residencies.is_matrix(w)) {
            let bytes = plan.weight(w).n_values().saturating_mul(4);
            sum.add(Part::Weights(kinds[w.0 as usize], residencies.of(w)), bytes);
        }
    }
}
