//! What the forms of products cost, counted by the simulator: the first and the last table of
//! `kernels/metal/README.md`.

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use backend::metal::gpu::Gpu;
use backend::metal::{ProductList, large_product_lists, product_lists};
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
            let counts = row(&count(&mut sim, &form)?, multiply_adds(&form));
            let _ = writeln!(out, "| {dtype} | {} | {} {counts}", form.what, form.n_x);
        }
    }
    Ok(out)
}

/// What a form does.
fn count(sim: &mut Sim, form: &ProductList) -> Result<Count> {
    let ticket = sim.submit(&form.list)?;
    sim.wait(ticket, LIMIT)?;
    Ok(sim.count(form.pipe))
}

/// Multiply-adds of weights and x, of which simdgroup matrices do 512 at a time.
fn multiply_adds(form: &ProductList) -> u64 {
    (N * K * form.n_x) as u64
}

/// Instructions a multiply-add of what kernels here and other engines' do alike, side by side: products in the forms
/// that large matrices take, and works that a table of ours in `page` has. Other engines' rows are those of `page`.
///
/// # Errors
/// As of [`table`]; a page without the tables.
pub fn beside(page: &str) -> Result<String> {
    let others: Vec<[&str; 3]> = page.lines().filter_map(row_of_other).collect();
    let mut works: Vec<&str> = Vec::new();
    others.iter().for_each(|[work, ..]| {
        if !works.contains(work) {
            works.push(work);
        }
    });
    let ours = marked(page).nth(1).context("the page has no second table")?;
    let mut ours: Vec<(String, String)> = ours.lines().filter_map(instructions_of_work).collect();
    for dtype in WeightType::ALL {
        let is_asked = |n_x: usize| works.contains(&product_name(n_x, dtype).as_str());
        if !is_asked(1) && !is_asked(32) {
            continue;
        }
        let mut sim = Sim::new(Options { is_counting: true, ..Options::default() })?;
        for form in large_product_lists(&mut sim, dtype, [N, K])? {
            let each = count(&mut sim, &form)?.instructions as f64 / multiply_adds(&form) as f64;
            ours.push((product_name(form.n_x, dtype), format!("{each:.2}")));
        }
    }
    let mut out = String::from("| work | here | ggml | MLX |\n|---|---|---|---|\n");
    for work in works {
        let Some((_, here)) = ours.iter().find(|(name, _)| name == work) else { continue };
        let of = |engine| others.iter().find(|row| row[0] == work && row[1] == engine).map_or("-", |row| row[2]);
        let _ = writeln!(out, "| {work} | {here} | {} | {} |", of("ggml"), of("MLX"));
    }
    Ok(out)
}

/// A product as other engines' rows name it.
fn product_name(n_x: usize, dtype: WeightType) -> String {
    let rows = if n_x == 1 { "one row".to_string() } else { format!("{n_x} rows") };
    let dtype = match dtype {
        WeightType::Affine(affine) if affine.group() == 64 && affine.scales() == ScaleType::F16 => {
            format!("MLX {} bits", affine.bits())
        }
        _ => dtype.to_string().to_uppercase(),
    };
    format!("{rows} of x, {dtype}")
}

fn cells(line: &str) -> Vec<&str> {
    line.split('|').map(str::trim).collect()
}

/// Work, engine and instructions of a row of another engine.
fn row_of_other(line: &str) -> Option<[&str; 3]> {
    let cells = cells(line);
    let is_other = cells.len() == 12 && ["ggml", "MLX"].contains(&cells[2]);
    is_other.then(|| [cells[1], cells[2], cells[6]])
}

/// Work and instructions of a row of [`works::table`](crate::works::table).
fn instructions_of_work(line: &str) -> Option<(String, String)> {
    let cells = cells(line);
    (cells.len() == 11 && cells[5].parse::<f64>().is_ok()).then(|| (cells[1].into(), cells[5].into()))
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
