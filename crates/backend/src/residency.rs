//! Where a program keeps each weight of its plan: decided from the plan, before a backend binds anything to memory.
//!
//! One table for all backends. It knows what ops do with a weight, and nothing of files or devices.

use checkpoint::Checkpoint;
use model::plan::{Op, Plan, Weight};

/// Where a weight is while a program runs. A new place (a device, a cache of what is read on demand) is added
/// here, and the exhaustive matches ask every backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Residency {
    /// Read where its file is mapped; resident as far as it was read, and the system may evict it.
    Mapped,
    /// In memory of the program: a matrix as the file has it, a vector decoded to f32.
    Copied,
    /// Experts that are read into slabs of the program's memory when they are wanted ([`crate::experts`]).
    Streamed,
}

/// Which weights a program copies to memory that it owns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Vectors only.
    #[default]
    Mapped,
    /// Matrices that every token multiplies with too: no experts, and no embeddings, of which a token reads a row.
    CopyDense,
    /// Experts too.
    CopyAll,
    /// All but routed experts, which are read into slabs when they are wanted.
    Stream {
        /// Bytes of the slabs.
        slabs: usize,
    },
}

/// How an op reads a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    /// A row for each token.
    Row,
    /// All of it, whatever the token.
    Whole,
    /// The matrices of the experts that are chosen.
    Chosen,
}

/// The residency of every weight of a plan, `[weights]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Residencies {
    of: Vec<Residency>,
    is_matrix: Vec<bool>,
}

impl Residencies {
    /// What a policy means for a plan.
    pub fn new(plan: &Plan, policy: Policy) -> Self {
        let mut table =
            Self { of: vec![Residency::Copied; plan.weights.len()], is_matrix: vec![false; plan.weights.len()] };
        let uses = || plan.all_ops().flat_map(matrices);
        for (w, _) in uses() {
            table.of[w.0 as usize] = Residency::Mapped;
            table.is_matrix[w.0 as usize] = true;
        }
        for (w, access) in uses() {
            let is_copied = match (policy, access) {
                _ if plan.weight(w).is_repacked => true,
                (Policy::Mapped, _) | (_, Access::Row) | (Policy::CopyDense, Access::Chosen) => false,
                (Policy::CopyDense | Policy::CopyAll, Access::Whole) | (Policy::CopyAll, Access::Chosen) => true,
                (Policy::Stream { .. }, _) => true,
            };
            if is_copied {
                table.of[w.0 as usize] = Residency::Copied;
            }
        }
        if let Policy::Stream { .. } = policy {
            table.stream(plan);
        }
        table
    }

    /// Streams the experts of each op of the model whose three stacks no op reads as a whole.
    fn stream(&mut self, plan: &Plan) {
        let uses = || plan.all_ops().flat_map(matrices);
        let is_shared = |w: Weight| uses().any(|(used, access)| used == w && access != Access::Chosen);
        for op in &plan.ops {
            if let Op::Experts { gate, up, down, .. } = *op
                && ![gate, up, down].into_iter().any(is_shared)
            {
                [gate, up, down].into_iter().for_each(|w| self.of[w.0 as usize] = Residency::Streamed);
            }
        }
    }

    /// Where a weight is.
    pub fn of(&self, w: Weight) -> Residency {
        self.of[w.0 as usize]
    }

    /// Whether a weight is read as a matrix, or a stack of them; otherwise it is a vector.
    pub fn is_matrix(&self, w: Weight) -> bool {
        self.is_matrix[w.0 as usize]
    }

    /// The matrices that are copied, in the order of the plan.
    pub fn copied_matrices(&self) -> impl Iterator<Item = Weight> + '_ {
        let is_copied = |&i: &usize| self.is_matrix[i] && self.of[i] == Residency::Copied;
        (0..self.of.len()).filter(is_copied).map(|i| Weight(i as u32))
    }
}

/// Whether an op multiplies with matrices.
pub fn has_products(op: &Op) -> bool {
    !op.products().is_empty()
}

/// The matrices of an op.
fn matrices(op: &Op) -> Vec<(Weight, Access)> {
    let mut all = Vec::new();
    if let Op::Embed { table, .. } | Op::EmbedPlace { table, .. } = op {
        all.push((*table, Access::Row));
    }
    for product in op.products() {
        let access = if product.ids.is_some() { Access::Chosen } else { Access::Whole };
        all.extend(product.weights.into_iter().map(|w| (w, access)));
    }
    all
}

impl Policy {
    /// What pays on this machine: copies of what every token reads where the files are mapped in small pages while
    /// memory of the process can be had in pages of 2 MB, and `free` bytes hold the copies twice over, since the page
    /// cache keeps the originals until something else wants their place.
    ///
    /// Reads a byte of some large tensors of a mapped checkpoint, to learn how it is mapped.
    pub fn choose(plan: &Plan, checkpoint: &Checkpoint, free: usize) -> Policy {
        let table = Residencies::new(plan, Policy::CopyDense);
        let bytes = table.copied_matrices().fold(0, |sum: usize, w| sum.saturating_add(plan.weight(w).bytes()));
        let fits = bytes.saturating_mul(2) <= free;
        match fits && checkpoint.is_mapped_in_small_pages() {
            true => Policy::CopyDense,
            false => Policy::Mapped,
        }
    }
}

#[cfg(test)]
mod tests {
    use model::plan::cost::Kind;

    use super::*;

    /// The embedded model has experts, a tied or untied table, and norms.
    #[test]
    fn a_policy_says_where_each_kind_is() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fable-29m-a10m-q4_k_m.gguf");
        let plan =
            model::build(&checkpoint::open(path.as_ref()).expect("the embedded model opens")).expect("and is built");
        let kinds = plan.kinds();
        let is_tied = !kinds.contains(&Kind::Output);
        for policy in [Policy::Mapped, Policy::CopyDense, Policy::CopyAll] {
            let table = Residencies::new(&plan, policy);
            for (i, kind) in kinds.iter().enumerate() {
                let w = Weight(i as u32);
                let is_copied = match kind {
                    _ if !table.is_matrix(w) => true,
                    Kind::Embed => is_tied && policy != Policy::Mapped,
                    Kind::Experts => policy == Policy::CopyAll,
                    _ => policy != Policy::Mapped,
                };
                let wanted = if is_copied { Residency::Copied } else { Residency::Mapped };
                assert_eq!(table.of(w), wanted, "{policy:?} {}", plan.weight(w).name);
            }
            let copied = table.copied_matrices().count();
            assert_eq!(copied > 0, policy != Policy::Mapped);
        }
    }
}
