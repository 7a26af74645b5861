//! Sums of squares of what matrices are multiplied with, while tracing is on. Reads the inputs of an op when it is
//! done, before their memory is used anew, and does not know what the op computes.

use model::plan::{Buf, Op, Plan, Weight};

use super::mem::View;
use super::program::StepTokens;
use crate::InputSums;

/// The sums so far.
pub struct Inputs {
    /// The products of each op, `[n_ops]`.
    products: Vec<Vec<Product>>,
    /// Sums of each product; empty until tracing is on.
    sums: Vec<InputSums>,
    /// Number of matrices, and of columns of one.
    shapes: Vec<(usize, usize)>,
    is_on: bool,
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

impl Inputs {
    /// For the products of a plan, whose buffers `view` finds.
    pub fn new(plan: &Plan, view: impl Fn(Buf) -> View) -> Inputs {
        let mut inputs = Inputs { products: Vec::new(), sums: Vec::new(), shapes: Vec::new(), is_on: false };
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

    /// Starts from zero, or stops and keeps the sums.
    pub fn turn(&mut self, is_on: bool) {
        self.is_on = is_on;
        for (sums, &(n_mat, n_cols)) in self.sums.iter_mut().zip(&self.shapes).filter(|_| is_on) {
            sums.squares = vec![0.0; n_mat * n_cols];
            sums.counts = vec![0; n_mat];
        }
    }

    /// Adds the inputs of op `i`, which has just run.
    pub fn record(&mut self, i: usize, step: &StepTokens) {
        if !self.is_on {
            return;
        }
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
                        let r = pair * n_rows / ids.len();
                        sums.add(id as usize, &x[r * product.x.width..][..product.x.width]);
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
