//! Runs a case on a backend and holds what comes out against the reference, and against the backend's twin.

use std::fmt;

use backend::reference::{Reference, Rounded};
use backend::{Backend, CacheType, CompileError, Fault};

use super::case::Case;
use conformance::Session;
use conformance::backends::{Ops, Row};

/// What a step of a case gave.
pub struct Answer {
    /// Which step it was.
    step: usize,
    logits: Vec<f32>, // [R, n_vocab]
    faults: Vec<Fault>,
    /// The chosen experts, from programs that report them.
    routing: Option<Vec<u16>>,
    /// Chunk of each row.
    chunks: Vec<u32>,
}

/// What is wrong with an answer.
#[derive(Debug)]
pub struct Failure(String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Runs the first steps of a case, which have so many tokens together, and of the others those chosen for all.
pub fn answers(backend: &dyn Backend, case: &Case, n_tokens: usize) -> Result<Vec<Answer>, Failure> {
    let tokens = |step: &super::case::Step| step.parts.iter().map(|part| part.1.len()).sum::<usize>();
    let max_tokens = case.script.iter().map(tokens).max().unwrap();
    let mut at = [0; 3];
    let mut max_positions = 1;
    for step in &case.script {
        step.jump.iter().for_each(|&(s, pos)| at[s] = pos);
        step.parts.iter().for_each(|(s, tokens)| at[*s] += tokens.len());
        max_positions = max_positions.max(at.into_iter().max().unwrap());
    }
    let mut session = Session::compile(backend, &case.model, max_positions, max_tokens)
        .map_err(|e| Failure(format!("{}: {case}: {e}", backend.name())))?;
    session.program.trace_routing(true);
    let mut answers = Vec::new();
    let mut sum = 0usize;
    for (i, step) in case.script.iter().enumerate() {
        sum = sum.saturating_add(tokens(step));
        if sum > n_tokens && !step.is_chosen {
            sum = usize::MAX; // what follows would miss this step
            continue;
        }
        step.copies.iter().for_each(|&(from, to)| session.program.copy_state(from, to));
        step.jump.iter().for_each(|&(s, pos)| session.n_past[s] = pos);
        step.slots.iter().for_each(|&(s, slot)| session.slots[s] = slot);
        let parts: Vec<(usize, &[u32])> = step.parts.iter().map(|(s, tokens)| (*s, &tokens[..])).collect();
        let last = tokens(step) - 1;
        let out = session.try_rows(&parts, |i| (last - i).is_multiple_of(step.every));
        let out = out.map_err(|e| Failure(format!("{}: {case}: {e}", backend.name())))?;
        let (logits, faults) = (out.logits.to_vec(), out.faults.to_vec());
        let routing = out.routing.map(<[u16]>::to_vec);
        let batch = &session.batch;
        let chunk = |&row: &u32| batch.chunks.partition_point(|c| c.first + c.len <= row) as u32;
        answers.push(Answer { step: i, logits, faults, routing, chunks: batch.rows.iter().map(chunk).collect() });
    }
    Ok(answers)
}

/// What the reference says of a case.
pub fn exact(case: &Case) -> Vec<Answer> {
    answers(&Reference, case, usize::MAX).unwrap_or_else(|failure| panic!("{failure}"))
}

/// What the reference says of a case with caches of these types, where they fit.
pub fn rounded(case: &Case, cache: CacheType) -> Option<Vec<Answer>> {
    if case.model.0.caches.is_empty() || cache.misfit(&case.model.0).is_some() {
        return None;
    }
    Some(answers(&Rounded(cache), case, usize::MAX).unwrap_or_else(|failure| panic!("{failure}")))
}

/// What backends gave of a case, by the names of their rows.
#[derive(Default)]
pub struct Given(Vec<(String, Vec<Answer>)>);

/// The largest error, or what is wrong. NaN passes only where the reference has it too.
pub fn check(row: &Row, case: &Case, exact: &[Answer], given: &mut Given) -> Result<f64, Failure> {
    let has_cache = !case.model.0.caches.is_empty();
    if row.ops.only_cached && !has_cache {
        return Ok(0.0);
    }
    if row.not_yet.contains(&case.op) {
        return refused(row, case, case.op);
    }
    if !row.fits(&case.model.0) {
        return refused(row, case, "keep ");
    }
    let found = answers(&*row.backend, case, row.tokens)?;
    let twin = given.0.iter().find(|(name, _)| row.twin.as_ref() == Some(name));
    if let Some((name, twin)) = twin {
        same_bits(&found, twin, case).map_err(|why| fails(row, case, &format!("{why} from {name}")))?;
    } else if row.twin.is_some() {
        return Err(fails(row, case, "no row before it is its twin, or that has not run"));
    }
    given.0.push((row.name.clone(), found));
    let found = &given.0[given.0.len() - 1].1;
    let Ops { plain, weight, cached, .. } = row.ops;
    let of_weight = if case.plain { plain } else { weight(case.dtype) };
    let tolerance = case.slack * plain.max(of_weight).max(if has_cache { cached } else { 0.0 });
    let common = common(exact, case);
    let mut worst = 0.0f64;
    for found in found {
        let why = |why: String| fails(row, case, &format!("step {}: {why}", found.step));
        worst = worst.max(near(found, &exact[found.step], case, &common, tolerance).map_err(why)?);
    }
    Ok(worst / case.slack)
}

/// What a backend is not written for it refuses by its name, before it computes anything.
fn refused(row: &Row, case: &Case, name: &str) -> Result<f64, Failure> {
    match Session::compile(&*row.backend, &case.model, 1, 1).map(drop) {
        Err(CompileError::Unsupported { what, .. }) if what.contains(name) => Ok(0.0),
        other => Err(fails(row, case, &format!("{other:?}, which is not a refusal that says {name}"))),
    }
}

fn fails(row: &Row, case: &Case, why: &str) -> Failure {
    Failure(format!("{}: {case}: {why}", row.name))
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}, {}", self.op, self.dtype, self.shape)
    }
}

/// The name of a column's output and the column in it.
fn column(case: &Case, mut at: usize) -> String {
    for (name, width) in &case.outs {
        match at.checked_sub(*width) {
            None => return format!("{name} column {at}"),
            Some(rest) => at = rest,
        }
    }
    unreachable!("the outputs are the row")
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

/// Numbers below are as good as 0: what is left of an exponential.
const NOTHING: f64 = 1e-12;

/// The norm of the middle row of each output. A narrow row whose sums nearly cancel is measured against it.
fn common(exact: &[Answer], case: &Case) -> Vec<f64> {
    let mut first = 0;
    let of_output = |width: usize| {
        let rows = exact.iter().flat_map(|answer| answer.logits.chunks_exact(case.model.0.n_vocab));
        let mut norms: Vec<f64> = rows.map(|row| norm(&row[first..first + width])).filter(|n| n.is_finite()).collect();
        norms.sort_by(f64::total_cmp);
        first += width;
        norms.get(norms.len() / 2).copied().unwrap_or(0.0)
    };
    case.outs.iter().map(|out| out.1).map(of_output).collect()
}

/// Largest relative L2 distance of a row of an output.
fn near(found: &Answer, exact: &Answer, case: &Case, common: &[f64], tolerance: f64) -> Result<f64, String> {
    let n_vocab = case.model.0.n_vocab;
    if found.logits.len() != exact.logits.len() {
        return Err(format!("{} logits, {} wanted", found.logits.len(), exact.logits.len()));
    }
    if found.faults != exact.faults {
        return Err(format!("faults {:?}, {:?} wanted", found.faults, exact.faults));
    }
    let lost = |chunk: u32| exact.faults.iter().any(|fault| fault.chunk == chunk);
    if let (Some(found), Some(wanted)) = (&found.routing, &exact.routing) {
        let width = wanted.len() / exact.chunks.len();
        let bad = (0..wanted.len()).find(|&i| found.get(i) != wanted.get(i) && !lost(exact.chunks[i / width]));
        if let Some(i) = bad {
            let (found, wanted) = (found.get(i), wanted[i]);
            return Err(format!("row {} slot {}: expert {found:?}, {wanted} wanted", i / width, i % width));
        }
    }
    let mut worst = 0.0f64;
    let mut first = 0;
    for ((_, width), common) in case.outs.iter().zip(common) {
        for row in (0..exact.chunks.len()).filter(|&row| !lost(exact.chunks[row])) {
            let [found, wanted] = [found, exact].map(|x| &x.logits[row * n_vocab + first..][..*width]);
            let name = |i: usize| format!("row {row} {}: {}, {} wanted", column(case, first + i), found[i], wanted[i]);
            if wanted.iter().any(|x| !x.is_finite()) {
                broken(found, wanted, case, tolerance).map_or(Ok(()), |i| Err(name(i)))?;
                continue;
            }
            let off = |i: usize| (f64::from(found[i]) - f64::from(wanted[i])).abs();
            let difference = (0..*width).map(|i| off(i) * off(i)).sum::<f64>().sqrt();
            let error = difference / norm(wanted).max(*common).max(NOTHING);
            let passes = error <= tolerance; // which NaN does not
            if !passes {
                let at = (0..*width).max_by(|&a, &b| off(a).total_cmp(&off(b))).unwrap();
                return Err(format!("{}; the row is off by {error:.2e} (at most {tolerance:.2e})", name(at)));
            }
            worst = worst.max(error);
        }
        first += width;
    }
    Ok(worst)
}

/// Where a row that the reference breaks is not broken alike: NaN stays NaN and an infinity itself. A quantised row of
/// activations may become NaN as a whole, since its scale does, and so may what a matrix makes of infinities.
fn broken(found: &[f32], wanted: &[f32], case: &Case, tolerance: f64) -> Option<usize> {
    let is_mixed = MIXES.contains(&case.op);
    let largest = wanted.iter().filter(|x| x.is_finite()).fold(1e-3f32, |most, x| most.max(x.abs()));
    (0..wanted.len()).find(|&i| {
        let same = match wanted[i] {
            x if x.is_nan() => found[i].is_nan(),
            x if x.is_infinite() => found[i] == x,
            x => f64::from((found[i] - x).abs()) <= tolerance * f64::from(largest),
        };
        !same && (!is_mixed || found[i].is_finite())
    })
}

/// Ops whose numbers are sums over a row: one that is not finite may break all of the row.
const MIXES: [&str; 5] = ["linear", "gated_linear", "head_linear", "experts", "route"];

fn same_bits(found: &[Answer], wanted: &[Answer], case: &Case) -> Result<(), String> {
    let n_vocab = case.model.0.n_vocab;
    for (found, wanted) in found.iter().zip(wanted) {
        let i = found.step;
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        let bad = (0..wanted.logits.len()).find(|&i| !same(found.logits[i], wanted.logits[i]));
        if let Some(at) = bad {
            let (row, at, a, b) = (at / n_vocab, column(case, at % n_vocab), found.logits[at], wanted.logits[at]);
            return Err(format!("step {i}: row {row} {at}: {a}, its twin has {b}"));
        }
        if (&found.faults, &found.routing) != (&wanted.faults, &wanted.routing) {
            return Err(format!("step {i}: its twin has other faults or experts"));
        }
    }
    Ok(())
}
