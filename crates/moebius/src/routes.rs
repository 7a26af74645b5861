//! Files of recorded routes: which experts the tokens of a run chose, in order.
//!
//! JSON lines: an object with the routers, then for every token an array with the ids of every router's experts, best
//! first; or an object with these `experts`, the `token` and the `weights` of the experts.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use backend::RouterInfo;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::load::{Sequence, Traced, Wanted};
use crate::{input, out};

/// Positions whose logits are in memory at a time.
const AT_ONCE: usize = 64;

/// A file of the routes of texts that is being written.
pub struct Writer<'a> {
    out: &'a mut dyn Write,
    width: usize,
}

/// Writes a file of routes; what `fill` returns.
///
/// # Errors
/// The model has no experts, `fill` fails, or the file cannot be written.
pub fn write<T>(path: &Path, routers: &[RouterInfo], fill: impl FnOnce(&mut Writer<'_>) -> Result<T>) -> Result<T> {
    has_experts(routers)?;
    let width = routers.iter().map(|router| router.n_used).sum();
    let mut filled = None;
    let wrote = out::file(path, |out| {
        writeln!(out, "{}", head(routers))?;
        match filled.insert(fill(&mut Writer { out, width })) {
            Ok(_) => Ok(()),
            Err(error) => Err(io::Error::other(out::chain(error))),
        }
    });
    match filled {
        Some(Err(error)) => Err(error),
        Some(Ok(filled)) => wrote.map(|()| filled),
        None => Err(wrote.err().unwrap_or_else(|| anyhow!("failed to write {}", path.display()))),
    }
}

/// Refuses models without experts.
///
/// # Errors
/// It is one.
pub fn has_experts(routers: &[RouterInfo]) -> Result<()> {
    ensure!(!routers.is_empty(), "failed to trace experts: no layer of the model has any");
    Ok(())
}

impl Writer<'_> {
    /// Feeds tokens to a sequence and writes the routes of all of them; `each` gets the logits from index `from` on.
    ///
    /// # Errors
    /// Computing or writing fails.
    pub fn feed(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        from: usize,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<()> {
        let (silent, scored) = tokens.split_at(from.min(tokens.len()));
        let n_vocab = sequence.n_vocab();
        let silent = silent.chunks(silent.len().max(1)).map(|tokens| (tokens, false));
        for (tokens, logits) in silent.chain(scored.chunks(AT_ONCE).map(|tokens| (tokens, true))) {
            let start = sequence.position();
            let traced = sequence.trace(tokens, Wanted { logits, experts: true, hidden: false })?;
            traced.logits.chunks_exact(n_vocab).enumerate().for_each(|(i, row)| each(start + i, row));
            self.write(tokens, &traced)?;
        }
        Ok(())
    }

    fn write(&mut self, tokens: &[u32], traced: &Traced) -> io::Result<()> {
        for (i, (token, experts)) in tokens.iter().zip(traced.experts.chunks_exact(self.width)).enumerate() {
            let line = match traced.weights.get(i * self.width..(i + 1) * self.width) {
                Some(weights) => json!({"token": token, "experts": experts, "weights": weights}),
                None => json!({"token": token, "experts": experts}),
            };
            writeln!(self.out, "{line}")?;
        }
        Ok(())
    }
}

/// The first line of a file.
fn head(routers: &[RouterInfo]) -> Value {
    let router = |r: &RouterInfo| json!({"layer": r.layer, "n_expert": r.n_expert, "n_used": r.n_used});
    json!({ "routers": routers.iter().map(router).collect::<Vec<_>>() })
}

/// The other lines.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Ids(Vec<u16>),
    Token { experts: Vec<u16> },
}

/// The experts of tokens.
#[derive(Debug)]
pub struct Trace {
    /// Layer, number of experts and number a token, of every router.
    pub routers: Vec<RouterInfo>,
    /// `[tokens][Σ n_used]`.
    pub tokens: Vec<Vec<u16>>,
}

impl Trace {
    /// No tokens yet.
    pub fn new(routers: &[RouterInfo]) -> Trace {
        Trace { routers: routers.to_vec(), tokens: Vec::new() }
    }

    /// Writes a file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        out::file(path, |out| {
            writeln!(out, "{}", head(&self.routers))?;
            self.tokens.iter().try_for_each(|ids| writeln!(out, "{}", json!(ids)))
        })
    }

    /// Reads a file that is for these routers.
    ///
    /// # Errors
    /// The file cannot be read, is none of this kind, or is of another model.
    pub fn read(path: &Path, routers: &[RouterInfo]) -> Result<Trace> {
        let text = input::text(path)?;
        let mut lines = text.lines();
        let failed = || format!("failed to read routes from {}", path.display());
        let head: Value = serde_json::from_str(lines.next().unwrap_or_default()).with_context(failed)?;
        let number = |value: &Value, key: &str| value[key].as_u64().unwrap_or(u64::MAX);
        let same = head["routers"].as_array().is_some_and(|found| {
            found.len() == routers.len()
                && found.iter().zip(routers).all(|(value, router)| {
                    number(value, "n_expert") == router.n_expert as u64
                        && number(value, "n_used") == router.n_used as u64
                })
        });
        ensure!(same, "{}: it has different routers than the model", failed());
        let width: usize = routers.iter().map(|router| router.n_used).sum();
        let mut trace = Trace::new(routers);
        for (i, line) in lines.enumerate() {
            let line: Line = serde_json::from_str(line).with_context(|| format!("{}: line {}", failed(), i + 2))?;
            let (Line::Ids(ids) | Line::Token { experts: ids }) = line;
            let n = ids.len();
            ensure!(n == width, "{}: line {} has {n} experts, expected {width}", failed(), i + 2);
            trace.tokens.push(ids);
        }
        ensure!(!trace.tokens.is_empty(), "{}: no tokens", failed());
        Ok(trace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("routes");
        let routers =
            [RouterInfo { layer: 0, n_expert: 8, n_used: 2 }, RouterInfo { layer: 1, n_expert: 4, n_used: 1 }];
        let trace = Trace { tokens: vec![vec![7, 0, 3], vec![1, 2, 0]], ..Trace::new(&routers) };
        trace.write(&path).unwrap();
        assert_eq!(Trace::read(&path, &routers).unwrap().tokens, trace.tokens);
        let rows = [(vec![7, 0, 3], vec![0.5, 0.25, 1.0]), (vec![1, 2, 0], vec![])];
        let fill = |writer: &mut Writer<'_>| {
            for (experts, weights) in rows {
                writer.write(&[9], &Traced { experts, weights, ..Traced::default() })?;
            }
            Ok(())
        };
        write(&path, &routers, fill).unwrap();
        assert_eq!(Trace::read(&path, &routers).unwrap().tokens, trace.tokens);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            text.ends_with(
                "\n{\"token\":9,\"experts\":[7,0,3],\"weights\":[0.5,0.25,1.0]}\n{\"token\":9,\"experts\":[1,2,0]}\n"
            ),
            "{text}"
        );
        // What fails leaves the old file.
        let why = write(&path, &routers, |_| -> Result<()> { Err(anyhow!("no more")) }).unwrap_err();
        assert_eq!((format!("{why:#}"), std::fs::read_to_string(&path).unwrap()), ("no more".to_string(), text));
        assert!(write(&path, &[], |_| Ok(())).is_err());
        let error = |path: &Path, routers: &[RouterInfo]| format!("{:#}", Trace::read(path, routers).unwrap_err());
        assert!(error(&path, &routers[..1]).ends_with("it has different routers than the model"));
        let text = std::fs::read_to_string(&path).unwrap();
        for (line, why) in [
            ("[1,2]", "line 4 has 2 experts, expected 3"),
            ("{\"experts\":[1]}", "line 4 has 1 experts, expected 3"),
            ("[1,-2,0]", "line 4: data did not match"),
        ] {
            std::fs::write(&path, format!("{text}{line}\n")).unwrap();
            assert!(error(&path, &routers).contains(why), "{}", error(&path, &routers));
        }
    }
}
