//! Products of a GPU that nobody has tried: every form of `linear.metal` on small random matrices, against the numbers
//! that the weights stand for. Knows no plan.

use std::time::Duration;

use quant::{PlanesBuf, WeightType};

use super::sources::{self, LINEAR};
use super::variants;
use crate::commands::node::THREADS;
use crate::commands::{Cmd, Gpu, GpuError, List, Span, Use};

/// Rows of weights and of x: what no tile divides.
const N: usize = 70;
const ROWS: usize = 35;

/// Limit of one product.
const LIMIT: Duration = Duration::from_secs(10);
/// The most that an output may be off, as the norm of all: sums of f32 in any order are off by less than 1e-6.
const TOLERANCE: f64 = 1e-4;

/// A form under test.
struct Form {
    what: String,
    rows: usize,
    columns: usize,
    is_wide: bool,
    is_tiled: bool,
}

/// A product with one type.
struct Product {
    dtype: WeightType,
    n: usize,
    k: usize,
    n_x: usize,
    planes: [Option<Span>; 3],
    x: Span,
    out: Span,
    exact: Vec<f32>, // [n_x, n]
}

/// Runs every form with every type, twice, and returns a sentence for each that is wrong.
///
/// # Errors
/// What the GPU cannot do at all; the plain form being wrong.
pub fn products(gpu: &mut dyn Gpu, types: &[WeightType]) -> Result<Vec<String>, GpuError> {
    // All memory first: a GPU in use allocates nothing.
    let tests = types
        .iter()
        .map(|&t| Product::new(gpu, t, [N, 3 * t.block_len().max(32), ROWS]))
        .collect::<Result<Vec<_>, _>>()?;
    let mut wrong = Vec::new();
    for product in &tests {
        for form in forms() {
            let found = [product.run(gpu, &form)?, product.run(gpu, &form)?];
            let error = off(&found[0], &product.exact);
            let is_steady = found[0].iter().zip(&found[1]).all(|(a, b)| a.to_bits() == b.to_bits());
            // NaN is wrong too.
            if error <= TOLERANCE && is_steady {
                continue;
            }
            let how = if is_steady { format!("off by {error:.1e}") } else { "other numbers each time".into() };
            let why = format!("products with {} {}: {how}", product.dtype, form.what);
            if !form.is_wide && !form.is_tiled {
                return Err(GpuError::Lost(why));
            }
            wrong.push(why);
        }
    }
    Ok(wrong)
}

fn forms() -> impl Iterator<Item = Form> {
    let few = variants::forms().map(|form| Form {
        what: format!("by {} to a simdgroup{}", form.rows, if form.is_wide { "" } else { ", plain" }),
        rows: form.rows,
        columns: 1,
        is_wide: form.is_wide,
        is_tiled: false,
    });
    let own = |what: &str, rows, columns, is_wide| {
        let is_tiled = columns == 0;
        Form { what: what.into(), rows, columns, is_wide, is_tiled }
    };
    let some =
        [1, 2].map(|rows| own(&format!("by {rows} to a simdgroup, rows of x together"), rows, variants::COLUMNS, true));
    few.chain(some).chain([own("in tiles", 1, 0, false)])
}

/// The norm of the difference over the norm of the exact numbers.
fn off(found: &[f32], exact: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = found.iter().zip(exact).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    (error / exact.iter().map(|&x| square(f64::from(x))).sum::<f64>()).sqrt()
}

/// A fixed stream of numbers in -1..1.
fn random(seed: &mut u64) -> f32 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 40) as f32 / (1u32 << 23) as f32 - 1.0
}

impl Product {
    fn new(gpu: &mut dyn Gpu, dtype: WeightType, [n, k, n_x]: [usize; 3]) -> Result<Product, GpuError> {
        let mut seed = 0x9e37_79b9_7f4a_7c15;
        let refused = || GpuError::Rule(format!("{k} numbers of {dtype} are no row"));
        let row_bytes = dtype.plane_bytes(k).ok_or_else(refused)?;
        let mut planes = PlanesBuf::new(row_bytes.times(n).ok_or_else(refused)?);
        let mut weights = vec![0.0; n * k];
        for (i, row) in weights.chunks_exact_mut(k).enumerate() {
            let values: Vec<f32> = (0..k).map(|_| random(&mut seed)).collect();
            quant::encode_row(dtype, &values, planes.get_mut().row_mut(row_bytes, i));
            quant::decode_row(dtype, planes.get().row(row_bytes, i), row);
        }
        let x: Vec<f32> = (0..n_x * k).map(|_| random(&mut seed)).collect();
        let dot = |(a, b): (&[f32], &[f32])| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
        let exact = x.chunks_exact(k).flat_map(|x| weights.chunks_exact(k).map(move |w| dot((w, x)) as f32)).collect();
        let mut place = |bytes: &[u8], len: usize| {
            let buf = gpu.alloc(len as u64, "a test of products")?;
            if !bytes.is_empty() {
                gpu.write(Span { buf, at: 0, len: len as u64 }, bytes)?;
            }
            Ok::<Span, GpuError>(Span { buf, at: 0, len: len as u64 })
        };
        let mut spans = [None; 3];
        for (span, plane) in spans.iter_mut().zip([&planes.q, &planes.scales, &planes.biases]) {
            if !plane.is_empty() {
                *span = Some(place(plane, plane.len())?);
            }
        }
        let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
        let x = place(&bytes, bytes.len())?;
        Ok(Product { dtype, n, k, n_x, planes: spans, x, out: place(&[], 4 * n_x * n)?, exact })
    }

    /// Returns the dispatch of a form.
    fn list(&self, gpu: &mut dyn Gpu, form: &Form) -> Result<List, GpuError> {
        let (n, n_x) = (self.n, self.n_x);
        let mut defines = sources::of_type(self.dtype);
        let own = [
            ("N_PARTS", 1),
            ("BIASES", 0),
            ("TILED", usize::from(form.is_tiled)),
            ("ROWS", form.rows),
            ("COLUMNS", form.columns),
            ("WIDE_X", usize::from(form.is_wide)),
        ];
        defines.extend(own.map(|(name, value)| (name, value.to_string())));
        let pipe = gpu.build(&[sources::unit(LINEAR, "linear", &defines)])?[0];
        let mut list = List::default();
        list.cmds.push(Cmd::Pipe(pipe));
        for (slot, span) in (0..).zip(self.planes) {
            list.cmds.extend(span.map(|span| Cmd::Bind { slot, span, used: Use::Read }));
        }
        list.cmds.push(Cmd::Bind { slot: 12, span: self.x, used: Use::Read });
        list.cmds.push(Cmd::Bind { slot: 14, span: self.out, used: Use::Write });
        list.params(13, &[self.k as u32, n as u32, 0, 0, 0, n_x as u32]);
        let (grid, threads) = match form.is_tiled {
            true => {
                let [rows, columns] = variants::TILE.map(|n| n as usize);
                ([n.div_ceil(rows), n_x.div_ceil(columns), 1], variants::TILE_THREADS)
            }
            false => ([n.div_ceil(2 * form.rows), n_x.div_ceil(form.columns), 1], THREADS),
        };
        list.cmds.push(Cmd::Groups { grid: grid.map(|n| n as u32), threads });
        Ok(list)
    }

    fn run(&self, gpu: &mut dyn Gpu, form: &Form) -> Result<Vec<f32>, GpuError> {
        let list = self.list(gpu, form)?;
        let ticket = gpu.submit(&list)?;
        gpu.wait(ticket, LIMIT)?;
        let mut bytes = vec![0; 4 * self.n_x * self.n];
        gpu.read(self.out, &mut bytes)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect())
    }
}
