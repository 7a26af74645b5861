//! Sums of squares of what matrices are multiplied with, while tracing is on. Reads the inputs of an op when it is
//! done, before their memory is used anew, and does not know what the op computes.
//!
//! Experts that no token has reached get theirs by force: the op runs once with ids of such experts in place of the
//! router's, and once more with the router's own, so that all that comes behind it is as if it had run once.

use model::plan::{Buf, Op, Plan, Weight};

use super::mem::View;
use super::program::StepTokens;
use crate::{InputSums, InputTrace};

/// The sums so far.
pub struct Inputs {
    /// The products of each op, `[n_ops]`.
    products: Vec<Vec<Product>>,
    /// Sums of each product; empty until tracing is on.
    sums: Vec<InputSums>,
    /// Number of matrices, and of columns of one.
    shapes: Vec<(usize, usize)>,
    trace: InputTrace,
    /// What each op is forced to, `[n_ops]` while that is traced.
    forced: Vec<Forced>,
}

/// The experts of an op that no token has reached.
#[derive(Default)]
struct Forced {
    unreached: Vec<u32>,
    /// The one whose turn it is.
    next: usize,
    /// What the router chose.
    chosen: Vec<u32>,
}

/// A matrix or stack, and the rows that it is multiplied with.
struct Product {
    /// Index of its sums.
    sums: usize,
    x: View,
    rows: ProductRows,
}

enum ProductRows {
    /// Each row holds one part for every matrix, side by side; a plain matrix is a stack of one.
    Each,
    /// The expert's number of each (token, slot) says which matrix; rows are those of tokens.
    OfTokens(View),
    /// The same; each (token, slot) has its own row.
    OfPairs(View),
}

impl Product {
    /// The buffer that says which experts the rows belong to.
    fn ids(&self) -> Option<View> {
        match self.rows {
            ProductRows::Each => None,
            ProductRows::OfTokens(ids) | ProductRows::OfPairs(ids) => Some(ids),
        }
    }
}

impl Inputs {
    /// For the products of a plan, whose buffers `view` finds.
    pub fn new(plan: &Plan, view: impl Fn(Buf) -> View) -> Inputs {
        let mut inputs = Inputs {
            products: Vec::new(),
            sums: Vec::new(),
            shapes: Vec::new(),
            trace: InputTrace::Off,
            forced: Vec::new(),
        };
        for op in &plan.ops {
            let mut products = Vec::new();
            let mut add = |w: Weight, x: Buf, rows: ProductRows| {
                products.push(Product { sums: inputs.sums.len(), x: view(x), rows });
                inputs.sums.push(InputSums::new(w));
                let shape = &plan.weight(w).shape;
                inputs.shapes.push((if shape.len() == 3 { shape[0] } else { 1 }, shape[shape.len() - 1]));
            };
            match *op {
                Op::Linear { x, ref parts } => parts.iter().for_each(|part| add(part.w, x, ProductRows::Each)),
                Op::GatedLinear { x, gate, up, .. } => {
                    [gate, up].into_iter().for_each(|w| add(w, x, ProductRows::Each))
                }
                // The columns of a transposed matrix are not those of its file.
                Op::HeadLinear { x, w, transposed: false, .. } => add(w, x, ProductRows::Each),
                Op::Experts { x, ids, gate, up, down, hidden, .. } => {
                    add(gate, x, ProductRows::OfTokens(view(ids)));
                    add(up, x, ProductRows::OfTokens(view(ids)));
                    add(down, hidden, ProductRows::OfPairs(view(ids)));
                }
                _ => {}
            }
            inputs.products.push(products);
        }
        inputs
    }

    /// See [`InputTrace`].
    pub fn turn(&mut self, trace: InputTrace) {
        self.trace = trace;
        self.forced.clear();
        match trace {
            InputTrace::Off => {}
            InputTrace::All => {
                for (sums, &(n_mat, n_cols)) in self.sums.iter_mut().zip(&self.shapes) {
                    sums.squares = vec![0.0; n_mat * n_cols];
                    sums.counts = vec![0; n_mat];
                }
                for product in self.products.iter().flatten().filter(|product| product.ids().is_some()) {
                    self.sums[product.sums].forced = vec![0; self.shapes[product.sums].0];
                }
            }
            InputTrace::Unreached => {
                let forced = |products: &Vec<Product>| {
                    // Gate, up and down of an expert see the same tokens.
                    let counts = products.iter().find(|p| p.ids().is_some()).map(|p| &self.sums[p.sums].counts);
                    let none = |(e, &n): (usize, &u64)| (n == 0).then_some(e as u32);
                    let unreached = counts.map_or(Vec::new(), |all| all.iter().enumerate().filter_map(none).collect());
                    Forced { unreached, ..Forced::default() }
                };
                self.forced = self.products.iter().map(forced).collect();
            }
        }
    }

    /// Puts experts that no token has reached in the place of those that op `i`, which is to run, was given; false
    /// where there are none.
    pub fn force(&mut self, i: usize, step: &StepTokens) -> bool {
        let Some(forced) = self.forced.get_mut(i).filter(|forced| !forced.unreached.is_empty()) else { return false };
        let Some(ids) = self.products[i].iter().find_map(Product::ids) else { return false };
        let n_tokens = step.rows(ids.rows);
        forced.chosen.clear();
        // SAFETY: no op runs, and the ids stay until the next router writes them.
        forced.chosen.extend_from_slice(unsafe { ids.ids(n_tokens) });
        let n = forced.unreached.len();
        for t in 0..n_tokens {
            // SAFETY: as above.
            for id in unsafe { ids.ids_mut(t) }.iter_mut().take(n) {
                *id = forced.unreached[forced.next];
                forced.next = (forced.next + 1) % n;
            }
        }
        true
    }

    /// Adds the inputs of op `i`, which has just run with what [`Inputs::force`] gave it, and gives back what the
    /// router chose.
    pub fn record_forced(&mut self, i: usize, step: &StepTokens) {
        self.add(i, step, true);
        let Some(ids) = self.products[i].iter().find_map(Product::ids) else { return };
        for (t, chosen) in self.forced[i].chosen.chunks_exact(ids.width).enumerate() {
            // SAFETY: the op is done, and no other runs meanwhile.
            unsafe { ids.ids_mut(t) }.copy_from_slice(chosen);
        }
    }

    /// Adds the inputs of op `i`, which has just run.
    pub fn record(&mut self, i: usize, step: &StepTokens) {
        if self.trace == InputTrace::All {
            self.add(i, step, false);
        }
    }

    fn add(&mut self, i: usize, step: &StepTokens, is_forced: bool) {
        for product in &self.products[i] {
            let sums = &mut self.sums[product.sums];
            match product.rows {
                ProductRows::Each => {
                    // SAFETY: the op is done, and no other runs meanwhile.
                    let x = unsafe { product.x.read(step.rows(product.x.rows)) };
                    let (n_mat, width) = (sums.counts.len(), sums.n_cols());
                    x.chunks_exact(width).enumerate().for_each(|(r, row)| sums.add(r % n_mat, row));
                }
                ProductRows::OfTokens(ids) | ProductRows::OfPairs(ids) => {
                    let n_tokens = step.rows(ids.rows);
                    let n_rows = match product.rows {
                        ProductRows::OfPairs(_) => n_tokens * ids.width,
                        _ => n_tokens,
                    };
                    // SAFETY: as above.
                    let (ids, x) = unsafe { (ids.ids(n_tokens), product.x.read(n_rows)) };
                    for (pair, &id) in ids.iter().enumerate() {
                        let (e, r) = (id as usize, pair * n_rows / ids.len());
                        // A token with more places than there are unreached experts has chosen ones in the others.
                        if is_forced && sums.counts[e] > sums.forced[e] {
                            continue;
                        }
                        sums.add(e, &x[r * product.x.width..][..product.x.width]);
                        sums.forced[e] += u64::from(is_forced);
                    }
                }
            }
        }
    }

    /// The sums.
    pub fn sums(&self) -> &[InputSums] {
        &self.sums
    }
}
