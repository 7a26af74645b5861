//! Sums of squares of what matrices are multiplied with, while tracing is on. Reads the inputs of an op when it is
//! done, before their memory is used anew, and does not know what the op computes, nor where.
//!
//! Experts that no token has reached get theirs by force: the op runs once with ids of such experts in place of the
//! router's, and once more with the router's own, so that all that comes behind it is as if it had run once.

use std::borrow::Cow;

use model::plan::{self, Buf, Plan, Rows};

use crate::{InputSums, InputTrace, SumInputs};

/// The memory in which ops find their inputs. No op runs while it is asked.
pub trait Memory {
    /// Why memory could not be read or written.
    type Error;

    /// The first `n` numbers of a buffer.
    fn numbers(&mut self, buf: Buf, n: usize) -> Result<Cow<'_, [f32]>, Self::Error>;

    /// The first `n` ids of a buffer of experts' ids.
    fn ids(&mut self, buf: Buf, n: usize) -> Result<Vec<u32>, Self::Error>;

    /// Replaces the first ids of such a buffer.
    fn put_ids(&mut self, buf: Buf, ids: &[u32]) -> Result<(), Self::Error>;
}

/// Rows of a step: of its tokens and of those that it returns.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    /// Tokens of the step.
    pub tokens: usize,
    /// Rows that the step returns.
    pub outputs: usize,
}

/// The sums so far.
#[derive(Default)]
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
}

/// Matrices or stacks that are multiplied with the same rows.
struct Product {
    /// Index of their sums.
    sums: usize,
    x: Place,
    /// The expert of each (token, slot), whose input is a row of its own or its token's. Without them each row holds one
    /// part for every matrix, side by side; a plain matrix is a stack of one.
    ids: Option<Place>,
}

/// A buffer.
#[derive(Clone, Copy)]
struct Place {
    buf: Buf,
    rows: Rows,
    width: usize,
}

impl Place {
    fn rows(&self, counts: Counts) -> usize {
        self.rows.count(counts.tokens, counts.outputs)
    }
}

impl Inputs {
    /// For the products of a plan.
    pub fn new(plan: &Plan) -> Inputs {
        let mut inputs = Inputs::default();
        let place = |buf: Buf| Place { buf, rows: plan.buf(buf).rows, width: plan.buf(buf).width };
        for op in &plan.ops {
            let mut products = Vec::new();
            // The columns of a transposed matrix are not those of its file.
            for plan::Product { weights, x, ids, .. } in op.products().into_iter().filter(|p| !p.transposed) {
                products.push(Product { sums: inputs.sums.len(), x: place(x), ids: ids.map(place) });
                let shape = &plan.weight(weights[0]).shape;
                inputs.shapes.push((if shape.len() == 3 { shape[0] } else { 1 }, shape[shape.len() - 1]));
                inputs.sums.push(InputSums::new(weights));
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
                for product in self.products.iter().flatten().filter(|product| product.ids.is_some()) {
                    self.sums[product.sums].forced = vec![0; self.shapes[product.sums].0];
                }
            }
            InputTrace::Unreached => {
                let forced = |products: &Vec<Product>| {
                    // Gate, up and down of an expert see the same tokens.
                    let counts = products.iter().find(|p| p.ids.is_some()).map(|p| &self.sums[p.sums].counts);
                    let none = |(e, &n): (usize, &u64)| (n == 0).then_some(e as u32);
                    let unreached = counts.map_or(Vec::new(), |all| all.iter().enumerate().filter_map(none).collect());
                    Forced { unreached, next: 0 }
                };
                self.forced = self.products.iter().map(forced).collect();
            }
        }
    }

    /// Whether steps are traced.
    pub fn is_on(&self) -> bool {
        self.trace != InputTrace::Off
    }

    /// The most numbers of a buffer that steps of up to `limits` are asked for.
    pub fn most_numbers(&self, limits: Counts) -> usize {
        let places = self.products.iter().flatten().flat_map(|product| [Some(product.x), product.ids]);
        places.flatten().map(|place| place.rows(limits).saturating_mul(place.width)).max().unwrap_or(0)
    }

    /// Runs op `i` by `run` and adds its inputs. Where experts are to be forced it runs twice.
    pub fn run<M: Memory>(
        &mut self,
        i: usize,
        counts: Counts,
        memory: &mut M,
        mut run: impl FnMut(&mut M) -> Result<(), M::Error>,
    ) -> Result<(), M::Error> {
        if let Some((ids, chosen)) = self.force(i, counts, memory)? {
            let done = run(memory).and_then(|()| self.add(i, counts, memory, true));
            memory.put_ids(ids, &chosen)?;
            done?;
        }
        run(memory)?;
        if self.trace == InputTrace::All { self.add(i, counts, memory, false) } else { Ok(()) }
    }

    /// Puts experts that no token has reached in the place of those that op `i`, which is to run, was given. Returns
    /// where those stood, and them; `None` where all were reached.
    fn force<M: Memory>(
        &mut self,
        i: usize,
        counts: Counts,
        memory: &mut M,
    ) -> Result<Option<(Buf, Vec<u32>)>, M::Error> {
        let Some(forced) = self.forced.get_mut(i).filter(|forced| !forced.unreached.is_empty()) else {
            return Ok(None);
        };
        let Some(ids) = self.products[i].iter().find_map(|product| product.ids) else { return Ok(None) };
        let chosen = memory.ids(ids.buf, ids.rows(counts) * ids.width)?;
        let mut given = chosen.clone();
        let n = forced.unreached.len();
        for id in given.chunks_exact_mut(ids.width).flat_map(|slots| slots.iter_mut().take(n)) {
            *id = forced.unreached[forced.next];
            forced.next = (forced.next + 1) % n;
        }
        memory.put_ids(ids.buf, &given)?;
        Ok(Some((ids.buf, chosen)))
    }

    fn add<M: Memory>(&mut self, i: usize, counts: Counts, memory: &mut M, is_forced: bool) -> Result<(), M::Error> {
        for Product { sums, x, ids } in &self.products[i] {
            let (sums, n_rows) = (&mut self.sums[*sums], x.rows(counts));
            let Some(ids) = ids else {
                let (n_mat, width) = (sums.counts.len(), sums.n_cols());
                let x = memory.numbers(x.buf, n_rows * x.width)?;
                x.chunks_exact(width).enumerate().for_each(|(r, row)| sums.add(r % n_mat, row));
                continue;
            };
            let ids = memory.ids(ids.buf, ids.rows(counts) * ids.width)?;
            let values = memory.numbers(x.buf, n_rows * x.width)?;
            for (pair, &id) in ids.iter().enumerate() {
                let (e, r) = (id as usize, pair * n_rows / ids.len());
                // A token with more places than there are unreached experts has chosen ones in the others.
                if is_forced && sums.counts[e] > sums.forced[e] {
                    continue;
                }
                sums.add(e, &values[r * x.width..][..x.width]);
                sums.forced[e] += u64::from(is_forced);
            }
        }
        Ok(())
    }

    /// The sums.
    pub fn sums(&self) -> &[InputSums] {
        &self.sums
    }
}

impl SumInputs for Inputs {
    fn trace(&mut self, trace: InputTrace) {
        self.turn(trace);
    }

    fn sums(&self) -> &[InputSums] {
        Inputs::sums(self)
    }
}
