//! What the forms of products cost, counted by the simulator: the table of `kernels/metal/README.md`.

use std::fmt::Write;
use std::time::Duration;

use anyhow::Result;
use backend::metal::gpu::Gpu;
use backend::metal::product_lists;
use quant::{Affine, ScaleType, WeightType};

use crate::{Count, Options, Sim};

/// Limit of a product.
const LIMIT: Duration = Duration::from_secs(60);
/// Types that stand for the others: floats, blocks of 32, a block of 256, MLX's of 4 bits.
fn types() -> impl Iterator<Item = WeightType> {
    let affine = Affine::new(4, 64, ScaleType::F16).map(WeightType::Affine);
    use WeightType::{BF16, MXFP4, Q4_0, Q4_K, Q6_K, Q8_0};
    [BF16, Q8_0, Q4_0, MXFP4, Q4_K, Q6_K].into_iter().chain(affine)
}
/// Rows of weights, which all forms divide, and their length.
const N: usize = 64;
const K: usize = 512;

/// The table, with a row for each form and type.
///
/// # Errors
/// Where there is no clang, or where a kernel fails.
pub fn table() -> Result<String> {
    table_of(types())
}

/// The same of these types.
///
/// # Errors
/// As of [`table`].
pub fn table_of(types: impl IntoIterator<Item = WeightType>) -> Result<String> {
    let mut out = head(&["type", "form", "rows of x"]);
    for dtype in types {
        let mut sim = Sim::new(Options { is_counting: true, ..Options::default() })?;
        for form in product_lists(&mut sim, dtype, [N, K])? {
            let ticket = sim.submit(&form.list)?;
            sim.wait(ticket, LIMIT)?;
            let count = sim.count(form.pipe);
            // Of a multiply-add of weights and x, of which simdgroup matrices do 512 at a time.
            let counts = row(&count, (N * K * form.n_x) as u64);
            let _ = writeln!(out, "| {dtype} | {} | {} {counts}", form.what, form.n_x);
        }
    }
    Ok(out)
}

/// The head of a table whose rows begin with such columns and end with [`row`].
pub(crate) fn head(first: &[&str]) -> String {
    const COUNTS: [&str; 8] = [
        "loads",
        "bytes",
        "multiplications",
        "instructions",
        "simd functions",
        "matrices",
        "threadgroup memory",
        "barriers",
    ];
    let names = [first, &COUNTS].concat();
    format!("| {} |\n|{}\n", names.join(" | "), "---|".repeat(names.len()))
}

/// What was counted, as the last columns of a row: the first four of each of `all` multiply-adds.
pub(crate) fn row(count: &Count, all: u64) -> String {
    let each = |n: u64| n as f64 / all as f64;
    format!(
        "| {:.3} | {:.3} | {:.2} | {:.2} | {} | {} | {} | {} |",
        each(count.loads),
        each(count.load_bytes),
        each(count.muls),
        each(count.instructions),
        count.collectives,
        count.matrices,
        count.shared_size,
        count.barriers,
    )
}

/// What stands between the marks of a page that holds such tables, one after the other.
pub fn marked(page: &str) -> impl Iterator<Item = &str> {
    page.split("<!-- counted -->\n").skip(1).filter_map(|rest| Some(rest.split_once("<!-- end -->")?.0))
}
